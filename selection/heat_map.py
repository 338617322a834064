"""A picture of measurements: who is fastest where, and what the fixed priority and the plan lose.

Bucket by mean KV length, equal lengths on the left, ragged batches on the right. Every cell says in
letters and numbers what its shade says, so that it can be read in grey.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from tp_runtime.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tp_runtime.selection.plan import BackendPlan
    from tp_runtime.selection.rule import Sample

    # microseconds of each backend in each batch that falls into one field of the map
    Batch: TypeAlias = tuple[int, int, int]  # bucket, total_kv, max_kv
    Batches: TypeAlias = Mapping[Batch, Mapping[str, float]]

_DARKEST = 2.0  # a regret from which a field is black


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """What is drawn: measurements, and the plan whose choices are judged by them."""

    title: str
    samples: tuple[Sample, ...]
    plan: BackendPlan

    def save(self, path: Path) -> None:
        """Draw a PNG.

        Raises: ConfigError: matplotlib is not installed, nothing was measured, or the file cannot
            be written.
        """
        figure_class, canvas_class = _matplotlib()
        times = _by_batch(self.samples)
        if not times:
            raise ConfigError("no heat map: nothing was measured; is the selection possible here?")
        buckets = sorted({batch[0] for batch in times})
        lengths = _columns(times)
        letters = _letters([name for name in self.plan.priority if _measured(name, times)])
        rows = (
            ("fastest backend", None),
            ("fixed priority over the fastest", self._default),
            ("the plan's choice over the fastest", self._chosen),
        )
        figure = figure_class(
            figsize=(2.2 + 1.3 * len(lengths), 1.6 + 3 * (0.7 + 0.3 * len(buckets))),
            layout="constrained",
        )
        canvas_class(figure)
        axes = figure.subplots(len(rows), 2, sharex=True, sharey=True, squeeze=False)
        for column, ragged in enumerate((False, True)):
            fields = _fields(times, buckets, lengths, ragged=ragged)
            for row, (about, choice) in enumerate(rows):
                axis = axes[row][column]
                kind = "ragged batches" if ragged else "equal lengths"
                axis.set_title(f"{about}\n{kind}" if row == 0 else about, fontsize=8)
                _draw(axis, fields, letters, choice, len(buckets), len(lengths))
                axis.set_yticks(range(len(buckets)), [str(b) for b in buckets], fontsize=7)
                axis.set_xticks(range(len(lengths)), [str(n) for n in lengths], fontsize=7)
                if row == len(rows) - 1:
                    axis.set_xlabel("mean KV length, tokens", fontsize=8)
                if column == 0:
                    axis.set_ylabel("batch", fontsize=8)
        legend = ", ".join(f"{letter} = {name}" for name, letter in letters.items())
        figure.suptitle(f"{self.title}\n{legend}", fontsize=8)
        try:
            figure.savefig(path, dpi=130, format="png")
        except OSError as error:
            raise ConfigError(
                f"heat map {path}: cannot be written: {error.strerror or error}"
            ) from error

    def _default(self, batch: Batch, us: Mapping[str, float]) -> float:
        return next((us[name] for name in self.plan.priority if name in us), math.nan)

    def _chosen(self, batch: Batch, us: Mapping[str, float]) -> float:
        size, total_kv, max_kv = batch
        choice = self.plan.choose(batch_size=size, total_kv=total_kv, max_kv=max_kv)
        return us.get(choice.backend, math.nan)


def require_matplotlib() -> None:
    """Find out before a long measurement. Raises ConfigError if it is not installed."""
    _matplotlib()


def _matplotlib() -> tuple[Any, Any]:
    try:
        # without pyplot: no display is looked for, and no state is left in the process
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"a heat map needs matplotlib ({error}): pip install 'tp-runtime[report]', or leave "
            "--png away"
        ) from error
    return Figure, FigureCanvasAgg


def _by_batch(samples: Sequence[Sample]) -> Batches:
    times: dict[Batch, dict[str, float]] = {}
    for s in samples:
        times.setdefault((s.bucket, s.total_kv, s.max_kv), {})[s.backend] = s.median_us
    return times


def _measured(name: str, times: Batches) -> bool:
    return any(name in us for us in times.values())


def _is_ragged(batch: Batch) -> bool:
    bucket, total_kv, max_kv = batch
    return max_kv * bucket != total_kv


def _columns(times: Batches) -> list[int]:
    """The mean lengths of the equal batches; of all, if there is none of them."""
    equal = {total // bucket for bucket, total, _ in times if not _is_ragged((bucket, total, _))}
    return sorted(equal or {total // bucket for bucket, total, _ in times})


def _fields(
    times: Batches, buckets: Sequence[int], lengths: Sequence[int], *, ragged: bool
) -> Mapping[tuple[int, int], Batches]:
    """(row, column) -> its batches. A ragged batch goes to the nearest length."""
    fields: dict[tuple[int, int], dict[Batch, Mapping[str, float]]] = {}
    for batch, us in times.items():
        if _is_ragged(batch) != ragged:
            continue
        mean = math.log(batch[1] / batch[0])
        column = min(range(len(lengths)), key=lambda i: abs(math.log(lengths[i]) - mean))
        fields.setdefault((buckets.index(batch[0]), column), {})[batch] = us
    return fields


def _letters(names: Sequence[str]) -> dict[str, str]:
    """A letter of its own for each backend: one of its words', else the next free one."""
    letters: dict[str, str] = {}
    for name in names:
        words = [word for word in name.removeprefix("flashinfer_").split("_") if word != "cpu"]
        wanted = [word[0].upper() for word in words] + [chr(c) for c in range(65, 91)]
        letters[name] = next(letter for letter in wanted if letter not in letters.values())
    return letters


def _draw(
    axis: Any,
    fields: Mapping[tuple[int, int], Batches],
    letters: Mapping[str, str],
    choice: Callable[[Batch, Mapping[str, float]], float] | None,
    height: int,
    width: int,
) -> None:
    """One panel: a shade and a text in every field; fields that were not measured are hatched."""
    shades = [[math.nan] * width for _ in range(height)]
    names = list(letters)
    for (row, column), batches in fields.items():
        if choice is None:
            winner = _fastest(batches, names)
            # light enough that the letter stays readable
            shade = 0.6 * names.index(winner) / max(1, len(names) - 1)
            text = letters[winner]
        else:
            logs = [math.log(choice(b, us) / min(us.values())) for b, us in batches.items()]
            regret = math.exp(sum(logs) / len(logs))
            shade = min(1.0, (regret - 1.0) / (_DARKEST - 1.0))
            text = "-" if math.isnan(regret) else f"{regret:.2f}"
        shades[row][column] = shade
        color = "white" if shade > 0.55 else "black"
        axis.text(column, row, text, ha="center", va="center", fontsize=6.5, color=color)
    axis.set_facecolor("white")
    axis.patch.set_hatch("////")
    axis.patch.set_edgecolor("0.8")
    axis.imshow(shades, cmap="Greys", vmin=0.0, vmax=1.0, aspect="auto", origin="lower")


def _fastest(batches: Batches, names: Sequence[str]) -> str:
    """The backend with the least geometric mean, among those measured in every batch."""
    everywhere = [name for name in names if all(name in us for us in batches.values())]
    return min(
        everywhere or names,
        key=lambda name: sum(math.log(us[name]) for us in batches.values() if name in us),
    )

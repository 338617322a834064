"""Regret: the time of a choice over the time of the best backend in the same cell.

What a benchmark prints and a test checks, computed in one place.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tp_runtime.selection.rule import Sample, select

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from tp_runtime.selection.plan import BackendPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RegretCell:
    """One measured batch: its rows' KV lengths (tokens) and each backend's microseconds."""

    kv_lens: tuple[int, ...]
    times_us: Mapping[str, float]

    @property
    def batch_size(self) -> int:
        return len(self.kv_lens)

    @property
    def ragged(self) -> bool:
        return min(self.kv_lens) != max(self.kv_lens)

    @property
    def best_us(self) -> float:
        return min(self.times_us.values())

    def samples(self) -> list[Sample]:
        return [
            Sample(
                backend=name,
                bucket=self.batch_size,
                total_kv=sum(self.kv_lens),
                max_kv=max(self.kv_lens),
                median_us=us,
            )
            for name, us in self.times_us.items()
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Regret:
    """Geometric mean, 95th percentile and maximum of the ratios; 1.0 is perfect."""

    mean: float
    p95: float
    maximum: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Regret:
        return cls(
            mean=float(np.exp(np.log(ratios).mean())),
            p95=float(np.percentile(ratios, 95)),
            maximum=max(ratios),
        )

    def __str__(self) -> str:
        return f"{self.mean:.2f} / {self.p95:.2f} / {self.maximum:.2f}"


def load_cells(
    path: Path, *, backends: Sequence[str], q_heads: int, kv_heads: int
) -> list[RegretCell]:
    """Read recorded rows of one head shape, keeping only the given backends.

    A row has `median_us` and either `kv_lens` or `batch_size` and `kv_len`.
    """
    cells = []
    for row in json.loads(path.read_text())["rows"]:
        if (row["q_heads"], row["kv_heads"]) != (q_heads, kv_heads):
            continue
        lengths = row["kv_lens"] if "kv_lens" in row else [row["kv_len"]] * row["batch_size"]
        times = {name: float(row["median_us"][name]) for name in backends}
        cells.append(RegretCell(kv_lens=tuple(lengths), times_us=times))
    return cells


def regret_of_one(cells: Iterable[RegretCell], backend: str) -> Regret:
    """Regret of always using one backend."""
    return Regret.of([cell.times_us[backend] / cell.best_us for cell in cells])


def regret_of_plan(cells: Iterable[RegretCell], plan: BackendPlan) -> Regret:
    """Regret of a plan's per-step choices."""
    return Regret.of([_ratio(cell, plan) for cell in cells])


def regret_left_out(
    cells: Iterable[RegretCell],
    training: Sequence[RegretCell],
    make: Callable[[list[Sample]], BackendPlan],
) -> Regret:
    """Regret on cells that the plan did not see: each is judged by a plan made without it."""
    ratios = []
    for cell in cells:
        samples = [s for other in training if other is not cell for s in other.samples()]
        ratios.append(_ratio(cell, make(samples)))
    return Regret.of(ratios)


def regret_of_pairs(cells: Sequence[RegretCell]) -> Regret:
    """Regret of the best pair per bucket with a perfect per-step choice: what two graphs can do."""
    ratios: list[float] = []
    for batch_size in sorted({cell.batch_size for cell in cells}):
        bucket = [cell for cell in cells if cell.batch_size == batch_size]
        names = list(bucket[0].times_us)
        pairs = [(a, b) for i, a in enumerate(names) for b in names[i:]]
        options = [
            [min(c.times_us[a], c.times_us[b]) / c.best_us for c in bucket] for a, b in pairs
        ]
        ratios += min(options, key=lambda option: sum(map(math.log, option)))
    return Regret.of(ratios)


def table(
    equal: Sequence[RegretCell], mixed: Sequence[RegretCell]
) -> list[tuple[str, Regret, Regret]]:
    """The rows (rule, regret on equal lengths, regret on ragged batches).

    Rules that keep one backend per bucket learn from `equal`; the cost models from `mixed`, leaving
    out the cell they are judged on. Both columns are cells of `mixed`.
    """
    names = list(mixed[0].times_us)
    columns = [c for c in mixed if not c.ragged], [c for c in mixed if c.ragged]
    stable = select([s for c in equal for s in c.samples()], priority=names, mode="stable")

    def one(name: str) -> tuple[str, Regret, Regret]:
        a, b = (regret_of_one(column, name) for column in columns)
        return f"always {name}", a, b

    def left_out(label: str, *, corrected: bool, max_variants: int) -> tuple[str, Regret, Regret]:
        def make(samples: list[Sample]) -> BackendPlan:
            return select(samples, priority=names, corrected=corrected, max_variants=max_variants)

        a, b = (regret_left_out(column, mixed, make) for column in columns)
        return label, a, b

    return [
        *(one(name) for name in names),
        ("stable", regret_of_plan(columns[0], stable), regret_of_plan(columns[1], stable)),
        left_out("adaptive, three coefficients", corrected=False, max_variants=2),
        left_out("adaptive", corrected=True, max_variants=2),
        left_out("adaptive, any number of variants", corrected=True, max_variants=len(names)),
        ("best pair, perfect choice", regret_of_pairs(columns[0]), regret_of_pairs(columns[1])),
    ]


def _ratio(cell: RegretCell, plan: BackendPlan) -> float:
    choice = plan.choose(
        batch_size=cell.batch_size, total_kv=sum(cell.kv_lens), max_kv=max(cell.kv_lens)
    )
    return cell.times_us[choice.backend] / cell.best_us

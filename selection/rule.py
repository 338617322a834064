"""The decision: from measured samples to a plan. Pure; no device, no clock, no randomness.

What decides is the ratio between backends in the same cell, never a mean of microseconds, which the
longest KV length would decide alone. The order of the samples and their repetition change nothing:
cells are merged by their median and everything runs in sorted order.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal, TypeAlias

from tp_runtime.errors import SelectionError
from tp_runtime.selection.cost_model import CostModel, Grid, Point, fit_backend
from tp_runtime.selection.plan import BackendPlan, BucketPlan

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tp_runtime.selection.base import DecodeShape

Cell: TypeAlias = tuple[int, int]  # (total_kv, max_kv) within one bucket
Times: TypeAlias = "Mapping[str, Mapping[Cell, float]]"  # backend -> cell -> microseconds

_EPSILON = 1e-9  # two regrets closer than this are equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measurement of one backend on one batch.

    Args:
        bucket: rows of the batch, which is also the bucket it stands for.
        total_kv: sum of the rows' KV lengths, tokens. max_kv: the longest.
        median_us: microseconds of one layer's attention, median of the repeats.
        spread_us: how far the repeats lay apart.
        host_us: host planning before a step, microseconds, not in median_us.
    """

    backend: str
    bucket: int
    total_kv: int
    max_kv: int
    median_us: float
    spread_us: float = 0.0
    host_us: float = 0.0


def select(
    samples: Iterable[Sample],
    *,
    priority: Sequence[str],
    mode: Literal["stable", "adaptive"] = "adaptive",
    max_variants: int = 2,
    margin: float = 0.05,
    buckets: Iterable[int] = (),
    priority_version: int = 0,
    host_share: float = 0.0,
    shape: DecodeShape | None = None,
    device: str = "",
    corrected: bool = True,
) -> BackendPlan:
    """Make a plan from measurements.

    Args:
        samples: any order; repeated measurements of a cell are merged by their median.
        priority: usable backends, preferred first. Ties go to the earlier.
        mode: "stable" keeps one backend per bucket, the first of the priority order unless another
            is better by `margin` at every measured point; "adaptive" keeps up to `max_variants`
            and decides in each step by their cost models.
        max_variants: most backends (captured graphs) per bucket, adaptive only.
        margin: a gain of at most this share at every point keeps no variant. It never influences
            the choice of a step.
        buckets: buckets the plan must have besides the measured ones; the fixed priority there.
        priority_version: stored with the plan.
        host_share: how much of `host_us` a layer pays; 0 where planning is hidden behind the
            device, one over the number of layers where it is not.
        shape, device: stored with the plan.
        corrected: False fits the three coefficients alone.

    Raises: SelectionError: a sample or an argument makes no sense; names it.
    """
    if mode not in ("stable", "adaptive"):
        raise SelectionError(f"mode: expected 'stable' or 'adaptive', got {mode!r}")
    if max_variants < 1 or not margin >= 0.0:
        raise SelectionError(
            f"need max_variants >= 1 and margin >= 0, got {max_variants}, {margin}"
        )
    order = tuple(dict.fromkeys(priority))
    measured = _merged(samples, order, host_share)
    if not measured:
        return BackendPlan.fixed(
            order, buckets, priority_version=priority_version, shape=shape, device=device
        )
    compared = {bucket: _comparable(times, order) for bucket, times in measured.items()}
    grids = (
        {bucket: _grid(bucket, times) for bucket, times in compared.items()} if corrected else {}
    )
    models = _fit(compared, order, grids) if mode == "adaptive" else {}
    entries = []
    for bucket in sorted({*measured, *buckets}):
        if bucket not in compared:
            entries.append(BucketPlan(bucket=bucket, variants=(order[0],)))
            continue
        times = compared[bucket]
        if mode == "stable":
            entries.append(BucketPlan(bucket=bucket, variants=(_stable(times, margin),)))
            continue
        bucket_models = {name: models[name][bucket] for name in times}
        kept = _adaptive(bucket, times, bucket_models, grids.get(bucket), max_variants, margin)
        entries.append(
            BucketPlan(
                bucket=bucket,
                variants=kept,
                models=tuple(bucket_models[name] for name in kept),
                grid=grids.get(bucket),
            )
        )
    return BackendPlan(
        priority=order,
        entries=tuple(entries),
        priority_version=priority_version,
        mode=mode,
        margin=margin,
        shape=shape,
        device=device,
    )


def select_stable(
    samples: Iterable[Sample], *, priority: Sequence[str], margin: float = 0.05
) -> BackendPlan:
    """One backend per bucket: `select` with mode="stable"."""
    return select(samples, priority=priority, mode="stable", margin=margin)


def _merged(
    samples: Iterable[Sample], order: tuple[str, ...], host_share: float
) -> dict[int, dict[str, dict[Cell, float]]]:
    """bucket -> backend -> cell -> microseconds; each level in sorted order."""
    raw: dict[tuple[int, int, Cell], list[float]] = {}
    rank = {name: i for i, name in enumerate(order)}
    for s in samples:
        if s.backend not in rank:
            raise SelectionError(
                f"sample of {s.backend!r}, which is not in the priority order {order}"
            )
        cost = s.median_us + host_share * s.host_us
        if not (math.isfinite(cost) and cost > 0.0):
            raise SelectionError(f"expected a positive finite time, got {s!r}")
        if s.bucket < 1 or not 1 <= s.max_kv <= s.total_kv <= s.max_kv * s.bucket:
            raise SelectionError(f"expected 1 <= max_kv <= total_kv <= max_kv * bucket, got {s!r}")
        raw.setdefault((s.bucket, rank[s.backend], (s.total_kv, s.max_kv)), []).append(cost)
    merged: dict[int, dict[str, dict[Cell, float]]] = {}
    for (bucket, position, cell), costs in sorted(raw.items()):
        merged.setdefault(bucket, {}).setdefault(order[position], {})[cell] = median(costs)
    return merged


def _comparable(times: Times, order: tuple[str, ...]) -> dict[str, dict[Cell, float]]:
    """Backends that were measured wherever the first measured one was, on those cells."""
    default = next(name for name in order if name in times)
    cells = times[default]
    return {
        name: {cell: times[name][cell] for cell in cells}
        for name in order
        if name in times and cells.keys() <= times[name].keys()
    }


def _grid(bucket: int, times: Times) -> Grid:
    cells = next(iter(times.values()))
    return Grid.over(
        [Point(bucket=bucket, total_kv=t, max_kv=m, us=us) for (t, m), us in cells.items()]
    )


def _fit(
    compared: Mapping[int, Times], order: tuple[str, ...], grids: dict[int, Grid]
) -> dict[str, dict[int, CostModel]]:
    """backend -> bucket -> model. Each backend alone: no backend changes another's model."""
    models = {}
    for name in order:
        points = [
            Point(bucket=bucket, total_kv=total_kv, max_kv=max_kv, us=us)
            for bucket, times in compared.items()
            if name in times
            for (total_kv, max_kv), us in times[name].items()
        ]
        if points:
            models[name] = fit_backend(points, grids, corrected=bool(grids))
    return models


def _stable(times: Times, margin: float) -> str:
    """The first backend, unless one beats it by the margin at every point (one tie allowed)."""
    default, *challengers = times
    best, best_gain = default, 0.0
    for name in challengers:
        ratios = [times[default][cell] / us for cell, us in times[name].items()]
        wins = sum(ratio >= 1.0 + margin for ratio in ratios)
        ties = sum(1.0 / (1.0 + margin) < ratio < 1.0 + margin for ratio in ratios)
        gain = sum(map(math.log, ratios))
        if wins and ties <= 1 and wins + ties == len(ratios) and gain > best_gain + _EPSILON:
            best, best_gain = name, gain
    return best


def _adaptive(
    bucket: int,
    times: Times,
    models: Mapping[str, CostModel],
    grid: Grid | None,
    max_variants: int,
    margin: float,
) -> tuple[str, ...]:
    """The set with the least regret when its models choose, less what gains only the margin.

    Returns: names in priority order.
    """
    names = list(times)
    cells = list(times[names[0]])
    predicted = {
        name: [
            models[name].predict_us(grid, bucket=bucket, total_kv=total_kv, max_kv=max_kv)
            for total_kv, max_kv in cells
        ]
        for name in names
    }

    def reached(chosen: Sequence[str]) -> list[float]:
        """Microseconds per cell when the models choose among these."""
        return [
            times[min(chosen, key=lambda name: predicted[name][i])][cell]
            for i, cell in enumerate(cells)
        ]

    def mean_log(us: Sequence[float]) -> float:
        return sum(map(math.log, us)) / len(us)

    def never_worse(us: Sequence[float], reference: Sequence[float]) -> bool:
        return all(a <= b * (1.0 + margin) for a, b in zip(us, reference, strict=True))

    best: tuple[str, ...] = (names[0],)
    best_mean = mean_log(reached(best))
    for size in range(1, min(max_variants, len(names)) + 1):
        for chosen in itertools.combinations(names, size):
            mean = mean_log(reached(chosen))
            if mean < best_mean - _EPSILON:
                best, best_mean = chosen, mean
    target = reached(best)
    for size in range(1, len(best)):  # a smaller part of it will do, if no point loses more
        enough = [
            part
            for part in itertools.combinations(best, size)
            if never_worse(reached(part), target)
        ]
        if enough:
            best = min(enough, key=lambda part: mean_log(reached(part)))
            break
    if len(best) == 1:  # and the preferred backend will do, on the same terms
        return next((name,) for name in names if never_worse(reached((name,)), target))
    return best

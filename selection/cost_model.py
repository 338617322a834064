"""How long a backend takes, from two numbers a scheduler knows: sum and maximum of the KV lengths.

Two parts, both fitted on relative error:

1. t = fixed + per_token * sum(kv) + per_longest * max(kv), coefficients >= 0, one fit per bucket
   and backend. The first slope is the memory system, the second the longest row, which a kernel
   with a fixed split cannot share out.
2. A correction of what part 1 misses: the logarithm of measured / predicted, smoothed by kernel
   ridge regression (a Gaussian process mean; Rasmussen and Williams, "Gaussian Processes for
   Machine Learning", 2006, equations 2.25 and 5.12) over ALL buckets of the backend, so that
   neighbouring batch sizes help each other. Its length scales are natural units, not tuned
   numbers: one doubling of the batch, one e-fold of the mean length, one e-fold of raggedness.

The correction is tabulated on a small grid per bucket, so that evaluating a model is a table
look-up and not a sum over samples.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

FloatArray: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

_NOISE = 0.1  # ridge: variance of the noise over the variance of the signal
_GRID_STEP = 0.35  # in e-folds; at a third of the length scale linear interpolation is exact enough
_SIGNIFICANT_DIGITS = 9  # what is stored is what is used, on every machine that reads the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measured cell of one backend: lengths in tokens, time in microseconds."""

    bucket: int
    total_kv: int
    max_kv: int
    us: float

    @property
    def log_mean(self) -> float:
        """Logarithm of the mean KV length over the bucket's rows."""
        return math.log(self.total_kv / self.bucket)

    @property
    def log_ragged(self) -> float:
        """Logarithm of longest over mean: 0 where all rows are equally long."""
        return math.log(self.max_kv * self.bucket / self.total_kv)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Where a bucket's corrections are tabulated: mean length by raggedness, in e-folds."""

    mean_low: float
    mean_step: float
    mean_count: int
    ragged_low: float
    ragged_step: float
    ragged_count: int

    @classmethod
    def over(cls, points: Sequence[Point]) -> Grid:
        """The smallest grid that covers the points; outside it the edge value holds."""
        mean = _axis([p.log_mean for p in points])
        ragged = _axis([p.log_ragged for p in points])
        return cls(
            mean_low=mean[0],
            mean_step=mean[1],
            mean_count=mean[2],
            ragged_low=ragged[0],
            ragged_step=ragged[1],
            ragged_count=ragged[2],
        )

    def nodes(self) -> list[tuple[float, float]]:
        """(log mean, log raggedness) of each node, raggedness fastest."""
        return [
            (self.mean_low + i * self.mean_step, self.ragged_low + j * self.ragged_step)
            for i in range(self.mean_count)
            for j in range(self.ragged_count)
        ]

    def locate(self, log_mean: float, log_ragged: float) -> tuple[int, float, float]:
        """Index of the lower corner and the two fractions, clamped to the grid."""
        x = (log_mean - self.mean_low) / self.mean_step
        y = (log_ragged - self.ragged_low) / self.ragged_step
        last_x = self.mean_count - 2
        last_y = self.ragged_count - 2
        i = 0 if x < 0.0 else (last_x if x >= last_x else int(x))
        j = 0 if y < 0.0 else (last_y if y >= last_y else int(y))
        x -= i
        y -= j
        return (
            i * self.ragged_count + j,
            0.0 if x < 0.0 else (1.0 if x > 1.0 else x),
            0.0 if y < 0.0 else (1.0 if y > 1.0 else y),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Predicted microseconds of one backend in one bucket.

    `factors` are the corrections on the bucket's grid (multiplied in); empty for none. `error` is
    the root mean square relative error, each sample predicted from the others' corrections.
    """

    fixed_us: float
    per_token_us: float
    per_longest_us: float
    factors: tuple[float, ...] = ()
    error: float = 0.0

    def base_us(self, total_kv: float, max_kv: float) -> float:
        return self.fixed_us + self.per_token_us * total_kv + self.per_longest_us * max_kv

    def predict_us(self, grid: Grid | None, *, bucket: int, total_kv: int, max_kv: int) -> float:
        """Microseconds for a step of `bucket` rows (padded rows count as rows of no length)."""
        base = self.base_us(total_kv, max_kv)
        if grid is None or not self.factors:
            return base
        corner, x, y = grid.locate(
            math.log(total_kv / bucket), math.log(max_kv * bucket / total_kv)
        )
        f = self.factors
        above = corner + grid.ragged_count
        low = f[corner] + y * (f[corner + 1] - f[corner])
        high = f[above] + y * (f[above + 1] - f[above])
        return base * (low + x * (high - low))


def fit_backend(
    points: Sequence[Point], grids: dict[int, Grid], *, corrected: bool = True
) -> dict[int, CostModel]:
    """Fit one backend over all its buckets.

    Args:
        points: its cells, each once, in a canonical order (the caller sorts and merges).
        grids: the correction grid of each bucket.
        corrected: False keeps part 1 alone, for comparison.

    Returns: a model per bucket that has points.
    """
    by_bucket: dict[int, list[Point]] = {}
    for point in points:
        by_bucket.setdefault(point.bucket, []).append(point)
    bases = {bucket: _fit_base(cells) for bucket, cells in by_bucket.items()}
    residuals = np.array(
        [math.log(p.us / bases[p.bucket].base_us(p.total_kv, p.max_kv)) for p in points]
    )
    if not corrected:
        return {
            bucket: _with_error(bases[bucket], residuals[_rows(points, bucket)])
            for bucket in by_bucket
        }
    where = np.array([_coordinates(p.bucket, p.log_mean, p.log_ragged) for p in points])
    inverse = np.linalg.inv(_kernel(where, where) + _NOISE * np.eye(len(points)))
    weights = inverse @ residuals
    left_out = weights / np.diag(inverse)  # residual of each sample when predicted by the others
    models = {}
    for bucket in by_bucket:
        nodes = np.array(
            [_coordinates(bucket, mean, ragged) for mean, ragged in grids[bucket].nodes()]
        )
        factors = np.exp(_kernel(nodes, where) @ weights)
        base = bases[bucket]
        models[bucket] = _with_error(
            CostModel(
                fixed_us=base.fixed_us,
                per_token_us=base.per_token_us,
                per_longest_us=base.per_longest_us,
                factors=tuple(_rounded(float(f)) for f in factors),
            ),
            left_out[_rows(points, bucket)],
        )
    return models


def nonnegative_least_squares(a: FloatArray, b: FloatArray) -> FloatArray:
    """Minimise |a @ x - b| over x >= 0, exactly, by trying every active set (few columns only)."""
    columns = a.shape[1]
    best, best_error = np.zeros(columns), float(b @ b)
    for size in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), size):
            part, *_ = np.linalg.lstsq(a[:, chosen], b, rcond=None)
            if (part < 0.0).any():
                continue
            error = float(np.square(a[:, chosen] @ part - b).sum())
            if error < best_error * (1.0 - 1e-12):
                best, best_error = np.zeros(columns), error
                best[list(chosen)] = part
    return best


def _fit_base(points: Sequence[Point]) -> CostModel:
    times = np.array([p.us for p in points])
    terms = np.array([[1.0, p.total_kv, p.max_kv] for p in points]) / times[:, None]
    scale = terms.max(axis=0)
    fixed, per_token, per_longest = (
        nonnegative_least_squares(terms / scale, np.ones(len(points))) / scale
    )
    return CostModel(
        fixed_us=_rounded(float(fixed)),
        per_token_us=_rounded(float(per_token)),
        per_longest_us=_rounded(float(per_longest)),
    )


def _with_error(model: CostModel, log_errors: FloatArray) -> CostModel:
    return CostModel(
        fixed_us=model.fixed_us,
        per_token_us=model.per_token_us,
        per_longest_us=model.per_longest_us,
        factors=model.factors,
        error=_rounded(float(np.sqrt(np.square(np.expm1(log_errors)).mean()))),
    )


def _rows(points: Sequence[Point], bucket: int) -> list[int]:
    return [i for i, point in enumerate(points) if point.bucket == bucket]


def _coordinates(bucket: int, log_mean: float, log_ragged: float) -> tuple[float, float, float]:
    return math.log2(bucket), log_mean, log_ragged


def _kernel(a: FloatArray, b: FloatArray) -> FloatArray:
    half = 0.5 * np.square(a).sum(axis=1)[:, None] + 0.5 * np.square(b).sum(axis=1)
    kernel: FloatArray = np.exp(a @ b.T - half)
    return kernel


def _axis(values: Sequence[float]) -> tuple[float, float, int]:
    low, high = min(values), max(values)
    # at least two nodes, so that a look-up needs no special case
    count = max(2, math.ceil((high - low) / _GRID_STEP) + 1)
    step = (high - low) / (count - 1)
    return _rounded(low), _rounded(step) if step > 1e-6 else 1.0, count


def _rounded(value: float) -> float:
    return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")

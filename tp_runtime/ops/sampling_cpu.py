"""The CPU forms of `tp_runtime.ops.sampling`: row by row in numpy, far fewer passes over a row.

Same signatures and same results as the torch forms there, but for the rounding of logarithms,
which are float64 here. They look at values to skip work, so they cannot be captured.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from tp_runtime.ops.noise import row_key, uniform_numpy, weyl_numpy

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Row = NDArray[np.float32]

_LN2: Final = math.log(2.0)
_NONE: Final = -1


def greedy(logits: Tensor, vocab_start: int) -> tuple[Tensor, Tensor]:
    """See `tp_runtime.ops.sampling.greedy`."""
    values = logits.detach().numpy()
    # numpy's argmax takes the first of equals, and a NaN before any number
    best = values.argmax(axis=1) if values.shape[0] > 1 else np.array([values[0].argmax()])
    score = np.take_along_axis(values, best[:, None], axis=1)[:, 0]
    return torch.from_numpy(score), torch.from_numpy(best + vocab_start)


def one_rank_ids(score: Tensor, ids: Tensor) -> Tensor:
    """The ids, with -1 where the score says that the row has no token. May reuse ids."""
    values, scores = ids.numpy(), score.numpy()
    values[~(scores > -np.inf)] = _NONE  # also true of a NaN
    return ids


def random(
    logits: Tensor, vocab_start: int, temperature: Tensor, seed: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """See `tp_runtime.ops.sampling.random`."""
    values = logits.detach().numpy()
    rows, vocab = values.shape
    scores = np.empty(rows, dtype=np.float32)
    ids = np.empty(rows, dtype=np.int64)
    weyl = weyl_numpy(vocab_start, vocab)
    params = zip(temperature.tolist(), seed.tolist(), position.tolist(), strict=True)
    for row, (heat, start, at) in enumerate(params):
        scores[row], local = _draw(values[row], heat, row_key(start, at), weyl)
        ids[row] = local + vocab_start
    return torch.from_numpy(scores), torch.from_numpy(ids)


def filtered(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """See `tp_runtime.ops.sampling.filtered`."""
    values = logits.detach().numpy()
    ids = np.empty(values.shape[0], dtype=np.int64)
    weyl = weyl_numpy(0, values.shape[1])
    columns = (temperature, top_k, top_p, min_p, seed, position)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for row, (heat, k, p, m, start, at) in enumerate(rows):
        line, key = values[row], row_key(start, at)
        kept = None if heat == 0.0 else kept_ids(line, temperature=heat, top_k=k, top_p=p, min_p=m)
        if kept is None:
            score, best = _draw(line, heat, key, weyl)
        else:
            score, of_kept = _draw(line[kept], heat, key, weyl[kept])
            best = int(kept[of_kept])
        ids[row] = best if score > -np.inf else _NONE  # a NaN is not above -inf either
    return torch.from_numpy(ids)


def kept_ids(
    line: Row, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> NDArray[np.int64] | None:
    """The ids that top-k, top-p and min-p leave, ascending; None when they leave all.

    Args:
        line: float32 [vocab].
        temperature: above 0.  top_k: 0 for all.  top_p: in (0, 1].  min_p: in [0, 1].
    """
    vocab = line.shape[0]
    limit = top_k if 0 < top_k < vocab else vocab
    if limit == vocab and top_p >= 1.0 and min_p <= 0.0:
        return None
    best = line.max()
    if not np.isfinite(best):
        # inf: only the infinite ones can be drawn. NaN or all -inf: nothing can, and it must show
        return np.flatnonzero(line == best) if best > 0 else None
    total: float | None = None
    if limit < vocab:
        # the k-th best and everything equal to it; the stable sort below cuts at k
        candidates = np.flatnonzero(line >= np.partition(line, vocab - limit)[vocab - limit])
    elif top_p < 1.0:
        candidates, total = _holders_of(line, best, temperature, top_p)
    else:
        # a little wide, to allow for float32; the exact test follows
        edge = float(best) * (1.0 - math.copysign(1e-6, float(best)))
        candidates = np.flatnonzero(
            line >= np.float32(edge + temperature * (math.log(min_p) - 1e-3))
        )
    order = np.argsort(-line[candidates], kind="stable")[:limit]
    weight = _weights(line[candidates[order]], best, temperature)
    kept = len(order)
    if top_p < 1.0:
        reached = np.cumsum(weight)
        goal = top_p * (reached[-1] if total is None else total)
        kept = min(kept, int(np.searchsorted(reached, goal, side="left")) + 1)
    if min_p > 0.0:
        kept = min(kept, int(np.count_nonzero(weight >= min_p)))
    return np.sort(candidates[order[: max(kept, 1)]])


def _holders_of(
    line: Row, best: np.float32, temperature: float, share: float
) -> tuple[NDArray[np.int64], float]:
    """The best ids that hold at least this share of the probability, and the sum of all weights.

    Sorting a whole row costs more than everything else here, so the ids to sort are found by
    lowering a threshold until the ids above it weigh enough.
    """
    weight = _weights(line, best, temperature)
    total = float(weight.sum())
    floor = 0.5
    while floor > 0.0:
        candidates = np.flatnonzero(weight >= floor)
        if float(weight[candidates].sum()) >= share * total * (1.0 + 1e-9):
            return candidates, total
        floor = floor / 4 if floor > 1e-30 else 0.0
    return np.arange(line.shape[0]), total


def _weights(line: Row, best: np.float32, temperature: float) -> NDArray[np.float64]:
    weight = line.astype(np.float64)
    weight -= best
    weight /= temperature
    torch.exp(held := torch.from_numpy(weight), out=held)  # vectorised, unlike numpy's in float64
    return weight


def _draw(
    line: Row, temperature: float, key: int, weyl: NDArray[np.uint64]
) -> tuple[np.float32, int]:
    """The best noisy score of a row and its index; the plain best for temperature 0.

    With v the uniform number, the noise -log(-log(1 - v)) is at most -log(v), and the float bits
    of v read as an integer give a lower bound of log2(v) without a logarithm (the chord below the
    curve). So one cheap pass finds the few ids that can win, and only these take logarithms.
    """
    if temperature == 0.0:
        at = int(line.argmax())
        return line[at], at
    work = _work(line.shape[0])
    uniform_numpy(key, weyl, work.bits, work.scratch, work.uniform)
    slope = -temperature * _LN2 * 2.0**-23
    bound = work.bound
    np.copyto(bound, work.uniform.view(np.int32), casting="same_kind")
    np.multiply(bound, np.float32(slope), out=bound)
    np.add(bound, line, out=bound)
    first = int(bound.argmax())
    first_score = _scores(line[first : first + 1], work.uniform[first : first + 1], temperature)[0]
    if np.isnan(first_score):
        return first_score, first
    # the bound was left without its constant, and is rounded in float32: a few units of its size
    rounding = 1e-6 * (130.0 * temperature + abs(float(first_score)))
    least = float(first_score) - 127.0 * temperature * _LN2 - rounding
    if not math.isfinite(least):
        return first_score, first  # +inf: the first of them; -inf: nothing can be drawn
    able = np.flatnonzero(bound >= np.float32(least))
    scores = _scores(line[able], work.uniform[able], temperature)
    at = int(scores.argmax())
    return scores[at], int(able[at])


def _scores(line: Row, uniform: Row, temperature: float) -> Row:
    noise = -np.log(-np.log1p(-uniform.astype(np.float64)))
    score: Row = (line + temperature * noise).astype(np.float32)
    return score


class _Work:
    """Buffers for one row length; allocating them per call would cost more than the arithmetic."""

    __slots__ = ("bits", "bound", "scratch", "uniform")

    def __init__(self, vocab: int) -> None:
        self.bits = np.empty(vocab, dtype=np.uint64)
        self.scratch = np.empty(vocab, dtype=np.uint64)
        self.uniform = np.empty(vocab, dtype=np.float32)
        self.bound = np.empty(vocab, dtype=np.float32)

    def cut(self, vocab: int) -> _Work:
        view = _Work.__new__(_Work)
        for name in self.__slots__:
            setattr(view, name, getattr(self, name)[:vocab])
        return view


_local = threading.local()


def _work(vocab: int) -> _Work:
    held: _Work | None = getattr(_local, "work", None)
    if held is None or held.bits.shape[0] < vocab:
        held = _local.work = _Work(vocab)
    return held if held.bits.shape[0] == vocab else held.cut(vocab)

"""Draw one token per row from logits whose vocabulary is sliced over the ranks of a group.

A row's token depends on its own logits, parameters, seed and position only: not on the batch, the
slot, the mode of the batch or the number of ranks (up to the rounding of the logits themselves).
Rows with temperature 0 take the best token in every mode.

The rule, for a row with temperature t > 0: score(id) = logit(id) + t * noise(seed, position, id),
rounded to float32; the best score among the kept ids wins, the lowest id among equals. This is the
Gumbel-max form of drawing from softmax(logits / t). Kept are, of the ids in order of their logits
(lowest id first among equals): the first top_k; of these the shortest prefix whose share of their
probability reaches top_p; and of these the ones at least min_p times as likely as the first.

A row that holds a NaN, or nothing above -inf, has no token: its result is INVALID_TOKEN on every
rank, for the host to fail the request when it harvests it. Nothing here waits for a device.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final, Protocol

import torch

from tp_runtime.ops import sampling_cpu, sampling_gpu
from tp_runtime.ops.kernels import runs_kernels
from tp_runtime.ops.noise import gumbel, row_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tp_runtime.sampling import SamplingParams

INVALID_TOKEN: Final = -1
"""The result of a row without a token. Clamp it before it indexes an embedding."""

_ID_MASK: Final = 0xFFFFFFFF
_NAN_ORDER: Final = 0x7FFFFFFF  # a NaN pattern: above the order of every number
_NEG_INF_ORDER: Final = -0x7F800001  # the order of -inf


class SamplerMode(IntEnum):
    """What a batch needs at least; a batch runs with the largest mode of its rows."""

    GREEDY = 0
    RANDOM = 1
    FILTERED = 2


class SampleGroup(Protocol):
    """The part of a TpGroup that sampling uses."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, t: Tensor, /) -> Tensor:
        """[size, *t.shape], in rank order."""
        ...


def mode_of(params: SamplingParams) -> SamplerMode:
    """The least mode that serves these parameters; decided on the host, no tensor is read."""
    if params.greedy:
        return SamplerMode.GREEDY
    return SamplerMode.FILTERED if params.filters else SamplerMode.RANDOM


def gather_vocab_sizes(
    group: SampleGroup, vocab_local: int, device: torch.device
) -> tuple[int, ...]:
    """Learn how many columns each rank's slice has. For start-up: it waits for the device."""
    if group.size == 1:
        return (vocab_local,)
    sizes = group.all_gather(torch.tensor([vocab_local], dtype=torch.int64, device=device))
    return tuple(int(n) for n in sizes.flatten().tolist())


def sample(
    logits: Tensor,
    *,
    vocab_start: int,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    mode: SamplerMode,
    group: SampleGroup,
    vocab_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Draw a token for each row; every rank gets the same ids.

    Args:
        logits: [rows, vocab_local], this rank's slice; any float dtype, computed in float32.
        vocab_start: global id of the slice's first column.
        temperature, top_p, min_p: float32 [rows].  top_k, seed, position: int64 [rows].
        mode: at least `mode_of` of every row, equal on all ranks. All shapes follow from it and
            from the shape of logits, so that the call can be captured.
        group: the ranks that share the vocabulary.
        vocab_sizes: columns of every rank's slice, in rank order; None when all are alike.

    Returns:
        int64 [rows]: global vocabulary ids, or INVALID_TOKEN.

    Raises:
        ValueError: shapes do not fit each other, or vocab_start does not follow from the sizes.
    """
    rows, vocab_local = logits.shape
    for name, row_values in (
        ("temperature", temperature),
        ("top_k", top_k),
        ("top_p", top_p),
        ("min_p", min_p),
        ("seed", seed),
        ("position", position),
    ):
        if row_values.shape != (rows,):
            raise ValueError(f"{name}: expected shape ({rows},), got {tuple(row_values.shape)}")
    sizes = _checked_sizes(vocab_sizes, vocab_start, vocab_local, group)
    if rows == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    kernels = runs_kernels(logits.device)
    if not kernels:
        logits = logits.float()
    elif logits.stride(1) != 1:
        logits = logits.contiguous()
    if mode is SamplerMode.FILTERED:
        mine = slice(group.rank, rows, group.size)
        full = _gather_rows(logits, sizes, mine, group)
        draw = filtered
        if kernels:
            draw = sampling_gpu.filtered
        elif full.device.type == "cpu":
            draw = sampling_cpu.filtered
        ids = draw(
            full,
            temperature[mine],
            top_k[mine],
            top_p[mine],
            min_p[mine],
            seed[mine],
            position[mine],
        )
        return _share_rows(ids, rows, group)
    if kernels:
        noise = tuple(t.contiguous() for t in (temperature, seed, position))
        noise = () if mode is SamplerMode.GREEDY else noise
        if group.size == 1:
            return sampling_gpu.best_tokens(logits, *noise)
        keys = sampling_gpu.best_keys(logits, vocab_start, *noise)
        return sampling_gpu.tokens_of_keys(group.all_gather(keys))
    if logits.device.type == "cpu":
        if mode is SamplerMode.GREEDY:
            best = sampling_cpu.greedy(logits, vocab_start)
        else:
            best = sampling_cpu.random(logits, vocab_start, temperature, seed, position)
        if group.size == 1:
            return sampling_cpu.one_rank_ids(*best)
    elif mode is SamplerMode.GREEDY:
        best = greedy(logits, vocab_start)
    else:
        best = random(logits, vocab_start, temperature, seed, position)
    return _best_of_ranks(*best, group)


def greedy(logits: Tensor, vocab_start: int) -> tuple[Tensor, Tensor]:
    """The best of this rank's slice: (float32 [rows] logits, int64 [rows] global ids).

    A NaN in the row makes the score NaN; the id then means nothing.
    """
    best = logits.amax(dim=1)
    # argmax promises no order among equals, so the lowest equal id is asked for in words
    ids = torch.arange(vocab_start, vocab_start + logits.shape[1], device=logits.device)
    equal = torch.where(logits == best[:, None], ids, _ID_MASK)
    return best, equal.amin(dim=1)


def random(
    logits: Tensor, vocab_start: int, temperature: Tensor, seed: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """The best noisy score of this rank's slice, like `greedy`."""
    noise = gumbel(row_keys(seed, position), vocab_start, logits.shape[1])
    return greedy(logits + temperature[:, None] * noise, vocab_start)


def filtered(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """Draw from whole rows [rows, vocab] with top-k, top-p and min-p: int64 [rows].

    The kept ids are exact: probabilities and their running sum are float64.
    """
    vocab = logits.shape[1]
    ordered, order = torch.sort(logits, dim=1, descending=True, stable=True)
    best = ordered[:, :1].double()
    heat = temperature[:, None].double()
    # x - x is 0 also for the best of a row whose best is inf
    distance = torch.where(ordered == ordered[:, :1], 0.0, ordered.double() - best)
    weight = torch.exp(distance / torch.where(heat > 0, heat, 1.0))
    rank_in_row = torch.arange(vocab, device=logits.device)[None, :]
    limit = torch.where(top_k > 0, top_k, vocab)[:, None]
    weight = torch.where(rank_in_row < limit, weight, 0.0)
    before = torch.cumsum(weight, dim=1)
    total = before[:, -1:]
    reached = torch.zeros_like(before)
    reached[:, 1:] = before[:, :-1]
    p = top_p[:, None].double()
    kept = (rank_in_row < limit) & ((reached < p * total) | (p >= 1.0))
    kept &= weight >= min_p[:, None].double()
    kept[:, 0] = True  # the best token is never dropped, whatever the rounding
    noise = torch.gather(gumbel(row_keys(seed, position), 0, vocab), 1, order)
    score = ordered + temperature[:, None] * noise
    # a NaN sorts first and is kept, so that it still shows
    score = torch.where(kept, score, -torch.inf)
    by_id = torch.empty_like(score).scatter_(1, order, score)
    best_score, ids = greedy(by_id, 0)
    return _decode(_encode(best_score, ids))


def _checked_sizes(
    vocab_sizes: Sequence[int] | None, vocab_start: int, vocab_local: int, group: SampleGroup
) -> tuple[int, ...]:
    sizes = tuple(vocab_sizes) if vocab_sizes is not None else (vocab_local,) * group.size
    if len(sizes) != group.size or sizes[group.rank] != vocab_local:
        raise ValueError(
            f"rank {group.rank}: vocab_sizes must name {group.size} slices and "
            f"{vocab_local} columns for this rank, got {sizes}"
        )
    if sum(sizes[: group.rank]) != vocab_start:
        raise ValueError(
            f"rank {group.rank}: vocab_start is {vocab_start}, but the slices before it have "
            f"{sum(sizes[: group.rank])} columns; pass vocab_sizes when slices differ"
        )
    return sizes


def _gather_rows(logits: Tensor, sizes: tuple[int, ...], mine: slice, group: SampleGroup) -> Tensor:
    """This rank's share of the rows, with all columns: [rows of the share, vocab]."""
    if group.size == 1:
        return logits
    width = max(sizes)
    if logits.shape[1] < width:
        padded = logits.new_full((logits.shape[0], width), -torch.inf)
        padded[:, : logits.shape[1]] = logits
        logits = padded
    slices = group.all_gather(logits.contiguous())
    return torch.cat([slices[r, mine, :size] for r, size in enumerate(sizes)], dim=1)


def _share_rows(ids: Tensor, rows: int, group: SampleGroup) -> Tensor:
    """Collect the ids of rows that were dealt out to the ranks one by one."""
    if group.size == 1:
        return ids
    share = -(-rows // group.size)
    padded = ids.new_zeros(share)
    padded[: ids.shape[0]] = ids
    return group.all_gather(padded).t().reshape(-1)[:rows].contiguous()


def _best_of_ranks(score: Tensor, ids: Tensor, group: SampleGroup) -> Tensor:
    key = _encode(score, ids)
    if group.size > 1:
        key = group.all_gather(key).amax(dim=0)
    return _decode(key)


def _encode(score: Tensor, ids: Tensor) -> Tensor:
    """One int64 per row whose order is (score, then lowest id), with NaN above all numbers."""
    # + 0.0 turns -0.0 into 0.0, which is equal to it but has other bits
    bits = (score + 0.0).view(torch.int32).to(torch.int64)
    order = torch.where(bits < 0, bits ^ _NAN_ORDER, bits)
    order = torch.where(score.isnan(), _NAN_ORDER, order)
    return (order << 32) | (_ID_MASK - ids)


def _decode(key: Tensor) -> Tensor:
    order = key >> 32
    none = (order == _NAN_ORDER) | (order <= _NEG_INF_ORDER)
    return torch.where(none, INVALID_TOKEN, _ID_MASK - (key & _ID_MASK))

"""The Triton kernels of top-k, top-p and min-p without sorting. Importing this imports Triton.

The kept ids are a prefix of the row in the order (logit falling, id rising), so they are known by
the value at the cut and by how many of the ids that have it are kept. The cut is found by radix
select over keys that rise as logits fall, counted from the best logit's: a histogram of the upper
12 bits that differ at all, for float32 logits then of the next 12 within one bin, then of the rest,
8 at most. For top-k the bins count ids; for top-p they sum weights exp((logit - best) /
temperature), computed in float64 and added as integers of 2**-44, so that neither order nor
cancellation changes a sum. (Radix select: Alabi et al., "Fast k-selection algorithms for graphics
processing units", 2012; exact filtering without a sort as in FlashInfer.)

Few ids need a bin. For top-k: those not below the k-th largest of the maxima of the row's blocks,
where there are that many blocks. For top-p: those whose weight is at least (1 - p) / (2 * vocab) of
the largest, since all the others together are lighter than the share 1 - p that is dropped; they
only count in the sum of all. A batch that is filtered more widely than that takes longer, as many
atomic additions then meet at few addresses.

`state`, int64 [rows, 16]: 0 keys' bits known of the top-k cut, 1 ids before it, 2 weight before it;
3 the weight to reach, 4 bits known of the top-p cut, 5 weight before it; 6 key at the final cut,
7 ids kept of those that have it, or -1 for all; 8 the best key and 9 the largest
that may be kept.
`hist`, int64 [rows, HIST], zero at first: the bins, see the offsets below.
"""

# The kernel language is not Python: its arguments have no Python types.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tp_runtime.ops.sampling_kernel import (
    noise_of,
    order_of,
    packed,
    row_key,
    score_of_order,
)

STATE = 16
HIST = 5 * 4096 + 2 * 256 + 128
_BINS = tl.constexpr(4096)
_LAST_BINS = tl.constexpr(256)
_HIST = tl.constexpr(HIST)
_STATE = tl.constexpr(STATE)
# counts and weights of all ids; of the bin with the top-k cut; of the bin with the top-p cut
_COUNT_1 = tl.constexpr(0)
_WEIGHT_1 = tl.constexpr(4096)
_COUNT_K = tl.constexpr(2 * 4096)
_WEIGHT_K = tl.constexpr(3 * 4096)
_WEIGHT_P = tl.constexpr(4 * 4096)
_LAST_K = tl.constexpr(5 * 4096)
_LAST_P = tl.constexpr(5 * 4096 + 256)
_LIGHT = tl.constexpr(5 * 4096 + 512)  # the weight of ids that have no bin
_ONE = tl.constexpr(2.0**44)
_NO_KEY = tl.constexpr(-(2**63))
_ID_MASK = tl.constexpr(0xFFFFFFFF)
_TOP = tl.constexpr(0x7FFFFFFF)
_ALL = tl.constexpr(0xFFFFFFFF)
_FINITE = tl.constexpr(0x7F800000)  # the order of inf


@triton.jit
def _falling(score):
    """uint32 keys that rise as scores fall."""
    return (_TOP - order_of(score)).to(tl.uint32, bitcast=True)


@triton.jit
def _short(falling, DROP: tl.constexpr):
    """The key without its last DROP bits, which logits of 16 bits do not use: int64."""
    return (falling >> DROP).to(tl.int64)


@triton.jit
def _full(short, DROP: tl.constexpr):
    """The int64 key in 32 bits whose short form this is: the dropped bits repeat the sign."""
    negative = (short >> (31 - DROP)) & 1
    return (short << DROP) + tl.where(negative == 1, 0, (1 << DROP) - 1)


@triton.jit
def _score_of(short, DROP: tl.constexpr):
    return score_of_order((_TOP - _full(short, DROP)).to(tl.int32))


@triton.jit
def _weights(score, best, inverse_heat):
    """exp((score - best) / heat) as an integer of 2**-44."""
    distance = score.to(tl.float64) - best.to(tl.float64)
    return (tl.exp(distance * inverse_heat) * _ONE + 0.5).to(tl.int64)


@triton.jit
def _shifts(state, DROP: tl.constexpr):
    """How many bits of a key, counted from the best, the first and the second level leave."""
    span = tl.load(state + 9) - tl.load(state + 8)
    first = tl.zeros([], tl.int64)
    for bit in tl.static_range(12, 32):
        first += (span >> bit > 0).to(tl.int64)
    second = first
    if DROP == 0:
        second = tl.maximum(first - 12, 0)
    return first, second


@triton.jit
def _wanted(row, best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, vocab):
    """(best logit, temperature, k or 0, p, whether the row is filtered by k, and by p)."""
    order = (tl.load(best_ptr + row) >> 32).to(tl.int32)
    heat = tl.load(temperature_ptr + row)
    k = tl.load(top_k_ptr + row)
    p = tl.load(top_p_ptr + row)
    # a NaN has the highest order; -inf the negative of the order of inf, less one
    usual = (heat > 0.0) & (order < _FINITE) & (order > -_FINITE - 1)
    return score_of_order(order), heat, k, p, usual & (k > 0) & (k < vocab), usual & (p < 1.0)


@triton.jit(do_not_specialize=["blocks", "vocab"])
def limits_kernel(
    block_keys_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    best_ptr,
    state_ptr,
    blocks,
    vocab,
    BLOCKS_POW2: tl.constexpr,
    DROP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program r: the best key of row r, the largest key that may be kept, and a state."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCKS_POW2)
    keys = tl.load(block_keys_ptr + row * blocks + lanes, mask=lanes < blocks, other=_NO_KEY)
    k = tl.load(top_k_ptr + row)
    heat = tl.load(temperature_ptr + row).to(tl.float64)
    spare = 1.0 - tl.load(top_p_ptr + row).to(tl.float64)
    sorted_keys = tl.sort(keys, descending=True)
    best = tl.max(keys, 0)
    order = (best >> 32).to(tl.int32)
    # k different ids are at least this good
    reached = tl.max(tl.where(lanes == k - 1, sorted_keys, _NO_KEY), 0)
    most = tl.zeros([], tl.int64) + _ALL
    if (k > 0) & (k < vocab):
        if k <= blocks:
            most = _TOP - (reached >> 32)
    elif (spare > 0.0) & (heat > 0.0) & (order < _FINITE) & (order > -_FINITE - 1):
        lowest = score_of_order(order).to(tl.float64) + heat * tl.log(0.5 * spare / vocab)
        lowest -= 1e-6 * tl.abs(lowest)
        most = _falling(tl.maximum(lowest, -3e38).to(tl.float32)).to(tl.int64)
    state = state_ptr + row * _STATE
    tl.store(best_ptr + row, best)
    tl.store(state + 6, tl.full([], _ALL, tl.int64))
    tl.store(state + 7, tl.full([], -1, tl.int64))
    tl.store(state + 8, _short((_TOP - order).to(tl.uint32, bitcast=True), DROP))
    tl.store(state + 9, _short(most.to(tl.uint32), DROP))


@triton.jit(do_not_specialize=["vocab", "steps"])
def histogram_kernel(
    logits_ptr,
    best_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    state_ptr,
    hist_ptr,
    stride,
    vocab,
    steps,
    LEVEL: tl.constexpr,
    FOR_K: tl.constexpr,
    DROP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (c, r): adds columns c * steps * BLOCK .. of row r to the bins of one level."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    best, heat, _k, _p, by_k, by_p = _wanted(
        row, best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, vocab
    )
    if LEVEL == 1:
        wanted = by_k | by_p
    elif FOR_K:
        wanted = by_k
    else:
        wanted = by_p
    if wanted:
        hist = hist_ptr + row * _HIST
        lanes = tl.arange(0, BLOCK)
        state = state_ptr + row * _STATE
        prefix = tl.zeros([], tl.int64)
        if LEVEL > 1:
            prefix = tl.load(state + (0 if FOR_K else 4))
        first, second = _shifts(state, DROP)
        base = tl.load(state + 8)
        span = tl.load(state + 9) - base
        inverse_heat = 1.0 / heat.to(tl.float64)
        light = tl.zeros([BLOCK], tl.int64)
        for step in range(steps):
            column = (part * steps + step) * BLOCK + lanes
            exists = column < vocab
            score = tl.load(logits_ptr + row * stride + column, mask=exists, other=0.0).to(
                tl.float32
            )
            key = _short(_falling(score), DROP) - base
            inside = exists & (key <= span)
            if LEVEL == 1:
                bins = (key >> first).to(tl.int32)
            elif LEVEL == 2:
                bins = ((key >> second) & ((1 << (first - second)) - 1)).to(tl.int32)
                inside = inside & ((key >> first) == prefix)
            else:
                bins = (key & ((1 << second) - 1)).to(tl.int32)
                inside = inside & ((key >> second) == prefix)
            some = tl.max(inside.to(tl.int32), 0) > 0
            if LEVEL == 1:
                if by_k & some:
                    tl.atomic_add(hist + _COUNT_1 + bins, 1, mask=inside, sem="relaxed")
                # without top-k all ids count in the sum of weights
                if by_p & (some | (by_k == 0)):
                    weight = _weights(score, best, inverse_heat)
                    tl.atomic_add(hist + _WEIGHT_1 + bins, weight, mask=inside, sem="relaxed")
                    light += tl.where(exists & (key > span), weight, 0)
            elif some:
                if LEVEL == 2:
                    if FOR_K:
                        tl.atomic_add(hist + _COUNT_K + bins, 1, mask=inside, sem="relaxed")
                    if by_p:
                        weight = _weights(score, best, inverse_heat)
                        target = hist + (_WEIGHT_K if FOR_K else _WEIGHT_P) + bins
                        tl.atomic_add(target, weight, mask=inside, sem="relaxed")
                else:
                    target = hist + (_LAST_K if FOR_K else _LAST_P) + bins
                    tl.atomic_add(target, 1, mask=inside, sem="relaxed")
        if LEVEL == 1:  # noqa: SIM102 - decided when compiled, the inner one when run
            if by_p:
                tl.atomic_add(hist + _LIGHT, tl.sum(light, 0), sem="relaxed")


@triton.jit
def _first_reaching(sums, before, target):
    """The first bin whose inclusive sum, with what is before, reaches the target; sum before it."""
    below = (before + sums) < target
    return tl.sum(below.to(tl.int32), 0), before + tl.max(tl.where(below, sums, 0), 0)


@triton.jit(do_not_specialize=["vocab"])
def cut_kernel(
    best_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    state_ptr,
    hist_ptr,
    vocab,
    LEVEL: tl.constexpr,
    FOR_K: tl.constexpr,
    DROP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program r: finds the bin with the cut in the bins of one level, and notes it in the state.

    The last level of top-k also does the first of top-p, which is in bins that are there already.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    best, heat, k, p, by_k, by_p = _wanted(
        row, best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, vocab
    )
    hist = hist_ptr + row * _HIST
    state = state_ptr + row * _STATE
    bins = tl.arange(0, _BINS)
    last_bins = tl.arange(0, _LAST_BINS)
    first, second = _shifts(state, DROP)
    base = tl.load(state + 8)
    inverse_heat = 1.0 / heat.to(tl.float64)
    if FOR_K and LEVEL < 3:
        if by_k:
            count = tl.load(hist + (_COUNT_1 if LEVEL == 1 else _COUNT_K) + bins)
            weight = tl.load(hist + (_WEIGHT_1 if LEVEL == 1 else _WEIGHT_K) + bins)
            prefix = tl.zeros([], tl.int64)
            ids_before = tl.zeros([], tl.int64)
            weight_before = tl.zeros([], tl.int64)
            if LEVEL == 2:
                prefix = tl.load(state)
                ids_before = tl.load(state + 1)
                weight_before = tl.load(state + 2)
            at, ids_before = _first_reaching(tl.cumsum(count, 0), ids_before, k)
            weight_before += tl.sum(tl.where(bins < at, weight, 0), 0)
            if LEVEL == 2:
                prefix = prefix << (first - second)
            tl.store(state, prefix + at)
            tl.store(state + 1, ids_before)
            tl.store(state + 2, weight_before)
    elif FOR_K:
        total = tl.zeros([], tl.int64)
        weight_1 = tl.load(hist + _WEIGHT_1 + bins)
        if by_k:
            prefix = tl.load(state) << second
            count = tl.load(hist + _LAST_K + last_bins)
            at, ids_before = _first_reaching(tl.cumsum(count, 0), tl.load(state + 1), k)
            kept = k - ids_before
            equal = tl.sum(tl.where(last_bins == at, count, 0), 0)
            tl.store(state + 6, _full(base + prefix + at, DROP))
            tl.store(state + 7, tl.where(kept < equal, kept, -1))
            if by_p:
                weight = _weights(_score_of(base + prefix + last_bins, DROP), best, inverse_heat)
                taken = tl.where(last_bins < at, count, tl.where(last_bins == at, kept, 0))
                some = taken > 0  # a key without ids may be no number
                total = tl.load(state + 2) + tl.sum(tl.where(some, taken * weight, 0), 0)
        else:
            total = tl.sum(weight_1, 0) + tl.load(hist + _LIGHT)
        if by_p:
            goal = tl.math.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            goal = tl.maximum(tl.minimum(goal, total), 1)
            at, weight_before = _first_reaching(tl.cumsum(weight_1, 0), 0, goal)
            tl.store(state + 3, goal)
            tl.store(state + 4, at.to(tl.int64))
            tl.store(state + 5, weight_before)
    elif LEVEL == 2:
        if by_p:
            weight = tl.load(hist + _WEIGHT_P + bins)
            at, weight_before = _first_reaching(
                tl.cumsum(weight, 0), tl.load(state + 5), tl.load(state + 3)
            )
            tl.store(state + 4, (tl.load(state + 4) << (first - second)) + at)
            tl.store(state + 5, weight_before)
    else:
        if by_p:
            goal = tl.load(state + 3)
            prefix = tl.load(state + 4) << second
            count = tl.load(hist + _LAST_P + last_bins)
            score = _score_of(base + prefix + last_bins, DROP)
            weight = tl.where(count > 0, _weights(score, best, inverse_heat), 0)
            at, weight_before = _first_reaching(
                tl.cumsum(count * weight, 0), tl.load(state + 5), goal
            )
            equal = tl.sum(tl.where(last_bins == at, count, 0), 0)
            one = tl.maximum(tl.sum(tl.where(last_bins == at, weight, 0), 0), 1)
            kept = (goal - weight_before + one - 1) // one
            key = _full(base + prefix + at, DROP)
            # of the top-k cut itself no more than top-k keeps
            most = tl.where(tl.load(state + 6) == key, tl.load(state + 7), -1)
            kept = tl.where((most >= 0) & (most < kept), most, kept)
            tl.store(state + 6, key)
            tl.store(state + 7, tl.where(kept < equal, kept, -1))


@triton.jit(do_not_specialize=["vocab", "steps"])
def ties_kernel(
    logits_ptr,
    state_ptr,
    ties_ptr,
    stride,
    vocab,
    steps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (c, r): how many of its columns are at the cut, where only some of these are kept."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    kept = tl.load(state_ptr + row * _STATE + 7)
    if kept >= 0:
        cut = tl.load(state_ptr + row * _STATE + 6).to(tl.uint32)
        count = tl.zeros([BLOCK], tl.int32)
        for step in range(steps):
            column = (part * steps + step) * BLOCK + tl.arange(0, BLOCK)
            inside = column < vocab
            score = tl.load(logits_ptr + row * stride + column, mask=inside, other=0.0).to(
                tl.float32
            )
            count += (inside & (_falling(score) == cut)).to(tl.int32)
        tl.store(ties_ptr + row * tl.num_programs(0) + part, tl.sum(count, 0))


@triton.jit(do_not_specialize=["vocab", "steps"])
def kept_keys_kernel(
    logits_ptr,
    best_ptr,
    temperature_ptr,
    min_p_ptr,
    seed_ptr,
    position_ptr,
    state_ptr,
    ties_ptr,
    keys_ptr,
    stride,
    vocab,
    steps,
    BLOCK: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (c, r): the best noisy key among the kept ids of its columns."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    parts = tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    heat = tl.load(temperature_ptr + row)
    least = tl.load(min_p_ptr + row)
    key = row_key(tl.load(seed_ptr + row), tl.load(position_ptr + row))
    best_order = (tl.load(best_ptr + row) >> 32).to(tl.int32)
    best_score = score_of_order(best_order)
    cut = tl.load(state_ptr + row * _STATE + 6).to(tl.uint32)
    kept = tl.load(state_ptr + row * _STATE + 7).to(tl.int32)
    seen = tl.zeros([], tl.int32)
    if kept >= 0:
        earlier = tl.arange(0, BLOCK_PARTS)
        seen = tl.sum(tl.load(ties_ptr + row * parts + earlier, mask=earlier < part, other=0), 0)
    by_weight = (least > 0.0) & (heat > 0.0) & (best_order < _FINITE) & (best_order > -_FINITE - 1)
    best = tl.full([BLOCK], _NO_KEY, tl.int64)
    for step in range(steps):
        column = (part * steps + step) * BLOCK + tl.arange(0, BLOCK)
        inside = column < vocab
        score = tl.load(logits_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        falling = _falling(score)
        keep = inside & (falling <= cut)
        if kept >= 0:
            tie = (inside & (falling == cut)).to(tl.int32)
            place = seen + tl.cumsum(tie, 0) - tie
            seen += tl.sum(tie, 0)
            keep = keep & ((tie == 0) | (place < kept))
        if tl.max(keep.to(tl.int32), 0) > 0:
            if by_weight:
                distance = score.to(tl.float64) - best_score.to(tl.float64)
                weight = tl.exp(distance / heat.to(tl.float64))
                keep = keep & (weight >= least.to(tl.float64))
            if heat != 0.0:
                score = score + heat * noise_of(key, column.to(tl.int64))
            best = tl.maximum(best, tl.where(keep, packed(score, column.to(tl.int64)), _NO_KEY))
    tl.store(keys_ptr + row * parts + part, tl.max(best, 0))

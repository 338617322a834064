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
"""

# The kernel language is not Python: its arguments have no Python types.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tp_runtime.ops.filter_keys import (
    ALL,
    BINS,
    COUNT_1,
    COUNT_K,
    HIST,
    INF_ORDER,
    LAST_BINS,
    LAST_K,
    LAST_P,
    LIGHT,
    NO_KEY,
    STATE,
    TOP,
    WEIGHT_1,
    WEIGHT_K,
    WEIGHT_P,
    falling_key,
    full_key,
    score_of,
    shifts,
    short_key,
    wanted_of,
    weights,
)
from tp_runtime.ops.sampling_kernel import score_of_order


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
    keys = tl.load(block_keys_ptr + row * blocks + lanes, mask=lanes < blocks, other=NO_KEY)
    k = tl.load(top_k_ptr + row)
    heat = tl.load(temperature_ptr + row).to(tl.float64)
    spare = 1.0 - tl.load(top_p_ptr + row).to(tl.float64)
    sorted_keys = tl.sort(keys, descending=True)
    best = tl.max(keys, 0)
    order = (best >> 32).to(tl.int32)
    # k different ids are at least this good
    reached = tl.max(tl.where(lanes == k - 1, sorted_keys, NO_KEY), 0)
    most = tl.zeros([], tl.int64) + ALL
    if (k > 0) & (k < vocab):
        if k <= blocks:
            most = TOP - (reached >> 32)
    elif (spare > 0.0) & (heat > 0.0) & (order < INF_ORDER) & (order > -INF_ORDER - 1):
        lowest = score_of_order(order).to(tl.float64) + heat * tl.log(0.5 * spare / vocab)
        lowest -= 1e-6 * tl.abs(lowest)
        most = falling_key(tl.maximum(lowest, -3e38).to(tl.float32)).to(tl.int64)
    state = state_ptr + row * STATE
    tl.store(best_ptr + row, best)
    tl.store(state + 6, tl.full([], ALL, tl.int64))
    tl.store(state + 7, tl.full([], -1, tl.int64))
    tl.store(state + 8, short_key((TOP - order).to(tl.uint32, bitcast=True), DROP))
    tl.store(state + 9, short_key(most.to(tl.uint32), DROP))


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
    best, heat, _k, _p, by_k, by_p = wanted_of(
        row, best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, vocab
    )
    if LEVEL == 1:
        wanted = by_k | by_p
    elif FOR_K:
        wanted = by_k
    else:
        wanted = by_p
    if wanted:
        hist = hist_ptr + row * HIST
        lanes = tl.arange(0, BLOCK)
        state = state_ptr + row * STATE
        prefix = tl.zeros([], tl.int64)
        if LEVEL > 1:
            prefix = tl.load(state + (0 if FOR_K else 4))
        first, second = shifts(state, DROP)
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
            key = short_key(falling_key(score), DROP) - base
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
                    tl.atomic_add(hist + COUNT_1 + bins, 1, mask=inside, sem="relaxed")
                # without top-k all ids count in the sum of weights
                if by_p & (some | (by_k == 0)):
                    weight = weights(score, best, inverse_heat)
                    tl.atomic_add(hist + WEIGHT_1 + bins, weight, mask=inside, sem="relaxed")
                    light += tl.where(exists & (key > span), weight, 0)
            elif some:
                if LEVEL == 2:
                    if FOR_K:
                        tl.atomic_add(hist + COUNT_K + bins, 1, mask=inside, sem="relaxed")
                    if by_p:
                        weight = weights(score, best, inverse_heat)
                        target = hist + (WEIGHT_K if FOR_K else WEIGHT_P) + bins
                        tl.atomic_add(target, weight, mask=inside, sem="relaxed")
                else:
                    target = hist + (LAST_K if FOR_K else LAST_P) + bins
                    tl.atomic_add(target, 1, mask=inside, sem="relaxed")
        if LEVEL == 1:  # noqa: SIM102 - decided when compiled, the inner one when run
            if by_p:
                tl.atomic_add(hist + LIGHT, tl.sum(light, 0), sem="relaxed")


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
    best, heat, k, p, by_k, by_p = wanted_of(
        row, best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, vocab
    )
    hist = hist_ptr + row * HIST
    state = state_ptr + row * STATE
    bins = tl.arange(0, BINS)
    last_bins = tl.arange(0, LAST_BINS)
    first, second = shifts(state, DROP)
    base = tl.load(state + 8)
    inverse_heat = 1.0 / heat.to(tl.float64)
    if FOR_K and LEVEL < 3:
        if by_k:
            count = tl.load(hist + (COUNT_1 if LEVEL == 1 else COUNT_K) + bins)
            weight = tl.load(hist + (WEIGHT_1 if LEVEL == 1 else WEIGHT_K) + bins)
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
        weight_1 = tl.load(hist + WEIGHT_1 + bins)
        if by_k:
            prefix = tl.load(state) << second
            count = tl.load(hist + LAST_K + last_bins)
            at, ids_before = _first_reaching(tl.cumsum(count, 0), tl.load(state + 1), k)
            kept = k - ids_before
            equal = tl.sum(tl.where(last_bins == at, count, 0), 0)
            tl.store(state + 6, full_key(base + prefix + at, DROP))
            tl.store(state + 7, tl.where(kept < equal, kept, -1))
            if by_p:
                weight = weights(score_of(base + prefix + last_bins, DROP), best, inverse_heat)
                taken = tl.where(last_bins < at, count, tl.where(last_bins == at, kept, 0))
                some = taken > 0  # a key without ids may be no number
                total = tl.load(state + 2) + tl.sum(tl.where(some, taken * weight, 0), 0)
        else:
            total = tl.sum(weight_1, 0) + tl.load(hist + LIGHT)
        if by_p:
            goal = tl.math.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            goal = tl.maximum(tl.minimum(goal, total), 1)
            at, weight_before = _first_reaching(tl.cumsum(weight_1, 0), 0, goal)
            tl.store(state + 3, goal)
            tl.store(state + 4, at.to(tl.int64))
            tl.store(state + 5, weight_before)
    elif LEVEL == 2:
        if by_p:
            weight = tl.load(hist + WEIGHT_P + bins)
            at, weight_before = _first_reaching(
                tl.cumsum(weight, 0), tl.load(state + 5), tl.load(state + 3)
            )
            tl.store(state + 4, (tl.load(state + 4) << (first - second)) + at)
            tl.store(state + 5, weight_before)
    else:
        if by_p:
            goal = tl.load(state + 3)
            prefix = tl.load(state + 4) << second
            count = tl.load(hist + LAST_P + last_bins)
            score = score_of(base + prefix + last_bins, DROP)
            weight = tl.where(count > 0, weights(score, best, inverse_heat), 0)
            at, weight_before = _first_reaching(
                tl.cumsum(count * weight, 0), tl.load(state + 5), goal
            )
            equal = tl.sum(tl.where(last_bins == at, count, 0), 0)
            one = tl.maximum(tl.sum(tl.where(last_bins == at, weight, 0), 0), 1)
            kept = (goal - weight_before + one - 1) // one
            key = full_key(base + prefix + at, DROP)
            # of the top-k cut itself no more than top-k keeps
            most = tl.where(tl.load(state + 6) == key, tl.load(state + 7), -1)
            kept = tl.where((most >= 0) & (most < kept), most, kept)
            tl.store(state + 6, key)
            tl.store(state + 7, tl.where(kept < equal, kept, -1))

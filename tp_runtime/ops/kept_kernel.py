"""The Triton kernels that draw among the ids that filters keep. Importing this imports Triton."""

# The kernel language is not Python: its arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tp_runtime.ops.filter_keys import INF_ORDER, NO_KEY, STATE, falling_key
from tp_runtime.ops.sampling_kernel import noise_of, packed, row_key, score_of_order


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
    kept = tl.load(state_ptr + row * STATE + 7)
    if kept >= 0:
        cut = tl.load(state_ptr + row * STATE + 6).to(tl.uint32)
        count = tl.zeros([BLOCK], tl.int32)
        for step in range(steps):
            column = (part * steps + step) * BLOCK + tl.arange(0, BLOCK)
            inside = column < vocab
            score = tl.load(logits_ptr + row * stride + column, mask=inside, other=0.0).to(
                tl.float32
            )
            count += (inside & (falling_key(score) == cut)).to(tl.int32)
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
    cut = tl.load(state_ptr + row * STATE + 6).to(tl.uint32)
    kept = tl.load(state_ptr + row * STATE + 7).to(tl.int32)
    seen = tl.zeros([], tl.int32)
    if kept >= 0:
        earlier = tl.arange(0, BLOCK_PARTS)
        seen = tl.sum(tl.load(ties_ptr + row * parts + earlier, mask=earlier < part, other=0), 0)
    by_weight = (
        (least > 0.0) & (heat > 0.0) & (best_order < INF_ORDER) & (best_order > -INF_ORDER - 1)
    )
    best = tl.full([BLOCK], NO_KEY, tl.int64)
    for step in range(steps):
        column = (part * steps + step) * BLOCK + tl.arange(0, BLOCK)
        inside = column < vocab
        score = tl.load(logits_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        falling = falling_key(score)
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
            best = tl.maximum(best, tl.where(keep, packed(score, column.to(tl.int64)), NO_KEY))
    tl.store(keys_ptr + row * parts + part, tl.max(best, 0))

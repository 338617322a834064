"""The Triton kernels of `step_state`. Importing this imports Triton."""

# The kernel language is not Python: its arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["stride", "width"])
def begin_step_kernel(
    slots_ptr,
    last_token_ptr,
    length_ptr,
    table_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    ids_ptr,
    floats_ptr,
    kv_lens_ptr,
    table_out_ptr,
    stride,
    width,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (r, 0): the numbers of row r. Program (r, 1 + b): block b of its table row.

    ids: int64 [6, stride]: last token, position, next position, cache row, top_k, seed.
    floats: float32 [3, stride]: temperature, top_p, min_p.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    if part == 0:
        length = tl.load(length_ptr + slot)
        token = tl.load(last_token_ptr + slot)
        top_k = tl.load(top_k_ptr + slot)
        seed = tl.load(seed_ptr + slot)
        temperature = tl.load(temperature_ptr + slot)
        top_p = tl.load(top_p_ptr + slot)
        min_p = tl.load(min_p_ptr + slot)
        page = tl.load(table_ptr + slot * width + length // PAGE).to(tl.int64)
        tl.store(ids_ptr + row, token)
        tl.store(ids_ptr + stride + row, length)
        tl.store(ids_ptr + 2 * stride + row, length + 1)
        tl.store(ids_ptr + 3 * stride + row, page * (KV_HEADS * PAGE) + length % PAGE)
        tl.store(ids_ptr + 4 * stride + row, top_k)
        tl.store(ids_ptr + 5 * stride + row, seed)
        tl.store(floats_ptr + row, temperature)
        tl.store(floats_ptr + stride + row, top_p)
        tl.store(floats_ptr + 2 * stride + row, min_p)
        tl.store(kv_lens_ptr + row, (length + 1).to(tl.int32))
    else:
        # all entries: a mask would wait for the length, and costs more than the copy
        column = (part - 1) * BLOCK_W + tl.arange(0, BLOCK_W)
        inside = column < width
        entries = tl.load(table_ptr + slot * width + column, mask=inside, other=0)
        tl.store(table_out_ptr + row.to(tl.int64) * width + column, entries, mask=inside)


@triton.jit(do_not_specialize=["rows", "dummy_slot"])
def end_step_kernel(
    slots_ptr,
    tokens_ptr,
    last_token_ptr,
    length_ptr,
    rows,
    dummy_slot,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """slots, tokens: int64 [rows], one lane each."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    slot = tl.load(slots_ptr + row, mask=inside, other=0)
    token = tl.load(tokens_ptr + row, mask=inside, other=0)
    served = inside & (slot != dummy_slot)
    length = tl.load(length_ptr + slot, mask=served, other=0)
    tl.store(last_token_ptr + slot, tl.maximum(token, 0), mask=served)
    tl.store(length_ptr + slot, length + 1, mask=served)

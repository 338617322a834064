"""The Triton kernel of `rope_append`. Importing this imports Triton."""

# The kernel language is not Python: its arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def rope_append_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    rows_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    qkv_stride,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, b): heads b * BLOCK_H .. of token t, be they queries, keys or values.

    qkv: [tokens, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM], rows qkv_stride apart.
    cos, sin: [tokens, HEAD_DIM].  rows: int64 [tokens].  q_norm, k_norm: [HEAD_DIM].
    q: [tokens, Q_HEADS, HEAD_DIM].  k_cache, v_cache: [pages, KV_HEADS, PAGE, HEAD_DIM].
    """
    if PDL:
        gdc_launch_dependents()
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, HALF)
    is_q = head < Q_HEADS
    is_v = head >= Q_HEADS + KV_HEADS
    is_k = (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    exists = (head < Q_HEADS + 2 * KV_HEADS)[:, None]
    if NORM:
        # weights: no kernel writes them, so they need not wait
        q_low, q_high = tl.load(q_norm_ptr + dims), tl.load(q_norm_ptr + HALF + dims)
        k_low, k_high = tl.load(k_norm_ptr + dims), tl.load(k_norm_ptr + HALF + dims)
        w_low = tl.where(is_q[:, None], q_low[None, :], k_low[None, :]).to(tl.float32)
        w_high = tl.where(is_q[:, None], q_high[None, :], k_high[None, :]).to(tl.float32)
    if PDL:
        gdc_wait()
    x = qkv_ptr + token * qkv_stride + head[:, None] * HEAD_DIM + dims[None, :]
    raw_low = tl.load(x, mask=exists, other=0.0)
    raw_high = tl.load(x + HALF, mask=exists, other=0.0)
    cos = cos_ptr + token * HEAD_DIM + dims
    sin = sin_ptr + token * HEAD_DIM + dims
    cos_low, cos_high = tl.load(cos).to(tl.float32), tl.load(cos + HALF).to(tl.float32)
    sin_low, sin_high = tl.load(sin).to(tl.float32), tl.load(sin + HALF).to(tl.float32)
    row = tl.load(rows_ptr + token)

    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    low, high = raw_low.to(tl.float32), raw_high.to(tl.float32)
    if NORM:
        square = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        scale = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        # rounded where the plain form rounds
        low = ((low * scale).to(dtype).to(tl.float32) * w_low).to(dtype).to(tl.float32)
        high = ((high * scale).to(dtype).to(tl.float32) * w_high).to(dtype).to(tl.float32)
    turned_low = (low * cos_low[None, :]).to(dtype).to(tl.float32) + high * sin_low[None, :]
    turned_high = (high * cos_high[None, :]).to(dtype).to(tl.float32) + low * sin_high[None, :]
    turned_low, turned_high = turned_low.to(dtype), turned_high.to(dtype)

    q = q_ptr + (token * Q_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(q, turned_low, mask=is_q[:, None])
    tl.store(q + HALF, turned_high, mask=is_q[:, None])
    k_row = row + (head - Q_HEADS) * PAGE
    k = k_cache_ptr + k_row[:, None] * HEAD_DIM + dims[None, :]
    tl.store(k, turned_low, mask=is_k[:, None])
    tl.store(k + HALF, turned_high, mask=is_k[:, None])
    v_row = row + (head - Q_HEADS - KV_HEADS) * PAGE
    v = v_cache_ptr + v_row[:, None] * HEAD_DIM + dims[None, :]
    is_v = is_v[:, None] & exists
    tl.store(v, raw_low, mask=is_v)
    tl.store(v + HALF, raw_high, mask=is_v)

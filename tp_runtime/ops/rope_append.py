"""From the fused projection to attention: norm of q and k, rotation, and the write to the cache.

One launch per layer on a GPU instead of seven. Queries come out contiguous, keys and values go
straight to their page.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from tp_runtime.ops.kernels import dependent_launch, runs_kernels
from tp_runtime.ops.norm import rms_norm
from tp_runtime.ops.rope import rotate

if TYPE_CHECKING:
    from torch import Tensor

_ELEMENTS = 1024  # of a program: 16 bytes for each thread of four warps in a 16-bit type
_WARPS = 4


def first_rows(pages: Tensor, positions: Tensor, *, kv_heads: int, page_size: int) -> Tensor:
    """Where the cache of a layer keeps the first head of each token; for one step, not per layer.

    Head h of the token lies h * page_size rows further.

    Args:
        pages: int [tokens], the kernel page of each.  positions: int64 [tokens].

    Returns:
        int64 [tokens], rows of the cache's [-1, head_dim] view.
    """
    return pages.to(torch.int64) * (kv_heads * page_size) + positions % page_size


def rope_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotate the queries, and put rotated keys and values into the cache.

    Tokens that share a row (the dummy slot's) leave one of theirs there, no matter which.

    Args:
        qkv: [tokens, (q_heads + 2 * kv_heads) * head_dim] in float32, bfloat16 or float16, heads of
            q, then k, then v; its last dimension contiguous.
        cos, sin: [tokens, 1, head_dim] or [tokens, head_dim], from `RopeTable.at`, contiguous, in
            the dtype of qkv.
        rows: int64 [tokens] from `first_rows`, contiguous.
        k_cache, v_cache: [pages, kv_heads, page_size, head_dim] of one layer, contiguous, in the
            dtype of qkv; written.
        q_norm, k_norm: [head_dim] weights of an RMS norm per head before the rotation, both or
            neither.
        eps: of that norm.

    Returns:
        [tokens, q_heads, head_dim], contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit each other.
    """
    q_heads = _checked_heads(qkv, cos, sin, rows, k_cache, v_cache, q_norm, k_norm)
    if not runs_kernels(qkv.device):
        return rope_append_reference(
            qkv, cos, sin, rows, k_cache, v_cache, q_norm=q_norm, k_norm=k_norm, eps=eps
        )
    from tp_runtime.ops.rope_append_kernel import rope_append_kernel

    tokens = qkv.shape[0]
    _, kv_heads, page_size, head_dim = k_cache.shape
    q = qkv.new_empty((tokens, q_heads, head_dim))
    if tokens == 0:
        return q
    block_h = max(1, _ELEMENTS // head_dim)
    pdl = dependent_launch(qkv.device)
    rope_append_kernel[(tokens, -(-(q_heads + 2 * kv_heads) // block_h))](
        qkv,
        cos,
        sin,
        rows,
        cos if q_norm is None else q_norm,
        cos if k_norm is None else k_norm,
        q,
        k_cache,
        v_cache,
        qkv.stride(0),
        eps,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        PAGE=page_size,
        HEAD_DIM=head_dim,
        BLOCK_H=block_h,
        NORM=q_norm is not None,
        PDL=pdl,
        num_warps=_WARPS,
        launch_pdl=pdl,
    )
    return q


def rope_append_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """`rope_append` in plain torch: what it means, and what a CPU runs."""
    tokens = qkv.shape[0]
    _, kv_heads, page_size, head_dim = k_cache.shape
    heads = qkv.reshape(tokens, -1, head_dim)
    q_heads = heads.shape[1] - 2 * kv_heads
    qk, v = heads[:, : q_heads + kv_heads], heads[:, q_heads + kv_heads :]
    if q_norm is not None and k_norm is not None:
        weight = torch.cat((q_norm.expand(q_heads, -1), k_norm.expand(kv_heads, -1)))
        qk = rms_norm(qk, weight, eps)
    turned = rotate(qk, cos.view(tokens, 1, head_dim), sin.view(tokens, 1, head_dim))
    where = (rows[:, None] + _head_rows(kv_heads, page_size, qkv.device)).flatten()
    k = turned[:, q_heads:].reshape(-1, head_dim)
    k_cache.view(-1, head_dim).index_copy_(0, where, k)
    v_cache.view(-1, head_dim).index_copy_(0, where, v.reshape(-1, head_dim))
    return turned[:, :q_heads].contiguous()


@lru_cache(maxsize=16)
def _head_rows(kv_heads: int, page_size: int, device: torch.device) -> Tensor:
    """Rows from the first head of a token to each of its heads: int64 [kv_heads]."""
    with torch.inference_mode(False):  # it outlives the step that asks first
        return page_size * torch.arange(kv_heads, device=device)


def _checked_heads(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
) -> int:
    """How many query heads the shapes imply."""
    tokens, width = qkv.shape
    _, kv_heads, _, head_dim = k_cache.shape
    q_heads = width // head_dim - 2 * kv_heads
    if q_heads < 1 or width % head_dim:
        raise ValueError(
            f"qkv has {width} columns, expected (q_heads + 2 * {kv_heads}) * {head_dim} for a "
            f"cache of shape {tuple(k_cache.shape)}"
        )
    if v_cache.shape != k_cache.shape:
        raise ValueError(
            f"v_cache: expected shape {tuple(k_cache.shape)}, got {tuple(v_cache.shape)}"
        )
    if cos.numel() != tokens * head_dim or sin.numel() != tokens * head_dim:
        raise ValueError(
            f"cos, sin: expected {tokens} rows of {head_dim}, got {tuple(cos.shape)} and "
            f"{tuple(sin.shape)}"
        )
    if rows.shape != (tokens,) or rows.dtype != torch.int64:
        raise ValueError(f"rows: expected int64 ({tokens},), got {rows.dtype} {tuple(rows.shape)}")
    if any(t.dtype != qkv.dtype for t in (cos, sin, k_cache, v_cache)):
        raise ValueError(
            f"expected {qkv.dtype} throughout, got cos {cos.dtype}, sin {sin.dtype}, "
            f"k_cache {k_cache.dtype}, v_cache {v_cache.dtype}"
        )
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm: expected both or neither")
    if not (qkv.stride(1) == 1 and rows.is_contiguous() and cos.is_contiguous()):
        raise ValueError("expected contiguous rows, cos and sin, and qkv with contiguous columns")
    return q_heads

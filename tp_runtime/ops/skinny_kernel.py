"""The Triton kernels of `skinny`. Importing this imports Triton.

A decode step multiplies few rows by large matrices: the time is that of reading each weight once.
Two kernels do it. `fma` is for one row, multiplies and adds in float32, and has the norm of its row
built in. `dot` is for 2 to 64 rows, on tensor cores. Both load weights into shared memory several
tiles ahead, and add up in an order that depends on their configuration alone.

A kernel starts while the one before it still runs, and waits before it reads what that one wrote
(programmatic dependent launch: CUDA C++ Programming Guide, "Programmatic Dependent Launch and
Synchronization"), which hides the launch. Every program waits, so that "the kernel before is done"
holds for the kernels before that one too. What that one wrote is read past L1, which may hold what
an earlier kernel found there. Measured on an H200 as well, without a gain: asking L2 for weights
before the wait, starting dependents later, `dot` with tiles in turn, the norm inside `dot`.
"""

# The kernel language is not Python: its arguments have no Python types.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _half(N, K):
    """Offset of the second half of a matrix [2 N, K], in 64 bits."""
    return tl.full([], 1, tl.int64) * N * K


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _row_block(w_ptr, rows, columns, inside, K, EVEN_K: tl.constexpr):
    """float32 [rows, columns] of the matrix; `rows` are offsets, rows * K."""
    pointers = w_ptr + rows[:, None] + columns[None, :]
    if EVEN_K:
        return tl.load(pointers, eviction_policy="evict_first")
    return tl.load(pointers, mask=inside[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["tiles"])
def fma(
    x_ptr,
    w_ptr,
    y_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    eps,
    N,
    K,
    tiles,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: y[N] = norm(x)[K] @ w.T, w [N, K]; or silu(first half) * second half, w [2 N, K].

    Programs take tiles of BLOCK_N columns of y in turn, through one loop over all their weights, so
    that loading never stops between tiles.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    index = tl.arange(0, BLOCK_N)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    k_index = tl.arange(0, BLOCK_K)
    steps = (K + BLOCK_K - 1) // BLOCK_K
    turns = (tiles - program + programs - 1) // programs
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    square = tl.zeros([1, BLOCK_K], tl.float32)
    for i in tl.range(0, turns * steps, num_stages=STAGES):
        step = i % steps
        n = (program + (i // steps) * programs) * BLOCK_N + index
        rows = tl.minimum(n, N - 1).to(tl.int64) * K
        columns = step * BLOCK_K + k_index
        inside = columns < K
        x = _row_block(x_ptr, tl.zeros([1], tl.int64), columns, inside, K, EVEN_K).to(tl.float32)
        if NORM:
            weight = _row_block(norm_ptr, tl.zeros([1], tl.int64), columns, inside, K, EVEN_K)
            square += x * x
            x = x * weight.to(tl.float32)
        w = _row_block(w_ptr, rows, columns, inside, K, EVEN_K)
        acc += w.to(tl.float32) * x
        if GATED:
            up = _row_block(w_ptr, rows + _half(N, K), columns, inside, K, EVEN_K)
            acc_up += up.to(tl.float32) * x
        if step == steps - 1:
            y = tl.sum(acc, 1)
            scale = 1.0
            if NORM:
                scale = tl.rsqrt(tl.sum(square) / K + eps)
                y *= scale
            valid = n < N
            if GATED:
                y = _silu(y) * (tl.sum(acc_up, 1) * scale)
                acc_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
            if BIAS:
                y += tl.load(bias_ptr + n, mask=valid, other=0.0).to(tl.float32)
            if RESIDUAL:
                residual = tl.load(residual_ptr + n, mask=valid, other=0.0, cache_modifier=".cg")
                y += residual.to(tl.float32)
            tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=valid)
            acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
            square = tl.zeros([1, BLOCK_K], tl.float32)


@triton.jit
def _parts_sum(part_ptr, offsets, stride, SPLIT: tl.constexpr):
    """Sum of the SPLIT partial results of a tile, in their order."""
    total = tl.load(part_ptr + offsets, cache_modifier=".cg")
    for part in tl.static_range(1, SPLIT):
        total += tl.load(part_ptr + part * stride + offsets, cache_modifier=".cg")
    return total


@triton.jit
def _store_tile(
    acc,
    acc_up,
    y_ptr,
    bias_ptr,
    residual_ptr,
    m_index,
    n_index,
    M,
    N,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWAP: tl.constexpr,
):
    """Write a tile of y; acc and acc_up are [rows, columns], or the reverse with SWAP."""
    y = tl.trans(acc) if SWAP else acc
    if GATED:
        y = _silu(y) * (tl.trans(acc_up) if SWAP else acc_up)
    valid = (m_index < M)[:, None] & (n_index < N)[None, :]
    at = m_index[:, None] * N + n_index[None, :]
    if BIAS:
        y += tl.load(bias_ptr + n_index, mask=n_index < N, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL:
        residual = tl.load(residual_ptr + at, mask=valid, other=0.0, cache_modifier=".cg")
        y += residual.to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["M"])
def dot(
    x_ptr,
    w_ptr,
    y_ptr,
    bias_ptr,
    residual_ptr,
    part_ptr,
    count_ptr,
    M,
    N,
    K,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[M, N] = x[M, K] @ w.T, w [N, K]; or silu(first half) * second half, w [2 N, K].

    A program has BLOCK_N columns of y and one of SPLIT parts of K. The last program of a tile to
    arrive adds the parts up, in their order. part: float32, a tile after the other; count: int32
    [tiles], zero before and after.
    With BLOCK_N >= 64 the weights are the left operand, which the tensor cores then read from
    shared memory without passing registers (wgmma takes 64 rows at least).
    """
    SWAP: tl.constexpr = BLOCK_N >= 64
    program = tl.program_id(0)
    tile = program // SPLIT
    split = program % SPLIT
    n_block = tl.arange(0, BLOCK_N)
    n_index = tile * BLOCK_N + n_block
    steps = (K + BLOCK_K - 1) // BLOCK_K
    per_part = (steps + SPLIT - 1) // SPLIT
    begin = split * per_part
    end = tl.minimum(begin + per_part, steps)
    rows = tl.minimum(n_index, N - 1).to(tl.int64) * K
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    m_index = tl.arange(0, BLOCK_M)
    k_index = tl.arange(0, BLOCK_K)
    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        columns = step * BLOCK_K + k_index
        inside = columns < K
        mask = (m_index < M)[:, None]
        if not EVEN_K:
            mask = mask & inside[None, :]
        x = tl.load(x_ptr + m_index[:, None] * K + columns[None, :], mask=mask, other=0.0)
        w = _row_block(w_ptr, rows, columns, inside, K, EVEN_K)
        acc = tl.dot(w, tl.trans(x), acc) if SWAP else tl.dot(x, tl.trans(w), acc)
        if GATED:
            w = _row_block(w_ptr, rows + _half(N, K), columns, inside, K, EVEN_K)
            acc_up = tl.dot(w, tl.trans(x), acc_up) if SWAP else tl.dot(x, tl.trans(w), acc_up)

    last = True
    if SPLIT > 1:
        size: tl.constexpr = BLOCK_M * BLOCK_N
        stride: tl.constexpr = 2 * size if GATED else size
        if SWAP:
            offsets = n_block[:, None] * BLOCK_M + m_index[None, :]
        else:
            offsets = m_index[:, None] * BLOCK_N + n_block[None, :]
        own = part_ptr + program.to(tl.int64) * stride
        tl.store(own + offsets, acc)
        if GATED:
            tl.store(own + size + offsets, acc_up)
        tl.debug_barrier()  # every thread's part is written before one thread says so
        last = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if last:
            parts = part_ptr + tile.to(tl.int64) * SPLIT * stride
            acc = _parts_sum(parts, offsets, stride, SPLIT)
            if GATED:
                acc_up = _parts_sum(parts + size, offsets, stride, SPLIT)
            tl.store(count_ptr + tile, 0)  # for the next launch
    if last:
        _store_tile(
            acc,
            acc_up,
            y_ptr,
            bias_ptr,
            residual_ptr,
            m_index,
            n_index,
            M,
            N,
            GATED,
            BIAS,
            RESIDUAL,
            SWAP,
        )


@triton.jit
def rms_norm_rows(x_ptr, weight_ptr, y_ptr, eps, K, BLOCK_K: tl.constexpr, PDL: tl.constexpr):
    """y[row] = x[row] / sqrt(mean(x[row]^2) + eps) * weight, one program per row of K elements."""
    columns = tl.arange(0, BLOCK_K)
    inside = columns < K
    if PDL:
        gdc_launch_dependents()
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * K
    x = tl.load(x_ptr + row + columns, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / K + eps)
    # rounded before the weight, as the reference implementations do
    normed = (x * scale).to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row + columns, (normed * weight).to(y_ptr.dtype.element_ty), mask=inside)

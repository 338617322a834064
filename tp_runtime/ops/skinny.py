"""Products of few rows with large matrices: what a decode step spends its time on.

Each function here defines one operation in plain torch, on any device; that is also how it runs
where no configuration is given (cuBLAS on a GPU). With a `SkinnyConfig` it runs as one kernel (two
where rows are normalised for tensor cores), which reads the weights at nearly the speed of memory
and hides its start behind the end of the kernel before. Which configuration is best is measured by
`skinny_measure` on one rank and shipped to the others: nothing here decides by itself.

A result depends on the configuration and the row alone, not on the other rows of a batch, and is
the same bits each time.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from tp_runtime.ops.activation import silu_and_mul
from tp_runtime.ops.norm import rms_norm
from tp_runtime.ops.skinny_config import SkinnyConfig, SkinnyOp, refusal
from tp_runtime.selection.backends.gpu_support import Workspaces

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "SkinnyConfig",
    "SkinnyOp",
    "skinny_linear",
    "skinny_linear_residual",
    "skinny_norm_gate_up",
    "skinny_norm_linear",
]


def skinny_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, config: SkinnyConfig | None = None
) -> Tensor:
    """x @ weight.T + bias.

    Args:
        x: [rows, k], float16 or bfloat16 for a configuration.
        weight: [n, k], contiguous.
        bias: [n] or None.
        config: how to run it; None: as torch does.

    Returns:
        [rows, n], dtype of x, accumulated in float32 and rounded once.

    Raises: ValueError: the configuration cannot run these tensors.
    """
    if config is None:
        return F.linear(x, weight, bias)
    return _run(config, SkinnyOp.LINEAR, x, weight, bias=bias)


def skinny_linear_residual(
    x: Tensor, weight: Tensor, residual: Tensor, *, config: SkinnyConfig | None = None
) -> Tensor:
    """residual + x @ weight.T: [rows, k], [n, k], [rows, n] -> [rows, n]; see `skinny_linear`."""
    if config is None:
        return torch.addmm(residual, x, weight.t())
    return _run(config, SkinnyOp.LINEAR_RESIDUAL, x, weight, residual=residual)


def skinny_norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    normed: Tensor | None = None,
    config: SkinnyConfig | None = None,
) -> Tensor:
    """rms_norm(x, norm_weight, eps) @ weight.T + bias.

    norm_weight: [k]; normed: rms_norm(x, norm_weight, eps) where it has been made already; the
    others as in `skinny_linear`. For one row that is not normed yet the normalised values are not
    rounded before they are multiplied, so that the result is nearer to the exact one.
    """
    if config is None:
        return F.linear(rms_norm(x, norm_weight, eps) if normed is None else normed, weight, bias)
    norm = (norm_weight, eps)
    return _run(config, SkinnyOp.NORM_LINEAR, x, weight, bias=bias, norm=norm, normed=normed)


def skinny_norm_gate_up(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    *,
    normed: Tensor | None = None,
    config: SkinnyConfig | None = None,
) -> Tensor:
    """silu(h @ gate.T) * (h @ up.T) with h = rms_norm(x, norm_weight, eps).

    Args:
        weight: [2 * n, k], the rows of gate before those of up.
        normed: h where it has been made already.

    Returns:
        [rows, n]; gate and up are not rounded before the activation.
    """
    if config is None:
        made = rms_norm(x, norm_weight, eps) if normed is None else normed
        return silu_and_mul(F.linear(made, weight))
    return _run(config, SkinnyOp.NORM_GATE_UP, x, weight, norm=(norm_weight, eps), normed=normed)


@cache
def _kernels() -> Any:
    from tp_runtime.ops import skinny_kernel

    return skinny_kernel


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _workspaces(device: torch.device) -> tuple[Workspaces, Workspaces]:
    """Partial results, and counters of arrivals, which each launch leaves at zero."""
    return Workspaces("skinny_linear", device), Workspaces("skinny_linear", device)


def _checked(
    config: SkinnyConfig,
    op: SkinnyOp,
    x: Tensor,
    weight: Tensor,
    vectors: tuple[Tensor | None, ...],
    residual: Tensor | None,
) -> tuple[int, int, int]:
    """(rows, n, k) of tensors that lie as the kernels read them."""
    rows, k = x.shape
    n = weight.shape[0] // op.stacked
    reason = refusal(op, rows=rows, n=n, k=k, dtype=x.dtype, config=config)
    if reason is None and weight.shape != (n * op.stacked, k):
        reason = f"expected a weight [{op.stacked} * n, {k}], got {list(weight.shape)}"
    if reason is None and residual is not None and residual.shape != (rows, n):
        reason = f"expected a residual [{rows}, {n}], got {list(residual.shape)}"
    for tensor in (x, weight, residual, *vectors):
        if tensor is None or reason is not None:
            continue
        if not tensor.is_contiguous() or tensor.dtype != x.dtype or tensor.device != x.device:
            reason = (
                f"expected contiguous {x.dtype} on {x.device}, got {tensor.dtype} "
                f"{list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
            )
    if reason is not None:
        raise ValueError(f"{op.value} with {config}: {reason}; config=None runs it in torch")
    return rows, n, k


def _run(
    config: SkinnyConfig,
    op: SkinnyOp,
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    normed: Tensor | None = None,
) -> Tensor:
    norm_weight, eps = norm or (None, 0.0)
    if normed is not None:
        x, norm_weight = normed, None
    rows, n, k = _checked(config, op, x, weight, (bias, norm_weight), residual)
    kernels = _kernels()
    tiles = -(-n // config.block_n)
    out = x.new_empty(rows, n)
    launch: dict[str, Any] = {
        "GATED": op.stacked == 2,
        "BIAS": bias is not None,
        "RESIDUAL": residual is not None,
        "EVEN_K": k % config.block_k == 0,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "STAGES": config.stages,
        "PDL": config.dependent_launch,
        "num_warps": config.warps,
        "launch_pdl": config.dependent_launch,
    }
    # a pointer that is never read still needs an address
    bias = weight if bias is None else bias
    residual = weight if residual is None else residual
    if config.kernel == "fma":
        programs = min(tiles, config.per_sm * _multiprocessors(x.device))
        given = weight if norm_weight is None else norm_weight
        kernels.fma[(programs,)](
            x, weight, out, given, bias, residual, eps, n, k, tiles,
            NORM=norm_weight is not None, **launch,
        )  # fmt: skip
        return out
    if norm_weight is not None:
        x = _normalised(kernels, config, x, norm_weight, eps)
    part, count = out, out
    block_m = config.block_m(rows)
    if config.split > 1:
        parts, counters = _workspaces(x.device)
        size = 4 * tiles * config.split * block_m * config.block_n * op.stacked
        part = parts.get(size).view(torch.float32)
        count = counters.get(4 * max(tiles, 4096)).view(torch.int32)
    kernels.dot[(tiles * config.split,)](
        x, weight, out, bias, residual, part, count, rows, n, k,
        SPLIT=config.split, BLOCK_M=block_m, **launch,
    )  # fmt: skip
    return out


def _normalised(
    kernels: Any, config: SkinnyConfig, x: Tensor, norm_weight: Tensor, eps: float
) -> Tensor:
    """rms_norm(x, norm_weight, eps) as a launch of its own: [rows, k] -> [rows, k]."""
    rows, k = x.shape
    out = torch.empty_like(x)
    block = 1 << (k - 1).bit_length()
    kernels.rms_norm_rows[(rows,)](
        x, norm_weight, out, eps, k,
        BLOCK_K=block,
        PDL=config.dependent_launch,
        num_warps=min(16, max(4, block // 512)),
        launch_pdl=config.dependent_launch,
    )  # fmt: skip
    return out

"""Root-mean-square normalisation (Zhang and Sennrich, 2019, "Root Mean Square Layer Normalization")."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, accumulated in float32.

    Args:
        x: [..., n].
        weight: [n], or [heads, n] for a weight per head of x [..., heads, n].
        eps: added to the mean square.

    Returns:
        [..., n], dtype of x.
    """
    if weight.dim() == 1 and (x.is_cuda or x.dtype not in _HALF):
        return torch.rms_norm(x, weight.shape, weight, eps)  # one kernel where torch has one
    wide = x.float() if x.dtype in _HALF else x
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    # rounded to the dtype of x before the weight, as the reference implementations do
    return (wide * scale).to(x.dtype).mul_(weight)

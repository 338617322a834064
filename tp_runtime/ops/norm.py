"""Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

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


class RmsNorm:
    """`rms_norm` with its weight. On a CPU in float32 it takes four calls instead of nine.

    With s = sqrt(n): x / sqrt(mean(x^2) + eps) = x * s / hypot(norm(x), s * sqrt(eps)), and s is
    folded into the weight when the layer is made.

    Args:
        weight: [n], or [heads, n] for a weight per head.
        eps: added to the mean square.
    """

    __slots__ = ("_floor", "_folded", "eps", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        root = float(weight.shape[-1]) ** 0.5
        self.eps = eps
        self.weight = weight
        self._folded = None
        if weight.device.type == "cpu" and weight.dtype == torch.float32:
            self._folded = weight * root
        self._floor = torch.tensor(root * eps**0.5)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., n] -> [..., n]."""
        if self._folded is None:
            return rms_norm(x, self.weight, self.eps)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.mul(x, self._folded).div_(torch.hypot(norm, self._floor))

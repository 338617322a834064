"""Rotary position embedding: frequencies, Llama-3 scaling, one table, one rotation.

Sources: Su et al., 2021, "RoFormer"; the Llama-3.1 reference code (`apply_scaling`) for the scaled
frequencies. The layout is that of Hugging Face: dimension i pairs with i + head_dim / 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tp_runtime.ops.gather import gather_rows

if TYPE_CHECKING:
    from torch import Tensor


_ROWS_AT_A_TIME = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Stretches the low frequencies by `factor`, keeps the high ones, blends in between.

    `original_max_positions` is the context length of pre-training, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All positions divided by `factor` (position interpolation)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FrequencyFactors:
    """Each frequency divided by its own factor, as GGUF files store Llama-3 scaling."""

    factors: tuple[float, ...]


Scaling = Llama3Scaling | LinearScaling | FrequencyFactors


def inverse_frequencies(head_dim: int, theta: float, scaling: Scaling | None = None) -> Tensor:
    """Radians per position of each pair of dimensions: [head_dim / 2] float32."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequency = 1.0 / (theta**exponent)
    if scaling is None:
        return frequency
    if isinstance(scaling, LinearScaling):
        return frequency / scaling.factor
    if isinstance(scaling, FrequencyFactors):
        return frequency / torch.tensor(scaling.factors, dtype=torch.float32)
    wavelength = 2 * math.pi / frequency
    low_wavelength = scaling.original_max_positions / scaling.low_freq_factor
    high_wavelength = scaling.original_max_positions / scaling.high_freq_factor
    smooth = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * frequency / scaling.factor + smooth * frequency
    scaled = torch.where(wavelength > low_wavelength, frequency / scaling.factor, frequency)
    between = (wavelength <= low_wavelength) & (wavelength >= high_wavelength)
    return torch.where(between, blended, scaled)


class RopeTable:
    """cos and signed sin of every position, precomputed, so that a step only gathers rows.

    Args:
        head_dim: even.
        theta: the base of the frequencies.
        max_positions: rows of the table, in tokens.
        dtype, device: of the table.
    """

    __slots__ = ("_cos", "_sin")

    def __init__(
        self,
        head_dim: int,
        *,
        theta: float,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        scaling: Scaling | None = None,
    ) -> None:
        frequency = inverse_frequencies(head_dim, theta, scaling).to(device)
        self._cos = torch.empty(max_positions, head_dim, dtype=dtype, device=device)
        self._sin = torch.empty_like(self._cos)
        # a part at a time: the float32 of all would need several times the table itself
        for start in range(0, max_positions, _ROWS_AT_A_TIME):
            stop = min(start + _ROWS_AT_A_TIME, max_positions)
            positions = torch.arange(start, stop, device=device).float()
            angle = positions[:, None] * frequency
            cos, sin = angle.cos(), angle.sin()
            self._cos[start:stop] = torch.cat((cos, cos), -1)
            # the sign of rotate_half is folded in: -sin for the first half, +sin for the second
            self._sin[start:stop] = torch.cat((-sin, sin), -1)

    @staticmethod
    def bytes_of(head_dim: int, max_positions: int, dtype: torch.dtype) -> int:
        """Memory of such a table."""
        return 2 * max_positions * head_dim * dtype.itemsize

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) for positions [tokens] int64, each [tokens, 1, head_dim]."""
        if not positions.is_cuda:
            cos = self._cos.index_select(0, positions).unsqueeze(1)
            return cos, self._sin.index_select(0, positions).unsqueeze(1)
        cos, sin = gather_rows(positions, self._cos, self._sin)
        return cos.unsqueeze(1), sin.unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads by the positions of their tokens.

    Args:
        x: [tokens, heads, head_dim], last dimension contiguous; not changed.
        cos, sin: [tokens, 1, head_dim] from `RopeTable.at`.

    Returns:
        [tokens, heads, head_dim], contiguous.
    """
    tokens, heads, head_dim = x.shape
    swapped = x.view(tokens, heads, 2, head_dim // 2).flip(2).view(tokens, heads, head_dim)
    return (x * cos).addcmul_(swapped, sin)

"""Seeded weights for a named configuration, without any file.

Each value is a hash of (seed, tensor name, flat index in the whole tensor), so that a rank makes
its own part alone and the logical model is the same at any TP size and on any device.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from tp_runtime.models.config import ModelConfig

_CHUNK_VALUES = 1 << 22  # bounds the int64 temporaries to 32 MiB each
_MASK_32 = 0xFFFFFFFF
_SQRT_3 = 3**0.5


class RandomWeights:
    """A `WeightSource`. Matrices have variance 1 / in, norms lie around 1, biases around 0.

    Args:
        config: the model to imitate.
        seed: another seed, another model.
        device: where values are made.
    """

    def __init__(self, config: ModelConfig, *, seed: int, device: torch.device) -> None:
        self.config = config
        self._seed = seed
        self._device = device

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """See `WeightSource.read`; float32, never fails."""
        row_start, row_stop = rows or (0, shape[0])
        width = shape[1] if len(shape) == 2 else 1
        column_start, column_stop = columns or (0, width)
        salt = int.from_bytes(
            hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=7).digest(), "little"
        )
        row_index = torch.arange(row_start, row_stop, device=self._device).unsqueeze(1)
        column_index = torch.arange(column_start, column_stop, device=self._device)
        out = torch.empty(len(row_index), len(column_index), device=self._device)
        step = max(1, _CHUNK_VALUES // len(column_index))
        for part, index in zip(torch.split(out, step), torch.split(row_index, step), strict=True):
            part.copy_(_uniform(index * width + column_index, salt))
        if len(shape) == 1:
            out = out.squeeze(1)
        centre, half_width = _range_of(name, shape, untied=not self.config.tied_head)
        return out.mul_(half_width).add_(centre)


def _range_of(name: str, shape: tuple[int, ...], *, untied: bool) -> tuple[float, float]:
    """(centre, half width) of the uniform distribution of a tensor."""
    if name.endswith("norm.weight"):
        return 1.0, 0.1
    if name.endswith(".bias"):
        return 0.0, 0.1
    if "embed_tokens" in name and untied:
        return 0.0, _SQRT_3
    return 0.0, _SQRT_3 / float(shape[1]) ** 0.5


def _uniform(index: Tensor, salt: int) -> Tensor:
    """float32 in [-1, 1), 24 bits of a hash of each int64 index.

    The mixer follows "lowbias32" (C. Wellons, hash-prospector), run in the low half of int64 with
    multipliers below 2^31, so that every product fits and every device agrees. The high half of the
    index enters with the salt.
    """
    low = index & _MASK_32
    high = index >> 32
    x = low ^ (salt & _MASK_32)
    x ^= high * 0x9E3779B1 & _MASK_32
    for multiplier, shift in ((0x7FEB352D, 16), (0x846CA68B & 0x7FFFFFFF, 15)):
        x ^= x >> shift
        x = x * multiplier & _MASK_32
    x ^= x >> 16
    x ^= salt >> 32
    x = x * 0x7FEB352D & _MASK_32
    x ^= x >> 15
    return (x >> 8).float().mul_(2.0**-23).sub_(1.0)

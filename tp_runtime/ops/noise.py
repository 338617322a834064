"""Random numbers that are a function of (request seed, position, vocabulary id) and nothing else.

There is no generator state: the same request draws the same numbers in any batch, slot, bucket and
tensor-parallel size, and after preemption.

The hash is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)
used as a counter hash: a row's key is mixed from its seed and position, and vocabulary id i is the
i-th output of the SplitMix64 stream that starts at that key. The upper 32 bits become a uniform
number v, and -log(-log(1 - v)) is Gumbel noise (adding it to logits and taking the best draws from
their softmax). v is kept small-side exact, because large noise comes from small v: 2**-33 is the
smallest, so the noise reaches 22.9.

Two forms of one definition: torch for any device and for graph capture, numpy for CPU rows.
"""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_ALL: Final = 2**64 - 1
_SEED_SALT: Final = 0xD1B54A32D192ED03  # keeps seed 0, position 0 away from the fixed point 0
_HIGH_HALF: Final = 1 if sys.byteorder == "little" else 0
_UNIT: Final = 2.0**-32
_MAX_V: Final = 1.0 - 2.0**-24  # the largest float32 below 1: log1p(-1) is not finite

MAX_NOISE: Final = -math.log(2.0**-33)
"""No noise is larger than this (22.9)."""


def row_keys(seed: Tensor, position: Tensor) -> Tensor:
    """Mix one 64-bit key per row.

    Args:
        seed, position: int64 [rows]. The position is that of the token to be drawn.

    Returns:
        int64 [rows] (the bits matter, not the sign).
    """
    return _mix_torch(_mix_torch(seed + _signed(_SEED_SALT)) + position * _signed(_GOLDEN))


def row_key(seed: int, position: int) -> int:
    """`row_keys` for one row on the host: the same 64 bits, as a number below 2**64."""
    return _mix_int(_mix_int(seed + _SEED_SALT) + position * _GOLDEN)


def gumbel(keys: Tensor, vocab_start: int, vocab: int) -> Tensor:
    """Noise of vocabulary ids vocab_start .. vocab_start + vocab - 1, float32 [rows, vocab]."""
    v = uniform(keys, vocab_start, vocab)
    return -torch.log(-torch.log1p(-v))


def uniform(keys: Tensor, vocab_start: int, vocab: int) -> Tensor:
    """The uniform numbers behind `gumbel`: float32 [rows, vocab], in [2**-33, 1 - 2**-24]."""
    ids = torch.arange(vocab_start + 1, vocab_start + vocab + 1, device=keys.device)
    bits = _mix_torch(keys[:, None] + ids * _signed(_GOLDEN))
    high = _shift_right(bits, 32).to(torch.float32)
    return (high * _UNIT + _UNIT / 2).clamp_(max=_MAX_V)


def uniform_numpy(
    key: int,
    weyl: NDArray[np.uint64],
    bits: NDArray[np.uint64],
    scratch: NDArray[np.uint64],
    out: NDArray[np.float32],
) -> None:
    """The numbers of `uniform` for one row, bit for bit, without allocating.

    Args:
        key: a `row_key`.
        weyl: the row of `weyl_numpy` for the ids wanted, [ids].
        bits, scratch: overwritten, [ids].
        out: the result, [ids].
    """
    np.add(weyl, np.uint64(key), out=bits)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        np.right_shift(bits, np.uint64(shift), out=scratch)
        np.bitwise_xor(bits, scratch, out=bits)
        np.multiply(bits, np.uint64(factor), out=bits)
    np.right_shift(bits, np.uint64(31), out=scratch)
    np.bitwise_xor(bits, scratch, out=bits)
    np.copyto(out, bits.view(np.uint32)[_HIGH_HALF::2], casting="same_kind")
    np.multiply(out, np.float32(_UNIT), out=out)
    np.add(out, np.float32(_UNIT / 2), out=out)
    np.minimum(out, np.float32(_MAX_V), out=out)


@lru_cache(maxsize=16)
def weyl_numpy(vocab_start: int, vocab: int) -> NDArray[np.uint64]:
    """(id + 1) * golden ratio of each vocabulary id, modulo 2**64, read-only uint64 [vocab]."""
    ids = np.arange(vocab_start + 1, vocab_start + vocab + 1, dtype=np.uint64)
    table: NDArray[np.uint64] = ids * np.uint64(_GOLDEN)
    table.flags.writeable = False
    return table


def _mix_torch(x: Tensor) -> Tensor:
    """The SplitMix64 finaliser on int64, whose arithmetic wraps like uint64."""
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    return x ^ _shift_right(x, 31)


def _mix_int(x: int) -> int:
    x &= _ALL
    x = ((x ^ (x >> 30)) * _MIX_1) & _ALL
    x = ((x ^ (x >> 27)) * _MIX_2) & _ALL
    return x ^ (x >> 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # int64 shifts in copies of the sign; the mask makes it a logical shift
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value

"""What a peer must know of a tensor before it can allocate it, refused while it is only words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from tp_runtime.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

ALIGNMENT: Final = 16
"""Bytes; each tensor starts at a multiple of it in the packed buffer."""

INLINE_BYTES: Final = 64 * 1024
"""CPU tensors ride on the CPU channel up to this many bytes in all."""

_MAX_DIMS: Final = 16
_INT64_MAX: Final = 2**63 - 1

# the position is the code on the wire: append only
_DTYPES: Final = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


class Place(IntEnum):
    """Where a tensor lives and how its contents travel."""

    DEVICE = 0
    """On the group's device; in the packed broadcast."""
    CPU = 1
    """On the CPU; in a packed broadcast of its own, being too large for the channel."""
    CPU_INLINE = 2
    """On the CPU; its bytes are in the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHint:
    """One tensor: what a peer must know to allocate it.

    Args:
        shape: no dimension is negative or zero; () is a scalar.
        dtype: one of those that the wire knows.
        place: see `Place`.
        row_multiple: the first dimension is a multiple of it, such as the tokens per request.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    place: Place
    row_multiple: int = 1

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def problem(self) -> str | None:
        """Why no tensor should be allocated for it, or None."""
        if self.dtype not in _DTYPES:
            return f"dtype {self.dtype} is not one that can be sent"
        if len(self.shape) > _MAX_DIMS:
            return f"{len(self.shape)} dimensions, at most {_MAX_DIMS} can be sent"
        if any(size < 0 for size in self.shape):
            return f"a negative dimension in shape {self.shape}"
        if any(size == 0 for size in self.shape):
            return f"no rows or no columns in shape {self.shape}; leave the tensor out"
        if self.nbytes > _INT64_MAX - ALIGNMENT:
            return f"shape {self.shape} is larger than memory can be"
        if self.row_multiple < 1:
            return f"row_multiple must be at least 1, got {self.row_multiple}"
        if self.row_multiple > 1 and (not self.shape or self.shape[0] % self.row_multiple):
            return f"shape {self.shape} has no multiple of {self.row_multiple} rows"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeHints:
    """The named tensors of one broadcast, in their order in the packed buffer.

    Raises:
        ValueError: a tensor cannot be sent as described; nothing was allocated.
    """

    tensors: tuple[tuple[str, TensorHint], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.tensors]
        if len(set(names)) != len(names):
            raise ValueError(f"names must differ, got {names}")
        for name, hint in self.tensors:
            if (problem := hint.problem()) is not None:
                raise ValueError(f"tensor {name!r}: {problem}")

    @classmethod
    def of(
        cls,
        named: Mapping[str, Tensor],
        *,
        device: torch.device,
        row_multiples: Mapping[str, int] | None = None,
        inline_bytes: int = INLINE_BYTES,
    ) -> ShapeHints:
        """Describe tensors of rank 0. They are not read.

        Args:
            named: each on `device` or on the CPU.
            device: of the group.
            row_multiples: names whose first dimension must be a multiple of something.
            inline_bytes: see INLINE_BYTES.

        Raises:
            ValueError: a tensor is on another device, has a shape that cannot be sent, or a name
                in row_multiples is not given.
        """
        multiples = row_multiples or {}
        if unknown := sorted(multiples.keys() - named.keys()):
            raise ValueError(f"row_multiples names tensors that are not given: {unknown}")
        inline_left = inline_bytes
        tensors = []
        for name, t in named.items():
            place = Place.DEVICE
            if t.device.type == "cpu":
                nbytes = t.numel() * t.element_size()
                # on a CPU group the two places are one
                place = Place.CPU_INLINE if nbytes <= inline_left else _cpu_place(device)
                inline_left -= nbytes if place is Place.CPU_INLINE else 0
            elif t.device != device:
                raise ValueError(f"tensor {name!r}: expected it on {device} or cpu, got {t.device}")
            hint = TensorHint(
                shape=tuple(t.shape),
                dtype=t.dtype,
                place=place,
                row_multiple=multiples.get(name, 1),
            )
            tensors.append((name, hint))
        return cls(tensors=tuple(tensors))

    def offsets(self, place: Place) -> tuple[dict[str, int], int]:
        """Where each tensor of a place begins in its packed buffer, and the buffer's bytes."""
        found, end = {}, 0
        for name, hint in self.tensors:
            if hint.place is place:
                found[name] = end
                end += -(-hint.nbytes // ALIGNMENT) * ALIGNMENT
        return found, end

    def to_ints(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """All hints as int64: for each tensor dtype, place, row_multiple, dimensions, shape."""
        flat: list[int] = []
        for _, hint in self.tensors:
            flat += (_DTYPES.index(hint.dtype), hint.place, hint.row_multiple, len(hint.shape))
            flat += hint.shape
        return np.array(flat, dtype=np.int64)

    @classmethod
    def from_ints(cls, names: list[str], ints: list[int]) -> ShapeHints:
        """The reverse of `to_ints`.

        Raises:
            ProtocolError: these are not hints, or describe tensors that must not be allocated.
        """
        tensors, at = [], 0
        try:
            for name in names:
                code, place, multiple, dims = ints[at : at + 4]
                shape = tuple(ints[at + 4 : at + 4 + dims])
                if not 0 <= code < len(_DTYPES) or len(shape) != dims:
                    raise ValueError(f"tensor {name!r}: dtype {code}, {dims} dimensions")
                hint = TensorHint(
                    shape=shape, dtype=_DTYPES[code], place=Place(place), row_multiple=multiple
                )
                tensors.append((name, hint))
                at += 4 + dims
            if at != len(ints):
                raise ValueError(f"{len(ints) - at} integers too many")
            return cls(tensors=tuple(tensors))
        except ValueError as error:
            raise ProtocolError(f"hints of tensors {names} cannot be used: {error}") from error


def _cpu_place(device: torch.device) -> Place:
    return Place.DEVICE if device.type == "cpu" else Place.CPU

"""How the ranks of a group sum tensors of each size: decided on one rank, the same on all."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from tp_runtime.errors import PlanFormatError

__all__ = ["NO_PEER_REDUCE", "PROGRAM_BYTES", "REDUCED_BYTES", "ReducePlan"]

PROGRAM_BYTES: Final = (2048, 4096, 8192, 16384)
"""What one program of the kernel may sum: 16 bytes for each of its threads."""

REDUCED_BYTES: Final = tuple(1 << power for power in range(13, 21))
"""Sizes for which a choice is made, 8 KiB to 1 MiB; a tensor takes that of the next."""

_USUAL_PROGRAM_BYTES = 4096
_USUAL_MOST_SENT = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducePlan:
    """A choice for each of the first sizes of `REDUCED_BYTES`; NCCL sums what is larger.

    program_bytes: one of `PROGRAM_BYTES` for the one-shot kernel over peer memory, 0 for NCCL.
    """

    program_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        known = (0, *PROGRAM_BYTES)
        wrong = [b for b in self.program_bytes if type(b) is not int or b not in known]
        if wrong or len(self.program_bytes) > len(REDUCED_BYTES):
            raise PlanFormatError(
                f"expected at most {len(REDUCED_BYTES)} numbers of {known}, got "
                f"{list(self.program_bytes)}"
            )

    def for_bytes(self, nbytes: int) -> int:
        """Bytes of a program for a tensor of this size, 0 for NCCL."""
        index = bisect_left(REDUCED_BYTES, nbytes)
        return self.program_bytes[index] if index < len(self.program_bytes) else 0

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the choices; what graphs hold depends on them."""
        return hashlib.sha256(json.dumps(self.to_message()).encode()).hexdigest()

    def to_message(self) -> list[int]:
        return list(self.program_bytes)

    @classmethod
    def from_message(cls, message: object) -> Self:
        """The inverse of `to_message`. Raises PlanFormatError."""
        if not isinstance(message, Sequence) or isinstance(message, (str, bytes)):
            raise PlanFormatError(f"expected a list of sizes, got {type(message).__name__}")
        return cls(program_bytes=tuple(message))

    @classmethod
    def usual(cls, ranks: int) -> Self:
        """Without measuring: every rank sends its tensor to each other one, up to 1 MiB in all."""
        small = [b for b in REDUCED_BYTES if b * (ranks - 1) <= _USUAL_MOST_SENT]
        return cls(program_bytes=(_USUAL_PROGRAM_BYTES,) * len(small))


NO_PEER_REDUCE: Final = ReducePlan()
"""NCCL sums everything."""

"""How a skinny product may run: one configuration, and the ones worth measuring for a shape."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_ROWS: Final = 64
_DTYPES: Final = (torch.float16, torch.bfloat16)
_K_MULTIPLE: Final = 16  # loads of 16 bytes, and one step of the tensor cores
_SHARED_BYTES: Final = 227 << 10  # of a multiprocessor of Hopper; less there is refused at launch


class SkinnyOp(Enum):
    """The operations of `skinny`, named as its functions are."""

    LINEAR = "linear"
    LINEAR_RESIDUAL = "linear_residual"
    NORM_LINEAR = "norm_linear"
    NORM_GATE_UP = "norm_gate_up"

    @property
    def stacked(self) -> int:
        """Rows of the weight per column of the result."""
        return 2 if self is SkinnyOp.NORM_GATE_UP else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SkinnyConfig:
    """One way to run a product; equal on every rank, compiled once whatever n and k are.

    Args:
        kernel: "fma" for one row, "dot" (tensor cores) for any number up to 64.
        block_n: columns of the result per program and tile; powers of two, like block_k.
        block_k: columns of the weight per step.
        warps: per program.
        stages: tiles of weights in shared memory, being loaded or used; 1: straight to registers.
        split: parts of k, each with a program of its own ("dot").
        per_sm: programs per multiprocessor, which take tiles in turn ("fma").
        dependent_launch: start before the kernel before has ended (compute capability 9.0).
    """

    kernel: Literal["fma", "dot"]
    block_n: int
    block_k: int
    warps: int = 4
    stages: int = 4
    split: int = 1
    per_sm: int = 1
    dependent_launch: bool = True

    @staticmethod
    def block_m(rows: int) -> int:
        """Rows as the tensor cores count them."""
        return 16 if rows <= 16 else 32 if rows <= 32 else 64

    def to_dict(self) -> dict[str, Any]:
        """For JSON or MessagePack."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SkinnyConfig:
        """The inverse of `to_dict`.

        Raises: TypeError: a field is missing or unknown.
        """
        return cls(**fields)

    def shared_bytes(self, op: SkinnyOp, rows: int, itemsize: int = 2) -> int:
        """Shared memory of a program for its loads, without what reductions need."""
        if self.stages == 1:
            return 0
        inputs = self.block_m(rows) if self.kernel == "dot" else 2
        return self.stages * self.block_k * itemsize * (self.block_n * op.stacked + inputs)


def refusal(
    op: SkinnyOp,
    *,
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    config: SkinnyConfig | None = None,
) -> str | None:
    """Why no kernel, or not that of a configuration, may run a shape; None: it may.

    Args:
        op: the operation.  rows, n, k: of the result [rows, n] and the weight's columns.
        dtype: of all tensors.
    """
    if dtype not in _DTYPES:
        return f"expected float16 or bfloat16, got {dtype}"
    if not 1 <= rows <= MOST_ROWS:
        return f"expected 1 to {MOST_ROWS} rows, got {rows}"
    if n < 1 or k < _K_MULTIPLE or k % _K_MULTIPLE:
        return f"expected n >= 1 and k a multiple of {_K_MULTIPLE}, got n={n}, k={k}"
    if config is None:
        return None
    if config.kernel == "fma" and rows != 1:
        return f"the kernel fma takes one row, got {rows}"
    if config.shared_bytes(op, rows) > _SHARED_BYTES:
        return f"needs {config.shared_bytes(op, rows)} bytes of shared memory"
    return None


# Found on an H200 in chains of a whole layer. A kernel starts while the one before still runs, on
# whatever multiprocessor has room: configurations that take more than half of one, or many programs
# of it, are placed unevenly then, and lose in a chain what they gain alone.
_ONE_ROW: Final = (
    {"block_n": 8, "block_k": 1024, "stages": 5, "per_sm": 1},
    {"block_n": 16, "block_k": 512, "stages": 5, "per_sm": 1},
    {"block_n": 8, "block_k": 1024, "stages": 3, "per_sm": 2},
    {"block_n": 8, "block_k": 512, "stages": 5, "per_sm": 2},
    {"block_n": 4, "block_k": 512, "stages": 5, "per_sm": 2},
)
_MORE_ROWS: Final = (
    {"block_n": 32, "block_k": 256, "stages": 6},
    {"block_n": 64, "block_k": 128, "stages": 6},
    {"block_n": 64, "block_k": 128, "stages": 4},
    {"block_n": 64, "block_k": 256, "stages": 4},
    {"block_n": 64, "block_k": 128, "stages": 5, "split": 2},
    {"block_n": 64, "block_k": 256, "stages": 4, "split": 2},
)


def candidates(
    op: SkinnyOp, *, rows: int, n: int, k: int, dependent_launch: bool = True
) -> list[SkinnyConfig]:
    """The configurations worth measuring for a shape, without torch itself.

    Args:
        dependent_launch: whether the device has it (compute capability 9.0 or later).
    """
    kernel: Literal["fma", "dot"] = "fma" if rows == 1 else "dot"
    listed = [
        SkinnyConfig(kernel=kernel, dependent_launch=dependent_launch, **fields)
        for fields in (_ONE_ROW if rows == 1 else _MORE_ROWS)
    ]
    return [
        config
        for config in listed
        if refusal(op, rows=rows, n=n, k=k, dtype=torch.bfloat16, config=config) is None
    ]


def usual(op: SkinnyOp, *, rows: int, n: int, k: int, dtype: torch.dtype) -> SkinnyConfig | None:
    """The configuration for a shape that was not measured; None: as torch does."""
    for config in candidates(op, rows=rows, n=n, k=k):
        if refusal(op, rows=rows, n=n, k=k, dtype=dtype, config=config) is None:
            return config
    return None

"""What the CPU backends share: the support check, and scratch memory that only grows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from tp_runtime.errors import SelectionError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from tp_runtime.selection.base import DecodeShape, DecodeStep, DeviceInfo, PagedKV

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def cpu_refusal(shape: DecodeShape, device: DeviceInfo) -> str | None:
    """Why the CPU backends cannot serve a shape, or None."""
    if device.type != "cpu":
        return f"runs on the CPU only, not on {device.type}"
    if shape.q_len != 1:
        return f"one query token per row only, not q_len {shape.q_len}"
    return layout_refusal(shape)


def layout_refusal(shape: DecodeShape) -> str | None:
    """Why no torch backend can serve a shape, or None."""
    for name in (shape.dtype, shape.kv_dtype or shape.dtype):
        if name not in DTYPES:
            return f"dtype {name} is not one of {', '.join(DTYPES)}"
    if min(shape.q_heads, shape.kv_heads, shape.head_dim, shape.page_size, shape.table_width) < 1:
        return f"a size is below 1 in {shape}"
    if shape.q_heads % shape.kv_heads:
        return f"{shape.q_heads} query heads are no multiple of {shape.kv_heads} KV heads"
    return None


class Scratch:
    """Named buffers that grow to the largest request and are never given back."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of that shape; its content is undefined."""
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name, dtype] = torch.empty(size, dtype=dtype)
        return buffer[:size].view(shape)

    def gather(self, name: str, source: Tensor, index: Tensor) -> Tensor:
        """float32 rows source[index] of a 2-D or wider tensor; one copy, two for 16-bit types."""
        shape = (index.numel(), *source.shape[1:])
        raw = self(name, shape, source.dtype)
        torch.index_select(source, 0, index, out=raw)
        return raw if source.dtype == torch.float32 else self(name, shape, torch.float32).copy_(raw)


class PerStep:
    """Host lengths of the step, and whether index tensors built for a block table still hold.

    All layers of a step share one block table, so that what is derived from it is built in the
    first layer and used in the others.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lengths: np.ndarray[Any, np.dtype[np.int32]] | None = None
        self._table: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None

    def begin(self, step: DecodeStep) -> None:
        self._lengths = step.kv_lens
        self._table = None

    def lengths(self, rows: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """KV lengths of the rows, int32 [rows].

        Raises: SelectionError: prepare() was not called for this many rows.
        """
        if self._lengths is None or len(self._lengths) < rows:
            got = "never called" if self._lengths is None else f"called for {len(self._lengths)}"
            raise SelectionError(f"{self._name}: forward with {rows} rows, but prepare() was {got}")
        return self._lengths[:rows]

    def stale(self, kv: PagedKV) -> bool:
        """True in the first layer of a step, or if the layer has another block table."""
        table = kv.block_table
        identity = (table.data_ptr(), tuple(table.shape), tuple(kv.k.shape))
        if identity == self._table:
            return False
        self._table = identity
        return True

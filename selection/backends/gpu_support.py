"""What the GPU backends share: static support checks, private workspaces, pinned staging.

Nothing here imports FlashInfer, cuDNN or Triton; whether they are installed is looked up without
importing them.
"""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tp_runtime.errors import SelectionError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from tp_runtime.selection.base import DecodeShape, DecodeStep, DeviceInfo, PagedKV

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
FP8 = "float8_e4m3fn"
KERNEL_PAGES = (16, 32, 64, 128)
_IMPORTING = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What a kernel can do; `refusal` says in words what a shape asks for beyond it.

    Args:
        capabilities: major compute capabilities it runs on; empty for 8 and above.
        modules: packages it needs.
        head_dims, page_sizes, groups: what it has kernels for; empty for any.
        fp8_kv: reads float8_e4m3fn pages.
        long_queries: takes more than one query token per row.
        compiles: needs nvcc when its kernel is first used.
    """

    modules: tuple[str, ...]
    capabilities: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    head_dims: tuple[int, ...] = (64, 128, 256)
    page_sizes: tuple[int, ...] = KERNEL_PAGES
    groups: tuple[int, ...] = ()
    fp8_kv: bool = False
    long_queries: bool = False
    compiles: bool = False

    def refusal(self, shape: DecodeShape, device: DeviceInfo) -> str | None:
        """Why it cannot serve the shape on the device, or None. Imports and builds nothing."""
        if device.type != "cuda":
            return f"runs on NVIDIA GPUs only, not on {device.type}"
        major = (device.capability or (0, 0))[0]
        if self.capabilities and major not in self.capabilities:
            wanted = " or ".join(f"{c}.x" for c in self.capabilities)
            return f"needs compute capability {wanted}, {device.name} has {_dotted(device)}"
        if major < 8:
            return f"needs compute capability 8.0, {device.name} has {_dotted(device)}"
        return self._shape_refusal(shape) or self._missing()

    def _shape_refusal(self, shape: DecodeShape) -> str | None:
        if min(shape.q_heads, shape.kv_heads, shape.table_width, shape.q_len) < 1:
            return f"a size is below 1 in {shape}"
        if shape.q_heads % shape.kv_heads:
            return f"{shape.q_heads} query heads are no multiple of {shape.kv_heads} KV heads"
        if shape.dtype not in self.dtypes:
            return f"dtype {shape.dtype} is not one of {', '.join(self.dtypes)}"
        kv_dtype = shape.kv_dtype or shape.dtype
        if kv_dtype != shape.dtype and not (kv_dtype == FP8 and self.fp8_kv):
            return f"{kv_dtype} pages with {shape.dtype} queries are not supported"
        for what, value, known in (
            ("head_dim", shape.head_dim, self.head_dims),
            ("page size", shape.page_size, self.page_sizes),
            ("group of query heads per KV head", shape.group_size, self.groups),
        ):
            if known and value not in known:
                return f"{what} {value} is not one of {', '.join(map(str, known))}"
        if shape.q_len > 1 and not self.long_queries:
            return f"one query token per row only, not q_len {shape.q_len}"
        return None

    def _missing(self) -> str | None:
        for name in self.modules:
            if find_spec(name) is None:
                return f"the package {name} is not installed"
        if self.compiles and not can_compile():
            return "its kernels are compiled when first used, and no nvcc was found"
        return None


def can_compile() -> bool:
    """Whether FlashInfer can get at its kernels: an nvcc, or kernels that were built before."""
    if os.environ.get("FLASHINFER_NVCC") or shutil.which("nvcc"):
        return True
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    if any(home and Path(home, "bin", "nvcc").exists() for home in homes):
        return True
    return find_spec("flashinfer_jit_cache") is not None


def load_package(name: str) -> Any:
    """Import a package. Kernels are built in threads, and two threads that import parts of one
    package at once find each other's half-made modules."""
    with _IMPORTING:
        return import_module(name)


def checked_rows(name: str, shape: DecodeShape, q: Tensor, kv: PagedKV) -> int:
    """Rows of a batch whose tensors lie as the kernels read them.

    Raises: SelectionError: names the tensor that does not, and how it should.
    """
    rows, width = kv.block_table.shape
    if width != shape.table_width:
        raise SelectionError(
            f"{name}: expected a block table {shape.table_width} pages wide, got {width}"
        )
    if q.shape != (rows * shape.q_len, shape.q_heads, shape.head_dim):
        raise SelectionError(
            f"{name}: expected q [{rows * shape.q_len}, {shape.q_heads}, {shape.head_dim}] for "
            f"{rows} rows, got {list(q.shape)}"
        )
    if kv.k.shape[1:] != (shape.kv_heads, shape.page_size, shape.head_dim):
        raise SelectionError(
            f"{name}: expected pages [{shape.kv_heads}, {shape.page_size}, {shape.head_dim}], "
            f"got {list(kv.k.shape[1:])}"
        )
    for what, tensor in (("q", q), ("k", kv.k), ("v", kv.v), ("block table", kv.block_table)):
        if not tensor.is_contiguous():
            raise SelectionError(f"{name}: {what} is not contiguous: strides {tensor.stride()}")
    return rows


def current_stream(device: torch.device) -> int:
    """The CUDA stream that the next launch goes to."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def capturing() -> bool:
    return bool(torch.cuda.is_current_stream_capturing())


class Workspaces:
    """Scratch memory of a kernel, one zeroed buffer per stream, never shared with another.

    Some kernels count arrivals in it and leave it zero when they are done, so that two streams, or
    a launch that failed half-way, would break every later one.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self._device = device
        self._buffers: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []  # a captured graph may hold the address of a smaller one

    def get(self, size_bytes: int) -> Tensor:
        """At least that many bytes, uint8, for the current stream; zero when first handed out.

        Raises: SelectionError: it would have to be allocated inside a capture.
        """
        stream = current_stream(self._device)
        buffer = self._buffers.get(stream)
        if buffer is None or buffer.numel() < size_bytes:
            if capturing():
                raise SelectionError(
                    f"{self._name}: run once on the capturing stream before the capture, with as "
                    f"many rows: its workspace of {size_bytes} bytes does not exist yet"
                )
            if buffer is not None:
                self._kept.append(buffer)
            buffer = torch.zeros(size_bytes, dtype=torch.uint8, device=self._device)
            self._buffers[stream] = buffer
        return buffer

    def reset(self) -> None:
        """Zero everything; after a launch that failed."""
        for buffer in (*self._buffers.values(), *self._kept):
            buffer.zero_()

    @property
    def num_bytes(self) -> int:
        return sum(b.numel() for b in (*self._buffers.values(), *self._kept))


class Staging:
    """A pinned host buffer for one plan, and the event after which it may be written again."""

    def __init__(self, plan_bytes: int) -> None:
        self.plan = torch.zeros(plan_bytes, dtype=torch.uint8, pin_memory=True)
        self.lengths = torch.zeros(0, dtype=torch.int32, pin_memory=True)
        self._bytes = self.plan.numpy()  # torch would wake its threads to clear some kilobytes
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._used = False

    def reuse(self, rows: int, plan_bytes: int) -> None:
        """Wait until the copies of the last use are done, then clear; see `StagingRing`."""
        if self._used and not self._event.query():
            self._event.synchronize()
        # a kernel must not find the entries of a larger plan where this one writes nothing
        self._bytes[:plan_bytes] = 0
        if self.lengths.numel() < rows:
            self.lengths = torch.zeros(rows, dtype=torch.int32, pin_memory=True)

    def sent(self) -> None:
        """Every copy from here is queued on the current stream."""
        self._event.record()
        self._used = True


class StagingRing:
    """Pinned buffers in turn: a plan is written while the copies of those before are queued."""

    def __init__(self, slots: int, plan_bytes: int) -> None:
        self._slots = [Staging(plan_bytes) for _ in range(slots)]
        self._next = 0

    def take(self, rows: int, plan_bytes: int) -> Staging:
        """The oldest buffer, with that many bytes cleared.

        Waits for its event, which has passed unless the host is `slots` steps ahead of the device.
        """
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.reuse(rows, plan_bytes)
        return slot


def host_pages(
    name: str, shape: DecodeShape, step: DecodeStep
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Pages in use of each row, int32.

    Raises: SelectionError: a length is outside of 1 .. the width of the block table.
    """
    lengths = step.kv_lens
    if len(lengths) == 0 or int(lengths.min()) < shape.q_len or lengths.max() > shape.max_kv_len:
        raise SelectionError(
            f"{name}: expected KV lengths from {shape.q_len} to {shape.max_kv_len}, got "
            f"{lengths.tolist()}"
        )
    return (lengths + (shape.page_size - 1)) // shape.page_size


def _dotted(device: DeviceInfo) -> str:
    return ".".join(map(str, device.capability)) if device.capability else "none"

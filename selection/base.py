"""The words of the selection: a problem, a device, a step, a paged cache, and a backend.

No torch import at run time: listing and deciding must not need it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape:
    """The decode attention problem of one rank.

    Head counts are per rank. `page_size` is the kernel page in tokens; `table_width` is the width
    of the serving block table in pages (some kernels split by it, so it is part of the problem).
    dtypes are torch names without the prefix, such as "float32".
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    page_size: int
    table_width: int
    kv_dtype: str | None = None
    q_len: int = 1

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def max_kv_len(self) -> int:
        return self.page_size * self.table_width


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What a support check may look at. `capability` is None where there is none (CPU)."""

    type: str
    name: str
    capability: tuple[int, int] | None = None
    index: int | None = None

    @classmethod
    def of(cls, device: torch.device) -> DeviceInfo:
        if device.type == "cuda":
            import torch

            index = device.index if device.index is not None else torch.cuda.current_device()
            return cls(
                type="cuda",
                name=torch.cuda.get_device_name(index),
                capability=torch.cuda.get_device_capability(index),
                index=index,
            )
        return cls(type=device.type, name=_cpu_name() if device.type == "cpu" else device.type)


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """What every rank knows on the host about one decode step.

    Args:
        batch_size: valid rows.
        bucket: rows the step runs with; None for eager, where it is the batch size.
        kv_lens: int32 [rows], tokens to attend to, the one being written included; padded rows 1.
        variant: which of the bucket's backends; decided once, on rank 0.
    """

    batch_size: int
    kv_lens: np.ndarray[tuple[int], np.dtype[np.int32]]
    bucket: int | None = None
    variant: int = 0

    @cached_property
    def total_kv(self) -> int:
        """Tokens attended to by the valid rows."""
        return int(self.kv_lens[: self.batch_size].sum())

    @cached_property
    def max_kv(self) -> int:
        return int(self.kv_lens[: self.batch_size].max()) if self.batch_size else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKV:
    """One layer's paged cache as every backend reads it, without a copy.

    k, v: [pages, kv_heads, page_size, head_dim] (HND pages). block_table: int32 [rows, width], page
    numbers; entries beyond a row's length are garbage. kv_lens: int32 [rows], on the device.
    """

    k: Tensor
    v: Tensor
    block_table: Tensor
    kv_lens: Tensor


class DecodeBackend(Protocol):
    """One way to compute decode attention. Built for one shape on one device."""

    name: str
    needs_host_lengths: bool

    @staticmethod
    def refusal(shape: DecodeShape, device: DeviceInfo) -> str | None:
        """Why it cannot serve this shape there, or None. Static: builds, plans, touches nothing."""
        ...

    def prepare_for_capture(self, bucket: int) -> None:
        """Called once per bucket, outside capture; may allocate."""
        ...

    def prepare(self, step: DecodeStep) -> None:
        """Called before each run or replay, with host lengths; must not synchronise."""
        ...

    def forward(self, q: Tensor, kv: PagedKV, out: Tensor) -> None:
        """Attend: q and out are [rows * q_len, q_heads, head_dim]; scale is head_dim ** -0.5."""
        ...


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except FileNotFoundError:
        pass
    return "cpu"

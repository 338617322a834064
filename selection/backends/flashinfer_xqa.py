"""FlashInfer's XQA kernel: no plan, lengths read on the device, splits fixed at capture.

It divides a row by the WIDTH of the block table, not by its length, so that it must be measured at
the serving width. It counts arrivals in a buffer that must be zero when it starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tp_runtime.selection.backends.gpu_support import (
    DTYPES,
    Support,
    Workspaces,
    checked_rows,
    load_package,
)

if TYPE_CHECKING:
    from torch import Tensor

    from tp_runtime.selection.base import DecodeShape, DecodeStep, DeviceInfo, PagedKV

SUPPORT = Support(
    modules=("flashinfer",),
    capabilities=(9, 10, 12),
    groups=tuple(range(1, 17)),
    compiles=True,
)
_SEMAPHORE_BYTES = 1 << 20
_SCRATCH_BYTES = 32 << 20  # at most one partial result per multiprocessor


class FlashInferXqa:
    name = "flashinfer_xqa"
    needs_host_lengths = False

    def __init__(self, shape: DecodeShape, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._shape = shape
        self._sm_count = properties.multi_processor_count
        self._pdl = properties.major >= 9
        self._workspaces = Workspaces(self.name, device)
        self._loaded: Any = None

    @staticmethod
    def refusal(shape: DecodeShape, device: DeviceInfo) -> str | None:
        return SUPPORT.refusal(shape, device)

    def build(self) -> None:
        """Compile and load the kernel, if it was never built."""
        self._module()

    def prepare_for_capture(self, bucket: int) -> None:
        self._module()
        self._workspaces.get(_SEMAPHORE_BYTES + _SCRATCH_BYTES)

    def prepare(self, step: DecodeStep) -> None:
        """Reads lengths on the device."""

    def forward(self, q: Tensor, kv: PagedKV, out: Tensor) -> None:
        shape = self._shape
        rows = checked_rows(self.name, shape, q, kv)
        workspace = self._workspaces.get(_SEMAPHORE_BYTES + _SCRATCH_BYTES)
        heads = (rows, 1, shape.q_heads, shape.head_dim)
        try:
            self._module().xqa(
                False,  # the kernel for 16-bit pages; the one for 8 bits does not match here
                self._sm_count,
                shape.kv_heads,
                0,  # no sliding window
                1.0,
                out.view(heads),
                1.0,
                q.view(heads),
                None,  # no sinks
                kv.k.transpose(1, 2),  # strides say that the pages are HND
                kv.v.transpose(1, 2),
                None,
                None,
                kv.block_table,
                shape.max_kv_len,
                kv.kv_lens.view(rows, 1),
                rows,
                1.0,
                workspace[:_SEMAPHORE_BYTES],
                workspace[_SEMAPHORE_BYTES:],
                self._pdl,
                1,  # one query token
                None,
            )
        except RuntimeError:
            self._workspaces.reset()  # its counters may be half-way
            raise

    def _module(self) -> Any:
        if self._loaded is None:
            make = load_package("flashinfer.xqa").get_xqa_module
            shape = self._shape
            dtype = DTYPES[shape.dtype]
            self._loaded = make(
                dtype,
                DTYPES[shape.kv_dtype or shape.dtype],
                shape.page_size,
                shape.head_dim,
                shape.group_size,
                False,  # no sliding window
                dtype,
                1,
            )
        return self._loaded

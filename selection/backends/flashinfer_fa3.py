"""FlashInfer's fa3 (Hopper) prefill kernel as decode attention; only when it is named.

It packs no query heads and never splits a row, so that it is slow for few rows, and its first build
takes minutes. It is here to be measured against.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tp_runtime.selection.backends.flashinfer_paged import BucketState, FlashInferPrefill
from tp_runtime.selection.backends.gpu_support import Support

if TYPE_CHECKING:
    from torch import Tensor

    from tp_runtime.selection.base import DecodeShape, DeviceInfo

SUPPORT = Support(modules=("flashinfer",), capabilities=(9,), compiles=True, page_sizes=())


class FlashInferFa3(FlashInferPrefill):
    name = "flashinfer_fa3"
    kernel = "fa3"

    @staticmethod
    def refusal(shape: DecodeShape, device: DeviceInfo) -> str | None:
        return SUPPORT.refusal(shape, device)

    def _scratch_bytes(self, rows: int) -> int:
        return 1 << 20  # it writes no partial results

    def _plan_indptr(self, state: BucketState) -> Tensor:
        # this planner writes the entries down for the kernel: they must be the table's
        steps = torch.arange(len(state.host_indptr), dtype=torch.int32)
        return steps * self._shape.table_width

    def _blocks(self, rows: int) -> int:
        return 2 * rows * self._shape.q_heads + 1024  # a piece of work per query head

    def _split_arguments(self) -> tuple[object, ...]:
        return ()

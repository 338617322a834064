"""FlashInfer's fa2 prefill kernel as decode attention: tensor cores, any group, host plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tp_runtime.selection.backends.flashinfer_paged import FlashInferPrefill
from tp_runtime.selection.backends.gpu_support import Support

if TYPE_CHECKING:
    from tp_runtime.selection.base import DecodeShape, DeviceInfo

SUPPORT = Support(
    modules=("flashinfer",), fp8_kv=True, long_queries=True, compiles=True, page_sizes=()
)


class FlashInferFa2Tc(FlashInferPrefill):
    name = "flashinfer_fa2_tc"
    kernel = "fa2"

    @staticmethod
    def refusal(shape: DecodeShape, device: DeviceInfo) -> str | None:
        return SUPPORT.refusal(shape, device)

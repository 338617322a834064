"""The TensorRT-LLM generated kernels that FlashInfer ships for Blackwell; refused elsewhere.

Not run by us: no Blackwell GPU was at hand. The numeric gate decides where there is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tp_runtime.selection.backends.gpu_support import Support, Workspaces, checked_rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tp_runtime.selection.base import DecodeShape, DecodeStep, DeviceInfo, PagedKV

SUPPORT = Support(
    modules=("flashinfer",),
    capabilities=(10,),
    head_dims=(64, 128),
    page_sizes=(16, 32, 64),
    fp8_kv=True,
)
_WORKSPACE_BYTES = 128 << 20


class FlashInferTrtllmGen:
    name = "flashinfer_trtllm_gen"
    needs_host_lengths = False

    def __init__(self, shape: DecodeShape, device: torch.device) -> None:
        self._shape = shape
        self._workspaces = Workspaces(self.name, device)

    @staticmethod
    def refusal(shape: DecodeShape, device: DeviceInfo) -> str | None:
        return SUPPORT.refusal(shape, device)

    def prepare_for_capture(self, bucket: int) -> None:
        self._workspaces.get(_WORKSPACE_BYTES)

    def prepare(self, step: DecodeStep) -> None:
        """Reads lengths on the device."""

    def forward(self, q: Tensor, kv: PagedKV, out: Tensor) -> None:
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache

        checked_rows(self.name, self._shape, q, kv)
        workspace = self._workspaces.get(_WORKSPACE_BYTES)
        try:
            trtllm_batch_decode_with_kv_cache(
                q,
                (kv.k, kv.v),
                workspace,
                kv.block_table,
                kv.kv_lens,
                self._shape.max_kv_len,
                bmm1_scale=self._shape.head_dim**-0.5,
                out=out,
                kv_layout="HND",
                backend="trtllm-gen",
            )
        except RuntimeError:
            self._workspaces.reset()
            raise

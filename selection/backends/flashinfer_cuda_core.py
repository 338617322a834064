"""FlashInfer's decode kernel on CUDA cores, planned per step; only some group sizes exist."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tp_runtime.selection.backends.flashinfer_paged import HND, BucketState, FlashInferPaged
from tp_runtime.selection.backends.gpu_support import Support, load_package

if TYPE_CHECKING:
    from torch import Tensor

    from tp_runtime.selection.base import DecodeShape, DeviceInfo, PagedKV

SUPPORT = Support(
    modules=("flashinfer",), groups=(1, 2, 3, 4, 6, 8), fp8_kv=True, compiles=True, page_sizes=()
)


class FlashInferCudaCore(FlashInferPaged):
    name = "flashinfer_cuda_core"

    def __init__(self, shape: DecodeShape, device: torch.device) -> None:
        super().__init__(shape, device)
        self._empty = [torch.empty(0, dtype=dtype) for dtype in self._dtypes()]

    @staticmethod
    def refusal(shape: DecodeShape, device: DeviceInfo) -> str | None:
        return SUPPORT.refusal(shape, device)

    def _load(self) -> Any:
        make = load_package("flashinfer.decode").get_batch_decode_module
        q_dtype, kv_dtype = self._dtypes()
        dim = self._shape.head_dim
        return make(q_dtype, kv_dtype, q_dtype, torch.int32, dim, dim, 0, False, False)

    def _scratch_bytes(self, rows: int) -> int:
        shape = self._shape
        return shape.q_heads * self._blocks(rows) * (shape.head_dim + 1) * 4 + (1 << 20)

    def _plan(self, state: BucketState, staging: Tensor, lengths: Tensor, rows: int) -> Any:
        shape = self._shape
        return self._module().plan(
            state.scratch,
            state.plan,
            staging,
            state.host_indptr,
            rows,
            shape.q_heads,
            shape.kv_heads,
            shape.page_size,
            True,  # the form of a plan that a graph can be captured with
            -1,  # no sliding window
            0.0,
            shape.head_dim,
            shape.head_dim,
            self._empty[0],
            self._empty[1],
        )

    def _run(self, state: BucketState, q: Tensor, kv: PagedKV, out: Tensor) -> None:
        self._module().run(
            state.scratch,
            state.plan,
            state.info,
            q,
            kv.k,
            kv.v,
            state.indptr,
            kv.block_table.view(-1),
            state.last_page_len,
            out,
            None,  # no log-sum-exp
            HND,
            -1,
            self._pdl,
            None,
            0.0,
            self._shape.head_dim**-0.5,
            1.0,
            1e4,
        )

"""cuDNN's paged decode attention through its Python front end.

One cuDNN graph per (rows, pages of the cache), built when it is first run, which must be outside a
capture; the key holds every dimension and stride that is baked in. It splits by the width of the
block table, like XQA. Its results are not the same bits in every run: it adds up the parts of a
split row in the order in which they arrive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tp_runtime.errors import SelectionError
from tp_runtime.selection.backends.gpu_support import (
    Support,
    Workspaces,
    capturing,
    checked_rows,
    current_stream,
    load_package,
)

if TYPE_CHECKING:
    from torch import Tensor

    from tp_runtime.selection.base import DecodeShape, DecodeStep, DeviceInfo, PagedKV

SUPPORT = Support(modules=("cudnn",), capabilities=(8, 9, 10), head_dims=(64, 128))
_Q, _K, _V, _TABLE_K, _TABLE_V, _LENS_Q, _LENS_KV, _OUT = range(1, 9)
_LEAST_WORKSPACE_BYTES = 1 << 20


class Cudnn:
    name = "cudnn"
    needs_host_lengths = False

    def __init__(self, shape: DecodeShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._handles: dict[int, Any] = {}
        self._graphs: dict[tuple[int, ...], tuple[Any, int]] = {}
        self._ones: dict[int, Tensor] = {}
        self._workspaces = Workspaces(self.name, device)

    @staticmethod
    def refusal(shape: DecodeShape, device: DeviceInfo) -> str | None:
        return SUPPORT.refusal(shape, device)

    def build(self) -> None:
        """Load the library and its engines, which takes seconds the first time."""
        shape = self._shape
        pages = (2, shape.kv_heads, shape.page_size, shape.head_dim)
        strides = (pages[1] * pages[2] * pages[3], pages[2] * pages[3], pages[3], 1)
        with torch.cuda.device(self._device):
            self._build(1, pages, strides, strides)

    def prepare_for_capture(self, bucket: int) -> None:
        """The graph is built by the first run: only then is the size of the cache known."""

    def prepare(self, step: DecodeStep) -> None:
        """Reads lengths on the device."""

    def forward(self, q: Tensor, kv: PagedKV, out: Tensor) -> None:
        rows = checked_rows(self.name, self._shape, q, kv)
        key = (rows, *kv.k.shape, *kv.k.stride(), *kv.v.stride())
        if key not in self._graphs:
            if capturing():
                raise SelectionError(f"{self.name}: run {rows} rows once before the capture")
            strides = kv.k.stride(), kv.v.stride()
            self._graphs[key] = self._build(rows, tuple(kv.k.shape), *strides)
            self._ones[rows] = torch.ones((rows, 1, 1, 1), dtype=torch.int32, device=q.device)
        graph, size_bytes = self._graphs[key]
        width = self._shape.table_width
        table = kv.block_table.view(rows, 1, width, 1)
        tensors = {
            _Q: q,
            _K: kv.k,
            _V: kv.v,
            _TABLE_K: table,
            _TABLE_V: table,
            _LENS_Q: self._ones[rows],
            _LENS_KV: kv.kv_lens.view(rows, 1, 1, 1),
            _OUT: out,
        }
        workspace = self._workspaces.get(max(size_bytes, _LEAST_WORKSPACE_BYTES))
        graph.execute(tensors, workspace, handle=self._handle())

    def _handle(self) -> Any:
        """One handle per stream; a handle is bound to the stream it was made for."""
        stream = current_stream(self._device)
        if stream not in self._handles:
            cudnn = _cudnn()
            handle = cudnn.create_handle()
            cudnn.set_stream(handle, stream)
            self._handles[stream] = handle
        return self._handles[stream]

    def _build(
        self,
        rows: int,
        pages: tuple[int, ...],
        k_strides: tuple[int, ...],
        v_strides: tuple[int, ...],
    ) -> tuple[Any, int]:
        """The cuDNN graph and the bytes of workspace that it needs."""
        cudnn = _cudnn()
        shape = self._shape
        heads, dim = shape.q_heads, shape.head_dim
        types = cudnn.data_type
        dtype = types.BFLOAT16 if shape.dtype == "bfloat16" else types.HALF
        graph = cudnn.pygraph(
            io_data_type=dtype,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=self._handle(),
        )

        def tensor(uid: int, name: str, dims: tuple[int, ...], strides: tuple[int, ...]) -> Any:
            integer = uid in (_TABLE_K, _TABLE_V, _LENS_Q, _LENS_KV)
            made = graph.tensor(
                name=name, dim=dims, stride=strides, data_type=types.INT32 if integer else dtype
            )
            made.set_uid(uid)
            return made

        lengths = (rows, 1, 1, 1), (1, 1, 1, 1)
        width = shape.table_width
        table = (rows, 1, width, 1), (width, width, 1, 1)
        result, _ = graph.sdpa(
            name="decode",
            q=tensor(_Q, "q", (rows, heads, 1, dim), (heads * dim, dim, heads * dim, 1)),
            k=tensor(_K, "k", pages, k_strides),
            v=tensor(_V, "v", pages, v_strides),
            is_inference=True,
            attn_scale=dim**-0.5,
            use_padding_mask=True,
            seq_len_q=tensor(_LENS_Q, "lens_q", *lengths),
            seq_len_kv=tensor(_LENS_KV, "lens_kv", *lengths),
            paged_attention_k_table=tensor(_TABLE_K, "table_k", *table),
            paged_attention_v_table=tensor(_TABLE_V, "table_v", *table),
            paged_attention_max_seq_len_kv=shape.max_kv_len,
            compute_data_type=types.FLOAT,
        )
        result.set_uid(_OUT).set_output(True).set_dim([rows, heads, 1, dim]).set_stride(
            [heads * dim, dim, heads * dim, 1]
        ).set_data_type(dtype)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        return graph, int(graph.get_workspace_size())


def _cudnn() -> Any:
    return load_package("cudnn")

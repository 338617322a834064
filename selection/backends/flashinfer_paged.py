"""The base of the FlashInfer kernels that need a host plan before every run.

A plan divides the batch's pages among thread blocks. It is made from host lengths on each step,
never once for all: chunk sizes and the mask of valid blocks are baked into it, and replaying an old
one with other lengths reads beyond the pages.

The kernels want page numbers as one compact list. The block table is given to them as it lies,
without a gather: row i begins at entry i * width, and the length of its last page is counted from
the END of the table's row, which makes it negative for short rows. The kernel's length,
(pages - 1) * page_size + last_page_len, is computed modulo 2**32 and comes out right. What the
planner sees are the true numbers of pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tp_runtime.errors import SelectionError
from tp_runtime.selection.backends.gpu_support import (
    DTYPES,
    StagingRing,
    capturing,
    checked_rows,
    host_pages,
    load_package,
)
from tp_runtime.selection.base import DecodeStep

if TYPE_CHECKING:
    from torch import Tensor

    from tp_runtime.selection.base import DecodeShape, PagedKV

HND = 1  # flashinfer.utils.TensorLayout
_RING_SLOTS = 4  # two steps in flight, and room
_PLAN_BYTES = 1 << 20
_BYTES_PER_BLOCK = 32
_MOST_BLOCKS_PER_SM = 16


@dataclass(slots=True)
class BucketState:
    """What a captured graph of one number of rows holds the addresses of.

    Args:
        query_starts: int32 [rows + 1], where each row's queries begin.
        indptr: int32 [rows + 1], where each row's pages begin in the block table.
        last_page_len: int32 [rows], see above.
        plan: uint8, the plan on the device.  plan_bytes: more than it can be long.
        scratch: partial results, shared between buckets.
        host_starts: query_starts.  host_indptr: int32 [rows + 1], true numbers of pages, summed.
        info: what the planner returned; it must not change once it is captured.
    """

    query_starts: Tensor
    indptr: Tensor
    last_page_len: Tensor
    plan: Tensor
    plan_bytes: int
    scratch: Tensor
    host_starts: Tensor
    host_indptr: Tensor
    info: Any = None


class FlashInferPaged:
    """Plan on the host, run on the device. Subclasses name the module and make the two calls."""

    name = "flashinfer_paged"
    needs_host_lengths = True

    def __init__(self, shape: DecodeShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._sm_count = torch.cuda.get_device_properties(device).multi_processor_count
        self._pdl = torch.cuda.get_device_capability(device)[0] >= 9
        self._ring: StagingRing | None = None
        self._states: dict[int, BucketState] = {}
        self._scratch: Tensor | None = None
        self._loaded: Any = None

    def build(self) -> None:
        """Compile and load the kernel; takes minutes when it was never built."""
        self._module()

    def prepare_for_capture(self, bucket: int) -> None:
        """Make what graphs of this bucket keep, and a plan that fits what capture runs on."""
        ones = np.full(bucket, self._shape.q_len, dtype=np.int32)
        self.prepare(DecodeStep(batch_size=bucket, bucket=bucket, kv_lens=ones))

    def prepare(self, step: DecodeStep) -> None:
        pages = host_pages(self.name, self._shape, step)
        rows = len(pages)
        if self._ring is None:
            self._ring = StagingRing(_RING_SLOTS, _PLAN_BYTES)
        state = self._states.get(rows)
        if state is None:
            state = self._states[rows] = self._new_state(rows)
        staging = self._ring.take(rows, state.plan_bytes)
        np.cumsum(pages, out=state.host_indptr.numpy()[1:])
        lengths = torch.from_numpy(step.kv_lens)
        info = self._plan(state, staging.plan, lengths, rows)
        if state.info is None:
            state.info = info
        elif list(info) != list(state.info):
            raise SelectionError(
                f"{self.name}: the plan of {rows} rows has another form than the captured one: "
                f"{list(info)}, expected {list(state.info)}"
            )
        last = staging.lengths[:rows]
        beyond = (self._shape.table_width - 1) * self._shape.page_size
        np.subtract(step.kv_lens, beyond, out=last.numpy())
        state.last_page_len.copy_(last, non_blocking=True)
        staging.sent()

    def forward(self, q: Tensor, kv: PagedKV, out: Tensor) -> None:
        rows = checked_rows(self.name, self._shape, q, kv)
        state = self._states.get(rows)
        if state is None:
            where = "prepare_for_capture" if capturing() else "prepare"
            raise SelectionError(f"{self.name}: {where}() was not called for {rows} rows")
        self._run(state, q, kv, out)

    def _new_state(self, rows: int) -> BucketState:
        needed = self._scratch_bytes(rows)
        if self._scratch is None or self._scratch.numel() < needed:
            self._scratch = torch.zeros(needed, dtype=torch.uint8, device=self._device)
        steps = torch.arange(rows + 1, dtype=torch.int32, device=self._device)
        return BucketState(
            query_starts=steps * self._shape.q_len,
            indptr=steps * self._shape.table_width,
            last_page_len=torch.zeros(rows, dtype=torch.int32, device=self._device),
            plan=torch.zeros(_PLAN_BYTES, dtype=torch.uint8, device=self._device),
            plan_bytes=min(_PLAN_BYTES, _BYTES_PER_BLOCK * self._blocks(rows)),
            scratch=self._scratch,
            host_starts=torch.arange(rows + 1, dtype=torch.int32) * self._shape.q_len,
            host_indptr=torch.zeros(rows + 1, dtype=torch.int32),
        )

    def _dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Of queries (and results), and of the pages."""
        shape = self._shape
        return DTYPES[shape.dtype], DTYPES[shape.kv_dtype or shape.dtype]

    def _module(self) -> Any:
        """The loaded kernel."""
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def _load(self) -> Any:
        raise NotImplementedError

    def _scratch_bytes(self, rows: int) -> int:
        raise NotImplementedError

    def _blocks(self, rows: int) -> int:
        """More thread blocks than any plan has."""
        shape = self._shape
        tiles = rows * shape.q_len * (1 + -(-shape.group_size // 16))
        return _MOST_BLOCKS_PER_SM * self._sm_count // shape.kv_heads + tiles + 256

    def _plan(self, state: BucketState, staging: Tensor, lengths: Tensor, rows: int) -> Any:
        """Write the plan of the state's page counts to `staging` and queue its copy."""
        raise NotImplementedError

    def _run(self, state: BucketState, q: Tensor, kv: PagedKV, out: Tensor) -> None:
        raise NotImplementedError


class FlashInferPrefill(FlashInferPaged):
    """The prefill kernels used for decode: tensor cores, queries of a group packed together."""

    kernel = "fa2"

    def _load(self) -> Any:
        make = load_package("flashinfer.prefill").get_batch_prefill_module
        q_dtype, kv_dtype = self._dtypes()
        dim = self._shape.head_dim
        return make(
            self.kernel,
            q_dtype,
            kv_dtype,
            q_dtype,
            torch.int32,
            dim,
            dim,
            0,  # no positional encoding
            False,  # no sliding window
            False,  # no soft cap
            False,  # no fp16 accumulation
        )

    def _scratch_bytes(self, rows: int) -> int:
        shape = self._shape
        # the planner allows for one row that holds all queries but one of each other row
        most = (rows * (shape.q_len - 1) + 1) * shape.group_size
        tile = 16 if most <= 16 else (64 if most <= 64 or shape.head_dim > 128 else 128)
        tiles = -(-rows * shape.q_len * shape.group_size // tile) + rows - 1
        padded = max(2 * self._sm_count // shape.kv_heads, tiles)
        return shape.q_heads * padded * tile * (shape.head_dim + 1) * 4 + (1 << 20)

    def _plan(self, state: BucketState, staging: Tensor, lengths: Tensor, rows: int) -> Any:
        shape = self._shape
        arguments = [
            state.scratch,
            state.plan,
            staging,
            state.host_starts,
            self._plan_indptr(state),
            lengths,
            rows * shape.q_len,
            rows,
            shape.q_heads,
            shape.kv_heads,
            shape.page_size,
            True,  # the form of a plan that a graph can be captured with
            shape.head_dim,
            shape.head_dim,
            shape.q_len > 1,
            -1,  # no sliding window
        ]
        return self._module().plan(*arguments, *self._split_arguments())

    def _plan_indptr(self, state: BucketState) -> Tensor:
        return state.host_indptr

    def _split_arguments(self) -> tuple[object, ...]:
        return (-1, False, 0)  # no fixed split, splitting allowed, nothing else on the device

    def _run(self, state: BucketState, q: Tensor, kv: PagedKV, out: Tensor) -> None:
        shape = self._shape
        self._module().paged_run(
            state.scratch,
            state.plan,
            state.info,
            q,
            kv.k,
            kv.v,
            state.query_starts,
            state.indptr,
            kv.block_table.view(-1),
            state.last_page_len,
            out,
            None,  # no log-sum-exp
            1 if shape.q_len > 1 else 0,  # causal among the row's own queries
            HND,
            -1,
            self._pdl,
            None,
            None,
            None,
            None,
            None,
            None,
            0.0,
            shape.head_dim**-0.5,
            None,
            None,
            None,
            1.0,
            1e4,
            0,
            state.scratch.numel(),
        )

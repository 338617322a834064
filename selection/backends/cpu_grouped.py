"""Decode attention on the CPU over groups of rows of similar length.

Rows are sorted by their number of pages and cut into groups in which no row is padded by more than
a quarter; each group is gathered and computed by batched matrix products. Best for many rows whose
lengths differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from tp_runtime.selection.backends.cpu_support import PerStep, Scratch, cpu_refusal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from tp_runtime.selection.base import DecodeShape, DecodeStep, DeviceInfo, PagedKV

_CHUNK_BYTES = 2 << 20  # gathered keys of one chunk: they stay in a cache until they are used
_MAX_PADDING = 1.25  # longest over shortest row of a group, in pages

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows that are computed together.

    Args:
        rows: positions in the batch, int64 [r], or a slice where they are consecutive.
        index: int64 [r * kv_heads * pages], rows of the cache seen as [pages * kv_heads, ...].
        padding: bool [r, 1, tokens], True beyond a row's length; None where no row is padded.
        beyond: int64, the same tokens in the gathered values seen as [r * kv_heads * tokens, dim].
    """

    rows: Tensor | slice
    row_count: int
    tokens: int
    index: Tensor
    padding: Tensor | None
    beyond: Tensor | None


class CpuGrouped:
    name = "cpu_grouped"
    needs_host_lengths = True
    # a subclass that pads to the longest row of the batch sets infinity
    max_padding: ClassVar[float] = _MAX_PADDING

    def __init__(self, shape: DecodeShape, device: torch.device) -> None:
        self._shape = shape
        self._step = PerStep(self.name)
        self._scratch = Scratch()
        self._chunks: list[_Chunk] = []

    @staticmethod
    def refusal(shape: DecodeShape, device: DeviceInfo) -> str | None:
        return cpu_refusal(shape, device)

    def prepare_for_capture(self, bucket: int) -> None:
        """Nothing is captured on the CPU."""

    def prepare(self, step: DecodeStep) -> None:
        self._step.begin(step)

    def forward(self, q: Tensor, kv: PagedKV, out: Tensor) -> None:
        rows = q.shape[0]
        lengths = self._step.lengths(rows)
        if self._step.stale(kv):
            self._chunks = list(self._plan(lengths, kv.block_table.numpy()))
        shape, scratch = self._shape, self._scratch
        heads, group, dim = shape.kv_heads, shape.group_size, shape.head_dim
        queries = scratch("q", (rows, heads, group, dim), torch.float32)
        torch.mul(q.view(rows, heads, group, dim), dim**-0.5, out=queries)
        results = out.view(rows, heads, group, dim)
        k = kv.k.view(-1, shape.page_size, dim)
        v = kv.v.view(-1, shape.page_size, dim)
        for chunk in self._chunks:
            count, tokens = chunk.row_count, chunk.tokens
            if isinstance(chunk.rows, slice):
                chunk_q = queries[chunk.rows].view(count * heads, group, dim)
            else:
                chunk_q = scratch.gather("chunk_q", queries, chunk.rows)
                chunk_q = chunk_q.view(count * heads, group, dim)
            # keys and values take the same scratch: it is in a cache when it is written again
            keys = scratch.gather("kv", k, chunk.index).view(count * heads, tokens, dim)
            scores = scratch("scores", (count * heads, group, tokens), torch.float32)
            torch.bmm(chunk_q, keys.transpose(1, 2), out=scores)
            if chunk.padding is not None:
                scores.view(count, heads * group, tokens).masked_fill_(chunk.padding, -torch.inf)
            weights = scratch("weights", (count * heads, group, tokens), torch.float32)
            torch.softmax(scores, -1, out=weights)
            values = scratch.gather("kv", v, chunk.index)
            if chunk.beyond is not None:  # 0 * NaN is NaN: what lies beyond must not be there
                values.view(-1, dim).index_fill_(0, chunk.beyond, 0.0)
            attended = scratch("attended", (count * heads, group, dim), torch.float32)
            torch.bmm(weights, values.view(count * heads, tokens, dim), out=attended)
            results[chunk.rows] = attended.view(count, heads, group, dim).to(out.dtype)

    def _plan(
        self, lengths: np.ndarray[Any, np.dtype[np.int32]], table: np.ndarray[Any, Any]
    ) -> Iterator[_Chunk]:
        pages = -(-lengths.astype(np.int64) // self._shape.page_size)
        order = np.argsort(pages, kind="stable")
        if pages[order[-1]] <= self.max_padding * pages[order[0]]:
            order = np.arange(len(pages))  # one group: keep the rows where they are
        bytes_per_page = self._shape.page_size * self._shape.kv_heads * self._shape.head_dim * 4
        start = 0
        while start < len(order):
            stop = start + 1
            longest = int(pages[order[start]])
            shortest = longest
            while stop < len(order):
                width = int(pages[order[stop]])
                high, low = max(longest, width), min(shortest, width)
                if high > self.max_padding * low:
                    break
                if high * (stop + 1 - start) * bytes_per_page > _CHUNK_BYTES:
                    break
                longest, shortest = high, low
                stop += 1
            yield self._chunk(order[start:stop], longest, lengths, pages, table)
            start = stop

    def _chunk(
        self,
        rows: IntArray,
        width: int,
        lengths: np.ndarray[Any, np.dtype[np.int32]],
        pages: IntArray,
        table: np.ndarray[Any, Any],
    ) -> _Chunk:
        heads, page_size = self._shape.kv_heads, self._shape.page_size
        tokens = width * page_size
        entries = table[rows, :width].astype(np.int64)
        # entries beyond a row's pages are garbage: its first page stands in and is masked
        used = np.arange(width) < pages[rows, None]
        entries = np.where(used, entries, entries[:, :1])
        index = entries[:, None, :] * heads + np.arange(heads)[None, :, None]
        beyond = np.arange(tokens) >= lengths[rows, None]
        padded = bool(beyond.any())
        first, last = int(rows[0]), int(rows[-1])
        consecutive = last - first == len(rows) - 1 and bool((np.diff(rows) == 1).all())
        return _Chunk(
            rows=slice(first, last + 1) if consecutive else torch.from_numpy(rows.copy()),
            row_count=len(rows),
            tokens=tokens,
            index=torch.from_numpy(index.reshape(-1)),
            padding=torch.from_numpy(beyond)[:, None, :] if padded else None,
            beyond=(
                torch.from_numpy(np.flatnonzero(np.repeat(beyond, heads, axis=0)))
                if padded
                else None
            ),
        )

"""Decode attention on the CPU, row by row, nothing padded, nothing copied where pages allow it.

A row whose pages are consecutive is read in place: matrix products run over its pages as they lie.
Other rows gather their pages first. Work in proportion to the tokens, at several operations per
row: best for few rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tp_runtime.selection.backends.cpu_support import PerStep, Scratch, cpu_refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tp_runtime.selection.base import DecodeShape, DecodeStep, DeviceInfo, PagedKV


@dataclass(frozen=True, slots=True)
class _Row:
    """Where one row's tokens lie.

    Args:
        full: pages that are full. tail: tokens on the page after them (0: none).
        first: first page of a run of consecutive pages; unused with an index.
        index: int64 [full * kv_heads], head by head, rows of the cache seen as
            [pages * kv_heads, ...]; None for a run.
    """

    full: int
    tail: int
    first: int
    last: int
    index: Tensor | None


class CpuRowwise:
    name = "cpu_rowwise"
    needs_host_lengths = True

    def __init__(self, shape: DecodeShape, device: torch.device) -> None:
        self._shape = shape
        self._step = PerStep(self.name)
        self._scratch = Scratch()
        self._rows: list[_Row] = []

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
            table = kv.block_table.numpy()
            self._rows = [self._place(int(n), table[i]) for i, n in enumerate(lengths)]
        heads, group, dim = self._shape.kv_heads, self._shape.group_size, self._shape.head_dim
        queries = self._scratch("q", (rows, heads, group, dim), torch.float32)
        torch.mul(q.view(rows, heads, group, dim), dim**-0.5, out=queries)
        results = out.view(rows, heads, group, dim)
        for i, row in enumerate(self._rows):
            if row.index is None:
                self._attend_run(queries[i], kv, row, results[i])
            else:
                self._attend_gathered(queries[i], kv, row, row.index, results[i])

    def _place(self, length: int, table: np.ndarray[tuple[int], np.dtype[np.int32]]) -> _Row:
        heads, page_size = self._shape.kv_heads, self._shape.page_size
        full, tail = divmod(length, page_size)
        pages = table[:full].astype(np.int64)
        last = int(table[full]) if tail else 0
        if full == 0 or bool((np.diff(pages) == 1).all()):
            return _Row(full, tail, int(pages[0]) if full else 0, last, None)
        index = pages[None, :] * heads + np.arange(heads)[:, None]
        return _Row(full, tail, 0, last, torch.from_numpy(index.reshape(-1)))

    def _attend_run(self, q: Tensor, kv: PagedKV, row: _Row, out: Tensor) -> None:
        """q, out: [kv_heads, group, head_dim]; the full pages are consecutive."""
        heads, group, dim = q.shape
        full, page_size = row.full, self._shape.page_size
        span = slice(row.first, row.first + full)
        spread = q.expand(full, heads, group, dim).reshape(full * heads, group, dim)

        def scores(into: Tensor) -> None:
            keys = _wide(kv.k[span]).view(full * heads, page_size, dim)
            by_page = torch.bmm(spread, keys.transpose(1, 2))
            into.view(heads, group, full, page_size).copy_(
                by_page.view(full, heads, group, page_size).permute(1, 2, 0, 3)
            )

        def values(weights: Tensor) -> Tensor:
            by_page = weights.reshape(heads, group, full, page_size).permute(2, 0, 1, 3)
            parts = torch.bmm(
                by_page.reshape(full * heads, group, page_size),
                _wide(kv.v[span]).view(full * heads, page_size, dim),
            )
            return parts.view(full, heads, group, dim).sum(0)

        self._attend(q, kv, row, out, scores, values)

    def _attend_gathered(
        self, q: Tensor, kv: PagedKV, row: _Row, index: Tensor, out: Tensor
    ) -> None:
        """The same for pages that lie apart: gathered head by head, then one product per head."""
        heads, _, dim = q.shape
        tokens = row.full * self._shape.page_size

        def gathered(pages: Tensor) -> Tensor:
            flat = pages.view(-1, self._shape.page_size, dim)
            return self._scratch.gather("kv", flat, index).view(heads, tokens, dim)

        def scores(into: Tensor) -> None:
            into.copy_(torch.bmm(q, gathered(kv.k).transpose(1, 2)))

        def values(weights: Tensor) -> Tensor:
            return torch.bmm(weights, gathered(kv.v))

        self._attend(q, kv, row, out, scores, values)

    def _attend(
        self,
        q: Tensor,
        kv: PagedKV,
        row: _Row,
        out: Tensor,
        scores_of_full: Callable[[Tensor], None],
        values_of_full: Callable[[Tensor], Tensor],
    ) -> None:
        """Softmax over the full pages and the used part of the last one."""
        heads, group, _ = q.shape
        tokens = row.full * self._shape.page_size
        if row.full == 0:
            weights = torch.softmax(torch.bmm(q, _part(kv.k, row).transpose(1, 2)), -1)
            out.copy_(torch.bmm(weights, _part(kv.v, row)))
            return
        full_scores = self._scratch("scores", (heads, group, tokens), torch.float32)
        scores_of_full(full_scores)
        if not row.tail:
            out.copy_(values_of_full(torch.softmax(full_scores, -1)))
            return
        tail_scores = torch.bmm(q, _part(kv.k, row).transpose(1, 2))
        weights = torch.softmax(torch.cat((full_scores, tail_scores), -1), -1)
        attended = values_of_full(weights[..., :tokens])
        out.copy_(torch.baddbmm(attended, weights[..., tokens:], _part(kv.v, row)))


def _part(pages: Tensor, row: _Row) -> Tensor:
    """float32 [kv_heads, tail, head_dim] of the row's last page."""
    return _wide(pages[row.last, :, : row.tail])


def _wide(pages: Tensor) -> Tensor:
    return pages if pages.dtype == torch.float32 else pages.float()

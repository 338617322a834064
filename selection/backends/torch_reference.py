"""Decode attention in plain torch, on any device: the numeric reference and the last resort.

Shapes depend on the block table's width alone and lengths are read on the device, so that it can
be captured in a graph and needs no host lengths. It computes in float32 and reads every page of the
table's width, however short the rows: correct, never fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tp_runtime.selection.backends.cpu_support import layout_refusal

if TYPE_CHECKING:
    from torch import Tensor

    from tp_runtime.selection.base import DecodeShape, DecodeStep, DeviceInfo, PagedKV

_MAX_GATHERED = 1 << 24  # elements gathered at once; more rows are done one part after another


class TorchReference:
    name = "torch_reference"
    needs_host_lengths = False

    def __init__(self, shape: DecodeShape, device: torch.device) -> None:
        self._shape = shape

    @staticmethod
    def refusal(shape: DecodeShape, device: DeviceInfo) -> str | None:
        return layout_refusal(shape)

    def prepare_for_capture(self, bucket: int) -> None:
        """Allocates nothing ahead."""

    def prepare(self, step: DecodeStep) -> None:
        """Reads lengths on the device."""

    def forward(self, q: Tensor, kv: PagedKV, out: Tensor) -> None:
        rows, width = kv.block_table.shape
        q_len = q.shape[0] // rows
        shape = self._shape
        per_row = width * shape.page_size * shape.kv_heads * shape.head_dim
        part = max(1, _MAX_GATHERED // per_row)
        for start in range(0, rows, part):
            stop = min(start + part, rows)
            tokens = slice(start * q_len, stop * q_len)
            table, lengths = kv.block_table[start:stop], kv.kv_lens[start:stop]
            out[tokens].copy_(self._attend(q[tokens], kv.k, kv.v, table, lengths, q_len))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, q_len: int
    ) -> Tensor:
        rows, width = table.shape
        heads, group, dim = self._shape.kv_heads, self._shape.group_size, self._shape.head_dim
        page = self._shape.page_size
        positions = torch.arange(width * page, device=q.device)
        valid = positions < lengths[:, None]  # [rows, tokens]
        used = valid.view(rows, width, page)[:, :, 0]
        index = torch.where(used, table, 0).long().view(-1)  # entries beyond are garbage

        def gathered(pages: Tensor) -> Tensor:
            """float32 [rows, kv_heads, tokens, head_dim], zero beyond a row's length."""
            found = pages.index_select(0, index).view(rows, width, heads, page, dim)
            found = found.permute(0, 2, 1, 3, 4).reshape(rows, heads, width * page, dim)
            return torch.where(valid[:, None, :, None], found.float(), 0.0)

        queries = q.float().view(rows, q_len, heads, group, dim).permute(0, 2, 3, 1, 4)
        queries = queries.reshape(rows, heads, group * q_len, dim)
        scores = torch.matmul(queries, gathered(k).transpose(2, 3)) * dim**-0.5
        # the query at place j of q_len sees the row's tokens but the q_len - 1 - j last ones
        behind = q_len - 1 - torch.arange(q_len, device=q.device)
        seen = positions < (lengths[:, None] - behind)[:, :, None]  # [rows, q_len, tokens]
        scores = scores.view(rows, heads, group, q_len, width * page)
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        weights = torch.softmax(scores, -1).view(rows, heads, group * q_len, width * page)
        attended = torch.matmul(weights, gathered(v)).view(rows, heads, group, q_len, dim)
        return attended.permute(0, 3, 1, 2, 4).reshape(rows * q_len, heads * group, dim)

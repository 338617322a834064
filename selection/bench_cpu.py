"""Times decode attention on a CPU: layer by layer, by the clock."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

from tp_runtime.selection.base import PagedKV
from tp_runtime.selection.numerics import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from tp_runtime.selection.base import DecodeBackend, DecodeShape, DecodeStep


class CpuLayers:
    """KV buffers of several layers, and block tables over them.

    Args:
        pages: per layer; enough for the largest cell.
        layers: how many buffers; the first of a run is not counted.
        repeats: runs of a cell, each with other pages, so that they come from memory.
    """

    def __init__(
        self, shape: DecodeShape, *, pages: int, layers: int, repeats: int, seed: int
    ) -> None:
        self._shape = shape
        self._pages = pages
        self._repeats = repeats
        generator = torch.Generator().manual_seed(seed)
        self._layers = [(self._noise(generator), self._noise(generator)) for _ in range(layers)]
        self._order = torch.randperm(pages, generator=generator).to(torch.int32)

    def cell(self, step: DecodeStep, repeat: int) -> list[PagedKV]:
        """Every layer for one run of a cell: distinct shuffled pages, other ones in each repeat."""
        order = self._order.roll(repeat * self._pages // (self._repeats + 1))
        table = torch.zeros(len(step.kv_lens), self._shape.table_width, dtype=torch.int32)
        start = 0
        for row, length in enumerate(step.kv_lens.tolist()):
            count = -(-length // self._shape.page_size)
            table[row, :count] = order[start : start + count]
            start += count
        lengths = torch.from_numpy(step.kv_lens)
        return [PagedKV(k=k, v=v, block_table=table, kv_lens=lengths) for k, v in self._layers]

    def _noise(self, generator: torch.Generator) -> Tensor:
        """One layer's keys or values; a random tile repeated, which is enough for timing."""
        shape = self._shape
        size = (self._pages, shape.kv_heads, shape.page_size, shape.head_dim)
        tile = torch.randn(min(self._pages, 16), *size[1:], generator=generator)
        times = -(-self._pages // tile.shape[0])
        pages = tile.repeat(times, 1, 1, 1)[: self._pages]
        return pages.to(DTYPES[shape.kv_dtype or shape.dtype])


def time_layers(
    backend: DecodeBackend, step: DecodeStep, q: Tensor, layers: list[PagedKV], out: Tensor
) -> tuple[float, list[float]]:
    """Host microseconds of the step, and microseconds of each layer but the first.

    The first layer also builds what the others reuse; what it takes longer is host time.
    """
    times = []
    started = time.perf_counter()
    backend.prepare(step)
    prepared = time.perf_counter()
    before = prepared
    for kv in layers:
        backend.forward(q, kv, out)
        now = time.perf_counter()
        times.append(1e6 * (now - before))
        before = now
    usual = statistics.median(times[1:])
    return 1e6 * (prepared - started) + max(0.0, times[0] - usual), times[1:]

"""Times decode attention on a GPU: inside CUDA graphs, as a served model would run it.

A graph chains launches over distinct KV buffers and distinct shuffled pages, each launch taking the
result of the one before as its queries, so that neither a cache nor an overlap flatters a kernel.
Before each replay the L2 cache is overwritten. Host planning is timed apart.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from tp_runtime.errors import SelectionError
from tp_runtime.selection.base import PagedKV
from tp_runtime.selection.numerics import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

    from tp_runtime.selection.base import DecodeBackend, DecodeShape, DecodeStep

_TARGET_US = 400.0  # of one replay: long enough that starting the graph does not count
_BYTES_PER_US = 4e6
_LEAST_US = 6.0  # of one launch
_MOST_LAUNCHES, _LEAST_LAUNCHES = 32, 4
_MOST_TABLES = 4
_WARM_UPS = 2


class KvPool:
    """KV buffers of several layers, filled with noise on the device.

    Args:
        pages: per layer; enough for the largest cell.
        budget_bytes: of all layers; at least two are made.
    """

    def __init__(
        self, shape: DecodeShape, device: torch.device, *, pages: int, budget_bytes: int, seed: int
    ) -> None:
        self.pages = pages
        self._generator = torch.Generator(device).manual_seed(seed)
        size = (pages, shape.kv_heads, shape.page_size, shape.head_dim)
        dtype = DTYPES[shape.kv_dtype or shape.dtype]
        layer_bytes = 2 * pages * shape.kv_heads * shape.page_size * shape.head_dim * dtype.itemsize
        count = max(2, min(8, budget_bytes // layer_bytes))
        self.layers = [
            (self._noise(size, dtype, device), self._noise(size, dtype, device))
            for _ in range(count)
        ]
        self.order = torch.randperm(pages, generator=self._generator, device=device)
        self.order = self.order.to(torch.int32)

    def _noise(self, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        made = torch.empty(size, dtype=dtype, device=device)
        if dtype.itemsize > 1:
            return made.normal_(generator=self._generator)
        for start in range(0, size[0], 4096):  # there is no normal_ for 8-bit types
            part = made[start : start + 4096]
            part.copy_(torch.randn(part.shape, device=device, generator=self._generator))
        return made


class GraphCell:
    """One batch, captured once for each backend and replayed in turn.

    Args:
        launches: length of the chain; by default what makes a replay long enough to be timed.
    """

    def __init__(
        self,
        shape: DecodeShape,
        step: DecodeStep,
        pool: KvPool,
        device: torch.device,
        *,
        launches: int | None = None,
    ) -> None:
        self._step = step
        rows = len(step.kv_lens)
        counts = [-(-int(n) // shape.page_size) for n in step.kv_lens]
        needed = sum(counts)
        itemsize = DTYPES[shape.kv_dtype or shape.dtype].itemsize
        read = 2 * step.total_kv * shape.kv_heads * shape.head_dim * itemsize
        expected_us = max(_LEAST_US, read / _BYTES_PER_US)
        if launches is None:
            launches = int(_TARGET_US / expected_us)
            launches = max(_LEAST_LAUNCHES, min(_MOST_LAUNCHES, launches))
        tables = []
        for part in range(max(1, min(_MOST_TABLES, pool.pages // needed))):
            order = pool.order[part * needed : (part + 1) * needed]
            table = torch.zeros(rows, shape.table_width, dtype=torch.int32, device=device)
            start = 0
            for row, count in enumerate(counts):
                table[row, :count] = order[start : start + count]
                start += count
            tables.append(table)
        lengths = torch.from_numpy(step.kv_lens).to(device)
        count = len(pool.layers)
        self.launches = [
            PagedKV(
                k=pool.layers[i % count][0],
                v=pool.layers[i % count][1],
                block_table=tables[(i // count) % len(tables)],
                kv_lens=lengths,
            )
            for i in range(launches)
        ]
        heads = (rows * shape.q_len, shape.q_heads, shape.head_dim)
        dtype = DTYPES[shape.dtype]
        self._buffers = [torch.randn(heads, device=device).to(dtype) for _ in range(2)]
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(2 * l2_bytes, dtype=torch.uint8, device=device)

    def capture(self, backend: DecodeBackend) -> torch.cuda.CUDAGraph:
        """The chain of launches as a graph. Raises what the backend raises."""
        backend.prepare_for_capture(len(self._step.kv_lens))
        backend.prepare(self._step)
        for kv in self.launches[:_WARM_UPS]:
            backend.forward(self._buffers[0], kv, self._buffers[1])
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for i, kv in enumerate(self.launches):
                backend.forward(self._buffers[i % 2], kv, self._buffers[1 - i % 2])
        finally:
            graph.capture_end()
        return graph

    def replay(self, backend: DecodeBackend, graph: torch.cuda.CUDAGraph) -> tuple[float, float]:
        """(host microseconds of the plan, microseconds per launch)."""
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        started = time.perf_counter()
        backend.prepare(self._step)
        host_us = 1e6 * (time.perf_counter() - started)
        self._flush.zero_()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken_ms = begin.elapsed_time(end)
        return host_us, 1e3 * float(taken_ms) / len(self.launches)

    def check_apart(self) -> None:
        """Raises SelectionError: two launches in a row read the same keys, or write what they
        read."""
        q, out = self._buffers
        if q.data_ptr() == out.data_ptr():
            raise SelectionError("the benchmark's queries and results share memory")
        for a, b in zip(self.launches, self.launches[1:], strict=False):
            if a.k.data_ptr() == b.k.data_ptr():
                raise SelectionError("two launches in a row of the benchmark read the same keys")

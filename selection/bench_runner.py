"""The timed part of the benchmark: gate every candidate numerically, then time them interleaved."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tp_runtime.errors import TpRuntimeError
from tp_runtime.selection.base import DecodeBackend, DecodeStep, DeviceInfo, PagedKV
from tp_runtime.selection.bench import BenchCell, BenchRequest, candidates_of, cells_of
from tp_runtime.selection.bench_cuda import GraphCell, KvPool
from tp_runtime.selection.numerics import DTYPES, GateBatch, mismatch
from tp_runtime.selection.registry import BackendSet

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tp_runtime.selection.base import DecodeShape

    Emit = Callable[[dict[str, Any]], None]
    TimeCell = Callable[[int, BenchCell], None]

_KV_BUDGET_BYTES = 24 << 30  # of all layers of the benchmark on a GPU

# What a backend may raise for a reason of its own; it is refused and the others go on.
_BACKEND_ERRORS = (
    TpRuntimeError,
    RuntimeError,  # torch, and the out-of-memory error of every device
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    NotImplementedError,
    ImportError,
    OSError,
    ArithmeticError,
    MemoryError,
)


def run_cells(request: BenchRequest, emit: Emit) -> None:
    """Measure every cell from `first_cell` on.

    Events: on a GPU "building" and "ready" around the compilation of kernels; {"event": "running",
    "cell", "backend"} before a candidate runs, "samples" after a cell, "refused" with backend and
    reason, "done" at the end.
    """
    if request.threads:
        torch.set_num_threads(request.threads)
    device = torch.device(request.device)
    if request.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    names, refusals = candidates_of(request, DeviceInfo.of(device))
    for name, reason in refusals.items():
        emit({"event": "refused", "backend": name, "reason": reason})
    with torch.inference_mode():
        _Runner(request, names, device, emit).run()
    emit({"event": "done"})


class _Runner:
    def __init__(
        self, request: BenchRequest, names: list[str], device: torch.device, emit: Emit
    ) -> None:
        self._request = request
        self._shape: DecodeShape = request.shape
        self._names = names
        self._device = device
        self._emit = emit
        self._backends = BackendSet(request.shape, device, factories=request.factories)
        self._cells = cells_of(request)
        page = self._shape.page_size
        needed = max(sum(-(-n // page) for n in cell.kv_lens) for cell in self._cells)
        self._pages = needed + 1

    def run(self) -> None:
        time_cell = self._on_gpu() if self._device.type == "cuda" else self._on_cpu()
        gated = 0
        for number, cell in enumerate(self._cells):
            if number < self._request.first_cell:
                continue
            if cell.bucket != gated:
                gated = cell.bucket
                self._gate(number, cell.bucket)
            time_cell(number, cell)

    def _on_cpu(self) -> TimeCell:
        generator = torch.Generator().manual_seed(self._request.seed)
        self._layers = [
            (self._random(generator), self._random(generator))
            for _ in range(self._request.layers + 1)
        ]
        self._order = torch.randperm(self._pages, generator=generator).to(torch.int32)
        return self._time

    def _on_gpu(self) -> TimeCell:
        torch.cuda.set_device(self._device)
        self._build()
        free, _ = torch.cuda.mem_get_info(self._device)
        self._pool = KvPool(
            self._shape,
            self._device,
            pages=self._pages,
            budget_bytes=min(_KV_BUDGET_BYTES, free // 2),
            seed=self._request.seed,
        )
        return self._time_graphs

    def _build(self) -> None:
        """Compile what was never compiled: all candidates at once, each in processes of its own."""
        self._emit({"event": "building", "backends": list(self._names)})
        builds = {}
        with ThreadPoolExecutor() as pool:
            for name in list(self._names):
                build = getattr(self._backends[name], "build", None)
                if build is not None:
                    builds[name] = pool.submit(build)
        for name, build in builds.items():
            try:
                build.result()
            except _BACKEND_ERRORS as error:
                self._refuse(name, f"its kernel cannot be built: {error}")
        self._emit({"event": "ready"})

    def _time_graphs(self, number: int, cell: BenchCell) -> None:
        """Capture each candidate once, then replay them in turn."""
        stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            batch = GraphCell(self._shape, _step_of(cell), self._pool, self._device)
            batch.check_apart()
            graphs = {}
            for name in list(self._names):
                graph = self._guarded(number, name, batch.capture)
                if graph is not None:
                    graphs[name] = graph
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in graphs}
            started = dict.fromkeys(graphs, 0.0)
            for _ in range(self._request.repeats + 1):
                for name in list(graphs):
                    before = time.monotonic()
                    replay = partial(_swapped(batch.replay), graphs[name])
                    result = self._guarded(number, name, replay)
                    started[name] += time.monotonic() - before
                    if result is None:
                        del graphs[name]
                    elif started[name] > self._request.time_limit_s:
                        del graphs[name]
                        limit = self._request.time_limit_s
                        self._refuse(name, f"{_named(cell)}: took longer than {limit:g} s")
                    else:
                        times[name].append(result)
            torch.cuda.current_stream().synchronize()
        # the first replay warms up
        layer_us = {name: [us for _, us in times[name][1:]] for name in graphs}
        host_us = {name: [us for us, _ in times[name][1:]] for name in graphs}
        self._report(number, cell, layer_us, host_us)

    def _gate(self, number: int, bucket: int) -> None:
        """Drop the candidates that do not match the float32 reference in this bucket."""
        batch = GateBatch.random(
            self._shape, bucket, self._device, seed=self._request.seed + bucket
        )
        for name in list(self._names):
            reason = self._guarded(number, name, partial(mismatch, batch))
            if isinstance(reason, str):
                self._refuse(name, f"bucket {bucket}: {reason}")

    def _time(self, number: int, cell: BenchCell) -> None:
        step = _step_of(cell)
        shape = self._shape
        q = torch.randn(cell.bucket, shape.q_heads, shape.head_dim).to(self._device, self._dtype)
        out = torch.empty_like(q)
        lengths = torch.from_numpy(step.kv_lens).to(self._device)
        layer_us: dict[str, list[float]] = {name: [] for name in self._names}
        host_us: dict[str, list[float]] = {name: [] for name in self._names}
        spent_s = dict.fromkeys(self._names, 0.0)
        for repeat in range(self._request.repeats + 1):
            table = self._table(cell, repeat)
            layers = [
                PagedKV(k=k, v=v, block_table=table, kv_lens=lengths) for k, v in self._layers
            ]
            for name in list(self._names):
                timed = partial(self._once, step=step, q=q, layers=layers, out=out)
                started = time.monotonic()
                result = self._guarded(number, name, timed)
                spent_s[name] += time.monotonic() - started
                if isinstance(result, tuple) and repeat:  # the first run warms up
                    host_us[name].append(result[0])
                    layer_us[name] += result[1]
                if name in self._names and spent_s[name] > self._request.time_limit_s:
                    limit = self._request.time_limit_s
                    self._refuse(name, f"{_named(cell)}: took longer than {limit:g} s")
        self._report(number, cell, layer_us, host_us)

    def _report(
        self,
        number: int,
        cell: BenchCell,
        layer_us: dict[str, list[float]],
        host_us: dict[str, list[float]],
    ) -> None:
        step = _step_of(cell)
        samples = [
            {
                "backend": name,
                "bucket": cell.bucket,
                "total_kv": step.total_kv,
                "max_kv": step.max_kv,
                "median_us": statistics.median(layer_us[name]),
                "spread_us": _spread(layer_us[name]),
                "host_us": statistics.median(host_us[name]),
            }
            for name in self._names
        ]
        self._emit({"event": "samples", "cell": number, "samples": samples})

    def _once(
        self,
        backend: DecodeBackend,
        step: DecodeStep,
        q: Tensor,
        layers: list[PagedKV],
        out: Tensor,
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

    def _guarded(self, number: int, name: str, run: Callable[[DecodeBackend], Any]) -> Any:
        """Run a candidate; one that raises is refused with its reason and None is returned."""
        self._emit({"event": "running", "cell": number, "backend": name})
        try:
            return run(self._backends[name])
        except _BACKEND_ERRORS as error:
            if self._device.type == "cuda":
                # after an illegal access nothing works any more: this raises, the process ends, and
                # whoever started it refuses the candidate that was running
                torch.cuda.synchronize(self._device)
            self._refuse(name, f"{type(error).__name__}: {error}")
            return None

    def _refuse(self, name: str, reason: str) -> None:
        self._names.remove(name)
        self._emit({"event": "refused", "backend": name, "reason": reason})

    def _table(self, cell: BenchCell, repeat: int) -> Tensor:
        """Distinct shuffled pages, other ones in each repeat, so that they come from memory."""
        shift = repeat * self._pages // (self._request.repeats + 1)
        order = self._order.roll(shift)
        width = self._shape.table_width
        table = torch.zeros(cell.bucket, width, dtype=torch.int32)
        start = 0
        for row, length in enumerate(cell.kv_lens):
            count = -(-length // self._shape.page_size)
            table[row, :count] = order[start : start + count]
            start += count
        return table.to(self._device)

    def _random(self, generator: torch.Generator) -> Tensor:
        """One layer's keys or values; a random tile repeated, which is enough for timing."""
        shape = self._shape
        size = (self._pages, shape.kv_heads, shape.page_size, shape.head_dim)
        tile = torch.randn(min(self._pages, 16), *size[1:], generator=generator)
        times = -(-self._pages // tile.shape[0])
        pages = tile.repeat(times, 1, 1, 1)[: self._pages]
        return pages.to(self._device, DTYPES[shape.kv_dtype or shape.dtype])

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self._shape.dtype]


def _step_of(cell: BenchCell) -> DecodeStep:
    return DecodeStep(
        batch_size=cell.bucket, bucket=cell.bucket, kv_lens=np.array(cell.kv_lens, np.int32)
    )


def _swapped(run: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda second, first: run(first, second)


def _spread(values: list[float]) -> float:
    """Interquartile range."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return high - low


def _named(cell: BenchCell) -> str:
    return f"bucket {cell.bucket}, {sum(cell.kv_lens)} tokens"

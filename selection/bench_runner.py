"""The timed part of the benchmark: gate every candidate numerically, then time them interleaved."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tp_runtime.errors import TpRuntimeError
from tp_runtime.selection.base import DecodeBackend, DecodeStep, DeviceInfo
from tp_runtime.selection.bench import BenchCell, BenchRequest, candidates_of, cells_of
from tp_runtime.selection.bench_cpu import CpuLayers, time_layers
from tp_runtime.selection.bench_cuda import GraphCell, KvPool
from tp_runtime.selection.numerics import DTYPES, GateBatch, mismatch
from tp_runtime.selection.registry import BackendSet, BuildableBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from tp_runtime.selection.base import DecodeShape

    Emit = Callable[[dict[str, Any]], None]
    # (repeat, name, backend) -> (host microseconds, microseconds of each layer)
    Timer = Callable[[int, str, DecodeBackend], tuple[float, list[float]]]
    TimerOf = Callable[[DecodeStep], Timer]

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

    Events: on a GPU "building", a "built" for each candidate, and "ready" around the compilation of
    kernels; {"event": "running", "cell", "backend"} before a candidate runs, "samples" after a
    cell, "refused" with backend and reason, "done" at the end.
    """
    if request.threads:
        torch.set_num_threads(request.threads)
    device = torch.device(request.device)
    if request.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    names, refusals = candidates_of(request, DeviceInfo.of(device))
    for name, reason in refusals.items():
        emit({"event": "refused", "backend": name, "reason": reason})
    on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with torch.inference_mode(), on_device:
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
        timer_of = self._on_gpu() if self._device.type == "cuda" else self._on_cpu()
        gated = 0
        for number, cell in enumerate(self._cells):
            if number < self._request.first_cell:
                continue
            if cell.bucket != gated:
                gated = cell.bucket
                self._gate(number, cell.bucket)
            self._time(number, cell, timer_of(_step_of(cell)))

    def _on_cpu(self) -> TimerOf:
        """Layer by layer, by the clock."""
        shape = self._shape
        layers = CpuLayers(
            shape,
            pages=self._pages,
            layers=self._request.layers + 1,
            repeats=self._request.repeats,
            seed=self._request.seed,
        )

        def timer_of(step: DecodeStep) -> Timer:
            heads = (len(step.kv_lens), shape.q_heads, shape.head_dim)
            q = torch.randn(heads).to(DTYPES[shape.dtype])
            out = torch.empty_like(q)
            runs = [layers.cell(step, n) for n in range(self._request.repeats + 1)]
            return lambda repeat, name, backend: time_layers(backend, step, q, runs[repeat], out)

        return timer_of

    def _on_gpu(self) -> TimerOf:
        """In CUDA graphs, each captured by its warm-up run."""
        self._build()
        free, _ = torch.cuda.mem_get_info(self._device)
        pool = KvPool(
            self._shape,
            self._device,
            pages=self._pages,
            budget_bytes=min(_KV_BUDGET_BYTES, free // 2),
            seed=self._request.seed,
        )
        # graphs are not captured on the default stream
        stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

        def timer_of(step: DecodeStep) -> Timer:
            batch = GraphCell(self._shape, step, pool, self._device)
            batch.check_apart()
            graphs: dict[str, torch.cuda.CUDAGraph] = {}

            def timed(repeat: int, name: str, backend: DecodeBackend) -> tuple[float, list[float]]:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    if name not in graphs:
                        graphs[name] = batch.capture(backend)
                    host_us, layer_us = batch.replay(backend, graphs[name])
                return host_us, [layer_us]

            return timed

        return timer_of

    def _build(self) -> None:
        """Compile what was never compiled: all candidates at once, each in processes of its own."""
        self._emit({"event": "building", "backends": list(self._names)})

        def build(name: str) -> None:
            backend = self._backends[name]
            if isinstance(backend, BuildableBackend):
                backend.build()

        with ThreadPoolExecutor() as pool:
            builds = {pool.submit(build, name): name for name in self._names}
            for built in as_completed(builds):
                name = builds[built]
                try:
                    built.result()
                except _BACKEND_ERRORS as error:
                    self._refuse(name, f"its kernel cannot be built: {error}")
                self._emit({"event": "built", "backend": name})
        self._emit({"event": "ready"})

    def _gate(self, number: int, bucket: int) -> None:
        """Drop the candidates that do not match the float32 reference in this bucket."""
        batch = GateBatch.random(
            self._shape, bucket, self._device, seed=self._request.seed + bucket
        )
        for name in list(self._names):
            reason = self._guarded(number, name, partial(mismatch, batch))
            if isinstance(reason, str):
                self._refuse(name, f"bucket {bucket}: {reason}")

    def _time(self, number: int, cell: BenchCell, timer: Timer) -> None:
        """Run the candidates in turn, so that what disturbs the machine disturbs all alike."""
        limit_s = self._request.time_limit_s
        layer_us: dict[str, list[float]] = {name: [] for name in self._names}
        host_us: dict[str, list[float]] = {name: [] for name in self._names}
        spent_s = dict.fromkeys(self._names, 0.0)
        for repeat in range(self._request.repeats + 1):
            for name in list(self._names):
                started = time.monotonic()
                result = self._guarded(number, name, partial(timer, repeat, name))
                if result is None:
                    continue
                if repeat:  # the first run warms up
                    host_us[name].append(result[0])
                    layer_us[name] += result[1]
                    spent_s[name] += time.monotonic() - started
                if spent_s[name] > limit_s:
                    self._refuse(name, f"{_named(cell)}: took longer than {limit_s:g} s")
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


def _step_of(cell: BenchCell) -> DecodeStep:
    return DecodeStep(
        batch_size=cell.bucket, bucket=cell.bucket, kv_lens=np.array(cell.kv_lens, np.int32)
    )


def _spread(values: list[float]) -> float:
    """Interquartile range."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return high - low


def _named(cell: BenchCell) -> str:
    return f"bucket {cell.bucket}, {sum(cell.kv_lens)} tokens"

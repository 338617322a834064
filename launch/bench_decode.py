"""Runs decode steps of a whole engine and says where their time goes."""

from __future__ import annotations

import datetime
import gc
import itertools
import platform
import random
import statistics
import time
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from tp_runtime.errors import ConfigError
from tp_runtime.launch.output import table
from tp_runtime.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tp_runtime.config import RuntimeConfig
    from tp_runtime.engine import Engine
    from tp_runtime.launch.interrupts import Interrupts
    from tp_runtime.launch.progress import Progress

SAMPLINGS: Mapping[str, Mapping[str, float]] = {
    "random": {"temperature": 0.8},
    "filtered": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "greedy": {},
}

_WARM_UP_STEPS = 20
_TRACED_STEPS = 10
_COPY_BYTES = 1 << 30
_COPIES = 10
_DISTRIBUTIONS = ("tp-runtime", "torch", "triton", "flashinfer-python", "nvidia-cudnn-frontend")


@dataclass(frozen=True, kw_only=True)
class DecodeBench:
    """What is measured. Every rank of the group makes the same one and calls `run`.

    context_tokens: in the cache of each request, on average over the timed steps.
    """

    config: RuntimeConfig
    batches: tuple[int, ...]
    context_tokens: int
    steps: int
    samplings: tuple[str, ...]
    trace: str | None = None

    def run(self, progress: Progress, interrupts: Interrupts) -> dict[str, Any] | None:
        """Measure everything. None on ranks above 0.

        Raises:
            ConfigError: the context is too short for the steps.
        """
        from tp_runtime.engine import Engine

        if self._prompt_tokens < 1:
            raise ConfigError(
                f"flag --context={self.context_tokens}: expected more than "
                f"{self.context_tokens - self._prompt_tokens}, half of the steps and the warm-up"
            )
        with Engine(self.config) as engine:
            engine.start(progress=progress)
            interrupts.defer()
            if engine.rank > 0:
                engine.serve_peer()
                interrupts.raise_if_noted()
                return None
            cells: list[dict[str, Any]] = []
            total = len(self.batches) * (len(self.samplings) + 1)
            for batch in self.batches:
                cases = [(name, True) for name in self.samplings] + [(self.samplings[0], False)]
                for sampling, in_flight in cases:
                    progress("measuring", len(cells), total)
                    interrupts.raise_if_noted()
                    cells.append(self._cell(engine, batch, sampling, in_flight))
            if self.trace is not None:
                self._trace(engine, self.trace)
            return {**self._facts(engine), "cells": cells}

    @property
    def _prompt_tokens(self) -> int:
        return self.context_tokens - _WARM_UP_STEPS - self.steps // 2

    def _cell(self, engine: Engine, batch: int, sampling: str, in_flight: bool) -> dict[str, Any]:
        """One batch, decoded until all of it is in steady decode and `steps` more are timed."""
        self._fill(engine, batch, sampling)
        for _ in range(_WARM_UP_STEPS):
            self._step(engine, in_flight)
        gc.collect()
        device = engine.time_device()
        stamps = [time.perf_counter()]
        for _ in range(self.steps):
            self._step(engine, in_flight)
            stamps.append(time.perf_counter())
        spans = device.spans()[1:]
        host = engine.step_times(self.steps)
        _drain(engine)
        steps_us = [(b - a) * 1e6 for a, b in itertools.pairwise(stamps)]
        busy_us = sum(span.busy_us for span in spans)
        idle_us = sum(span.idle_us for span in spans)
        return {
            "batch": batch,
            "sampling": sampling,
            "loop": "async" if in_flight else "sync",
            "step_us": statistics.median(steps_us),
            "step_p99_us": sorted(steps_us)[int(0.99 * (len(steps_us) - 1))],
            "device_us": statistics.median(span.busy_us for span in spans),
            "idle_share": idle_us / (busy_us + idle_us),
            "idle_p50_us": statistics.median(span.idle_us for span in spans),
            "host_us": host.phase_us,
        }

    def _fill(self, engine: Engine, batch: int, sampling: str) -> None:
        """Requests with random prompts, stepped until each has its first token."""
        from tp_runtime.launch.model_shape import model_config

        noise = random.Random(0)
        vocabulary = model_config(str(self.config.model)).vocab_size
        params = SamplingParams(
            max_tokens=2 * _WARM_UP_STEPS + _TRACED_STEPS + self.steps + batch * self.steps,
            ignore_eos=True,
            seed=1,
            **SAMPLINGS[sampling],  # type: ignore[arg-type]
        )
        waiting = set()
        for _ in range(batch):
            prompt = [noise.randrange(vocabulary) for _ in range(self._prompt_tokens)]
            waiting.add(engine.add_request(prompt, params))
        while waiting:
            waiting -= {output.request_id for output in engine.step()}

    @staticmethod
    def _step(engine: Engine, in_flight: bool) -> None:
        engine.step()
        if not in_flight:
            engine.sync()

    def _trace(self, engine: Engine, path: str) -> None:
        from torch.profiler import profile

        self._fill(engine, self.batches[0], self.samplings[0])
        with profile(acc_events=True) as profiler:
            for _ in range(_TRACED_STEPS):
                engine.step()
            engine.sync()
        profiler.export_chrome_trace(path)
        _drain(engine)

    def _facts(self, engine: Engine) -> dict[str, Any]:
        import torch

        from tp_runtime.launch.model_shape import model_config
        from tp_runtime.models.partition import Partition

        report = engine.capture_report
        config = model_config(str(self.config.model))
        size = len(engine.rank_reports())
        on_cuda = torch.cuda.is_available() and self.config.device != "cpu"
        dtype = getattr(torch, self.config.dtype_on("cuda" if on_cuda else "cpu"))
        part = Partition.of(config, rank=0, size=size)
        per_layer = config.hidden_size * (
            config.head_dim * 2 * (part.q_heads.width + part.kv_heads.width)
            + 3 * part.intermediate.width
        )
        values = config.num_layers * per_layer + part.vocab.width * config.hidden_size
        kv_token_values = 2 * config.num_layers * part.kv_heads.width * config.head_dim
        return {
            "date": datetime.date.today().isoformat(),
            "device": torch.cuda.get_device_name() if on_cuda else platform.processor() or "cpu",
            "versions": {name: _version(name) for name in _DISTRIBUTIONS},
            "model": self.config.model,
            "dtype": str(dtype).removeprefix("torch."),
            "tp_size": size,
            "context_tokens": self.context_tokens,
            "steps": self.steps,
            "plan_digest": engine.plan_digest,
            "weight_bytes": values * dtype.itemsize,
            "kv_bytes_per_request": kv_token_values * dtype.itemsize * self.context_tokens,
            "copy_bytes_per_s": _copy_bandwidth(torch.device("cuda" if on_cuda else "cpu")),
            "capture_s": None if report is None else report.seconds,
            "capture_bytes": None if report is None else report.device_bytes,
            "graphs": 0 if report is None else len(report.graphs),
        }


def _drain(engine: Engine) -> None:
    """End all requests."""
    for request_id in engine.running:
        engine.abort(request_id)
    while engine.unfinished:
        engine.step()


def _copy_bandwidth(device: Any) -> float:
    """Bytes read and written per second by copying a large buffer, the best of a few."""
    import torch

    from tp_runtime.device_times import event_with_time

    source = torch.empty(_COPY_BYTES // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(_COPIES):
        if device.type == "cuda":
            begin, end = event_with_time(), event_with_time()
            begin.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            best_s = min(best_s, begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            target.copy_(source)
            best_s = min(best_s, time.perf_counter() - started)
    return _COPY_BYTES / best_s


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def floor_us(result: Mapping[str, Any], batch: int) -> float:
    """The time that reading weights and cache once takes at the measured copy bandwidth."""
    read = result["weight_bytes"] + batch * result["kv_bytes_per_request"]
    return float(read / result["copy_bytes_per_s"] * 1e6)


def as_text(result: Mapping[str, Any]) -> str:
    """The table for a person; host times in microseconds."""
    phases = ("plan", "publish", "prepare", "model", "harvest")
    rows = []
    for cell in result["cells"]:
        floor = floor_us(result, cell["batch"])
        host = cell["host_us"]
        rows.append(
            (
                str(cell["batch"]),
                cell["sampling"],
                cell["loop"],
                f"{floor / 1e3:.2f}",
                f"{cell['step_us'] / 1e3:.2f}",
                f"{100 * floor / cell['step_us']:.0f} %",
                f"{cell['step_p99_us'] / cell['step_us']:.2f}",
                f"{100 * cell['idle_share']:.1f} %",
                *("-" if host[phase] is None else f"{host[phase]:.0f}" for phase in phases),
            )
        )
    header = (
        "batch", "sampling", "loop", "floor ms", "step ms", "share", "p99/p50", "idle",
        "plan us", "publish", "prepare", "launch", "harvest",
    )  # fmt: skip
    facts = [
        ("model", f"{result['model']}, {result['dtype']}, TP {result['tp_size']}"),
        ("device", f"{result['device']}, copies {result['copy_bytes_per_s'] / 1e12:.3f} TB/s"),
        ("context", f"{result['context_tokens']} tokens, medians of {result['steps']} steps"),
    ]
    if result["capture_s"] is not None and result["capture_bytes"]:
        facts.append(
            (
                "capture",
                f"{result['graphs']} graphs in {result['capture_s']:.1f} s, "
                f"{result['capture_bytes'] / 2**20:.0f} MiB",
            )
        )
    return f"{table(facts)}\n\n{table(rows, header=header)}"

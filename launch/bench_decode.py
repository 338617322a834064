"""Runs decode steps of a whole engine and says where their time goes."""

from __future__ import annotations

import datetime
import gc
import itertools
import platform
import random
import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tp_runtime.errors import ConfigError
from tp_runtime.launch.decode_report import plan_document
from tp_runtime.launch.provenance import DISTRIBUTIONS, versions
from tp_runtime.sampling import SamplingParams
from tp_runtime.step_times import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tp_runtime.config import RuntimeConfig
    from tp_runtime.engine import Engine
    from tp_runtime.group import TpGroup
    from tp_runtime.launch.interrupts import Interrupts
    from tp_runtime.launch.progress import Progress
    from tp_runtime.models.base import DecodeModel
    from tp_runtime.step_times import StepTimes

SAMPLINGS: Mapping[str, Mapping[str, float]] = {
    "random": {"temperature": 0.8},
    "filtered": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "greedy": {},
}

LOOPS = ("async", "sync")

_WARM_UP_STEPS = 20
_TRACED_STEPS = 10
_COPY_BYTES = 1 << 30
_COPIES = 10


@dataclass(frozen=True, kw_only=True)
class DecodeBench:
    """What is measured. Every rank of the group makes the same one and calls `run`.

    context_tokens: in the cache of each request, on average over the timed steps.
    ways: of the setting all_reduce, each with an engine of its own.
    """

    config: RuntimeConfig
    batches: tuple[int, ...]
    context_tokens: int
    steps: int
    samplings: tuple[str, ...]
    loops: tuple[str, ...] = LOOPS
    ways: tuple[str, ...] = ("auto",)
    trace: str | None = None

    def run(self, progress: Progress, interrupts: Interrupts) -> dict[str, Any] | None:
        """Measure everything. None on ranks above 0.

        Raises:
            ConfigError: the context is too short for the steps.
        """
        import torch

        from tp_runtime.connection import resolve_device
        from tp_runtime.group import TpGroup
        from tp_runtime.models.loading import load_model
        from tp_runtime.ranks import RankInfo

        if self._prompt_tokens < 1:
            raise ConfigError(
                f"flag --context={self.context_tokens}: expected more than "
                f"{self.context_tokens - self._prompt_tokens}, half of the steps and the warm-up"
            )
        config = self.config
        info = RankInfo.from_env(tp_size=config.tp_size)
        device = resolve_device(config, info.local_rank)
        peer_memory = self.ways != ("nccl",)
        result: dict[str, Any] = {}
        with TpGroup.create(
            info, device=device, timeout_s=config.join_timeout_s, peer_memory=peer_memory
        ) as group:
            model = load_model(
                str(config.model),
                group=group,
                dtype=getattr(torch, config.dtype_on(device.type)),
                progress=lambda done, total: progress("load", done, total),
            ).model
            for way in self.ways:
                found = self._way(way, group, model, progress, interrupts)
                cells = [*result.get("cells", ()), *found["cells"]]
                sums = {**result.get("sums", {}), way: group.reduce_plan.to_message()}
                result = {**found, "cells": cells, "sums": sums}
        return result if info.tp_rank == 0 else None

    def _way(
        self,
        way: str,
        group: TpGroup,
        model: DecodeModel,
        progress: Progress,
        interrupts: Interrupts,
    ) -> dict[str, Any]:
        """The facts and cells of one way of summing; on ranks above 0 no cells."""
        from tp_runtime.engine import Engine

        found: dict[str, Any] = {"cells": []}
        engine = Engine(replace(self.config, all_reduce=way), group=group, model=model)
        with engine:
            engine.start(progress=progress)
            interrupts.defer()
            if engine.rank > 0:
                engine.serve_peer()
            else:
                found = {**self._facts(engine), "cells": self._cells(engine, progress, interrupts)}
                if self.trace is not None and way == self.ways[0]:
                    self._trace(engine, self.trace)
        interrupts.raise_if_noted()
        messages_us = _everyones(engine.times, Phase.MESSAGE, group)
        for cell in found["cells"]:
            cell["all_reduce"] = way
            cell["message_us"] = _worst_peer(messages_us, cell.pop("steps"), engine.times.steps)
        return found

    def _cells(
        self, engine: Engine, progress: Progress, interrupts: Interrupts
    ) -> list[dict[str, Any]]:
        cases = [(name, True) for name in self.samplings if "async" in self.loops]
        if "sync" in self.loops:
            cases.append((self.samplings[0], False))
        cells: list[dict[str, Any]] = []
        total = len(self.batches) * len(cases)
        for batch in self.batches:
            for sampling, in_flight in cases:
                progress("measuring", len(cells), total)
                interrupts.raise_if_noted()
                cells.append(self._cell(engine, batch, sampling, in_flight))
        return cells

    @property
    def _prompt_tokens(self) -> int:
        return self.context_tokens - _WARM_UP_STEPS - self.steps // 2

    def _cell(self, engine: Engine, batch: int, sampling: str, in_flight: bool) -> dict[str, Any]:
        """One batch, decoded until all of it is in steady decode and `steps` more are timed."""
        self._fill(engine, batch, sampling)
        for _ in range(_WARM_UP_STEPS):
            self._step(engine, in_flight)
        gc.collect()
        device = engine.time_device(steps=self.steps)
        stamps = [time.perf_counter()]
        for _ in range(self.steps):
            self._step(engine, in_flight)
            stamps.append(time.perf_counter())
        spans = device.spans()[1:]
        last = engine.times.steps
        host = engine.times.statistics(self.steps)
        _drain(engine)
        steps_us = [(b - a) * 1e6 for a, b in itertools.pairwise(stamps)]
        busy_us = sum(span.busy_us for span in spans)
        idle_us = sum(span.idle_us for span in spans)
        return {
            "batch": batch,
            "sampling": sampling,
            "loop": "async" if in_flight else "sync",
            "step_us": statistics.median(steps_us),
            "step_p99_us": _p99(steps_us),
            "device_us": statistics.median(span.busy_us for span in spans),
            "device_step_us": statistics.median(span.busy_us + span.idle_us for span in spans),
            "device_step_p99_us": _p99([span.busy_us + span.idle_us for span in spans]),
            "idle_share": idle_us / (busy_us + idle_us),
            "idle_p50_us": statistics.median(span.idle_us for span in spans),
            "idle_p99_us": _p99([span.idle_us for span in spans]),
            "host_us": host.phase_us,
            "steps": (last - self.steps, last),
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
            "versions": versions(DISTRIBUTIONS),
            "model": self.config.model,
            "dtype": str(dtype).removeprefix("torch."),
            "tp_size": size,
            "context_tokens": self.context_tokens,
            "steps": self.steps,
            "plan_digest": engine.plan_digest,
            "plan": plan_document(engine),
            "weight_bytes": values * dtype.itemsize,
            "kv_bytes_per_request": kv_token_values * dtype.itemsize * self.context_tokens,
            "copy_bytes_per_s": _copy_bandwidth(torch.device("cuda" if on_cuda else "cpu")),
            "capture_s": None if report is None else report.seconds,
            "capture_bytes": None if report is None else report.device_bytes,
            "graphs": 0 if report is None else len(report.graphs),
        }


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def _everyones(times: StepTimes, phase: Phase, group: TpGroup) -> np.ndarray[Any, Any]:
    """Microseconds of a phase in every kept step on every rank, [ranks, capacity]."""
    import torch

    return group.all_gather(torch.from_numpy(times.of(phase))).numpy() / 1e3


def _worst_peer(
    phase_us: np.ndarray[Any, Any], steps: tuple[int, int], last: int
) -> dict[str, float] | None:
    """Median and 99th percentile on the rank above 0 where that is the highest.

    Args:
        phase_us: [ranks, capacity].
        steps: first and end of those that count.  last: end of those that are kept.
    """
    capacity = phase_us.shape[1]
    if phase_us.shape[0] == 1 or steps[0] < last - capacity:
        return None
    peers = phase_us[1:, np.arange(*steps) % capacity]
    median, p99 = np.percentile(peers, (50, 99), axis=1).max(axis=1).tolist()
    return {"p50": median, "p99": p99}


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

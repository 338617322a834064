"""Measure how fast each way of running a skinny product is, and choose.

One rank measures and ships its choices; a configuration is a small frozen value. Each candidate
first has to match the product in float32. It is then timed inside a CUDA graph, launches one after
the other as in a decode step, over copies of the weight that together are larger than the L2 cache;
the candidates take turns, so that a change of clocks meets them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import torch

from tp_runtime.ops.skinny import (
    skinny_linear,
    skinny_linear_residual,
    skinny_norm_gate_up,
    skinny_norm_linear,
)
from tp_runtime.ops.skinny_config import SkinnyConfig, SkinnyOp, candidates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

TOLERANCE: Final = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 1e-5}
"""Largest |result - reference| / |reference|, as vectors, of a candidate that is timed."""

_EPS = 1e-5
_CACHE_BYTES = 3 * (60 << 20)  # copies of a weight that L2 cannot hold
_REPLAY_BYTES = 4 << 30  # read per timing: about a millisecond
_MOST_LAUNCHES = 512  # per timing: of a small weight also about a millisecond
_NOT_FOR_THIS_DEVICE = ("OutOfResources", "PTXASError")  # of Triton: too large a configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class SkinnyShape:
    """A product as it is measured: result [rows, n], weight [n or 2 n, k].

    Args:
        bias: whether `LINEAR` and `NORM_LINEAR` add one.
    """

    op: SkinnyOp
    rows: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False

    @property
    def weight_bytes(self) -> int:
        return self.op.stacked * self.n * self.k * self.dtype.itemsize

    @property
    def repetition(self) -> tuple[int, int]:
        """(copies of the weight, launches of a timing): each copy is used equally often.

        The copies of a very small weight are fewer than fill L2: what a launch costs is then not
        its reading.
        """
        copies = min(max(2, -(-_CACHE_BYTES // self.weight_bytes)), _MOST_LAUNCHES)
        rounds = min(-(-_REPLAY_BYTES // (copies * self.weight_bytes)), _MOST_LAUNCHES // copies)
        return copies, copies * rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class SkinnySample:
    """What became of one candidate.

    Args:
        config: None is torch (cuBLAS).
        median_us: per launch; None if it was not timed.
        refused: why it was not timed.
    """

    config: SkinnyConfig | None
    median_us: float | None = None
    refused: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SkinnyInputs:
    """Random operands of a shape; the outputs are of about unit size."""

    shape: SkinnyShape
    x: Tensor
    weight: Tensor
    norm_weight: Tensor
    bias: Tensor | None
    residual: Tensor

    @classmethod
    def random(cls, shape: SkinnyShape, device: torch.device, *, seed: int) -> SkinnyInputs:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=shape.dtype)

        return cls(
            shape=shape,
            x=normal(shape.rows, shape.k),
            weight=normal(shape.op.stacked * shape.n, shape.k).mul_(shape.k**-0.5),
            norm_weight=normal(shape.k).mul_(0.1).add_(1),
            bias=normal(shape.n) if shape.bias else None,
            residual=normal(shape.rows, shape.n),
        )

    def run(self, config: SkinnyConfig | None, weight: Tensor | None = None) -> Tensor:
        """The operation, with another weight if one is given: [rows, n]."""
        weight = self.weight if weight is None else weight
        match self.shape.op:
            case SkinnyOp.LINEAR:
                return skinny_linear(self.x, weight, self.bias, config=config)
            case SkinnyOp.LINEAR_RESIDUAL:
                return skinny_linear_residual(self.x, weight, self.residual, config=config)
            case SkinnyOp.NORM_LINEAR:
                return skinny_norm_linear(
                    self.x, self.norm_weight, _EPS, weight, self.bias, config=config
                )
            case SkinnyOp.NORM_GATE_UP:
                return skinny_norm_gate_up(self.x, self.norm_weight, _EPS, weight, config=config)

    def reference(self) -> Tensor:
        """The result in float32: [rows, n]."""
        wide = SkinnyInputs(
            shape=self.shape,
            x=self.x.float(),
            weight=self.weight.float(),
            norm_weight=self.norm_weight.float(),
            bias=None if self.bias is None else self.bias.float(),
            residual=self.residual.float(),
        )
        return wide.run(None)


def error_of(result: Tensor, reference: Tensor) -> float:
    """|result - reference| / |reference| as vectors; NaN where either has one."""
    difference = torch.linalg.vector_norm(result.float() - reference)
    return float(difference / torch.linalg.vector_norm(reference))


def measure(
    shape: SkinnyShape,
    device: torch.device,
    *,
    configs: Sequence[SkinnyConfig | None] | None = None,
    repeats: int = 7,
    seed: int = 0,
) -> list[SkinnySample]:
    """Time every candidate for a shape; call it on a GPU that does nothing else.

    Args:
        shape: what to measure.  device: a CUDA device.
        configs: the candidates; None: torch and those that `candidates` lists.
        repeats: timings per candidate, of about a millisecond each.

    Returns:
        One sample per candidate, in their order.
    """
    if configs is None:
        configs = [None, *candidates(shape.op, rows=shape.rows, n=shape.n, k=shape.k)]
    inputs = SkinnyInputs.random(shape, device, seed=seed)
    reference = inputs.reference()
    copies, launches = shape.repetition
    weights = [inputs.weight, *(inputs.weight.clone() for _ in range(copies - 1))]
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    refused: dict[int, str] = {}
    with torch.cuda.stream(stream):
        for index, config in enumerate(configs):
            reason = _gate(inputs, config, reference)
            if reason is None:
                graphs[index] = _captured(inputs, config, weights, launches, stream)
            else:
                refused[index] = reason
        times: dict[int, list[float]] = {index: [] for index in graphs}
        for graph in graphs.values():
            graph.replay()
        for _ in range(repeats):
            for index, graph in graphs.items():
                times[index].append(replay_us(graph, stream) / launches)
    torch.cuda.current_stream(device).wait_stream(stream)
    return [
        SkinnySample(
            config=config,
            median_us=median(times[index]) if index in times else None,
            refused=refused.get(index),
        )
        for index, config in enumerate(configs)
    ]


def best(samples: Sequence[SkinnySample], *, margin: float = 0.02) -> SkinnyConfig | None:
    """The fastest configuration; torch (None) unless one is faster than it by the margin.

    Raises: ValueError: nothing was timed.
    """
    timed = [(s.median_us, s.config) for s in samples if s.median_us is not None]
    if not timed:
        reasons = [s.refused for s in samples]
        raise ValueError(f"expected a sample that was timed, got only refusals: {reasons}")
    fastest, config = min(timed, key=lambda pair: pair[0])
    torch_us = [us for us, other in timed if other is None]
    return None if torch_us and fastest > torch_us[0] * (1 - margin) else config


def _gate(inputs: SkinnyInputs, config: SkinnyConfig | None, reference: Tensor) -> str | None:
    """Why a candidate is not timed: it cannot run, or its result is wrong."""
    try:
        error = error_of(inputs.run(config), reference)
    except ValueError as problem:
        return str(problem)
    except Exception as problem:
        # Triton is imported only where it is used, so that its errors have no name here
        if type(problem).__name__ not in _NOT_FOR_THIS_DEVICE:
            raise
        return f"{type(problem).__name__}: {problem}"
    allowed = TOLERANCE[inputs.shape.dtype]
    return None if error <= allowed else f"error {error:.3g}, allowed {allowed:.3g}"


def _captured(
    inputs: SkinnyInputs,
    config: SkinnyConfig | None,
    weights: Sequence[Tensor],
    launches: int,
    stream: torch.cuda.Stream,
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for launch in range(launches):
            inputs.run(config, weights[launch % len(weights)])
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    """Time of one replay on a stream; waits for it."""
    start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record(stream)
    graph.replay()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3

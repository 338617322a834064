"""Measure how fast the ranks of a group sum tensors of each size, and choose.

All ranks measure together, since a sum is as slow as the slowest of them; one rank's times decide.
Each way is timed inside a CUDA graph, one sum after the other over the same tensor, as in a decode
step; the ways take turns, so that a change of clocks meets them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING

import torch

from tp_runtime.ops.skinny_measure import replay_us
from tp_runtime.reduce_plan import PROGRAM_BYTES, REDUCED_BYTES, ReducePlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tp_runtime.group import TpGroup

SumTimes = Mapping[tuple[int, int], float]
"""Microseconds of a sum by (bytes of the tensor, bytes of a program; 0: NCCL)."""

_LAUNCHES = 32
_MARGIN = 0.03


def measure_sums(
    group: TpGroup,
    *,
    sizes: Sequence[int] = REDUCED_BYTES,
    repeats: int = 5,
    launches: int = _LAUNCHES,
) -> SumTimes:
    """Time every way for every size; all ranks call it together. The group has peer memory.

    Args:
        sizes: bytes of the tensors.
        repeats: timings of each, of `launches` sums.
    """
    used = group.reduce_plan
    times: dict[tuple[int, int], float] = {}
    try:
        for nbytes in sizes:
            for program_bytes, us in _measure_size(group, nbytes, repeats, launches).items():
                times[nbytes, program_bytes] = us
    finally:
        group.use_reduce_plan(used)
    return times


def choose_sums(times: SumTimes) -> ReducePlan:
    """The fastest way of each size; NCCL unless another is faster by 3 %."""
    chosen = []
    for nbytes in REDUCED_BYTES:
        fastest, program_bytes = min(
            (us, program) for (size, program), us in times.items() if size == nbytes
        )
        nccl = times[nbytes, 0]
        chosen.append(program_bytes if fastest < nccl * (1 - _MARGIN) else 0)
    return ReducePlan(program_bytes=tuple(chosen))


def _measure_size(group: TpGroup, nbytes: int, repeats: int, launches: int) -> dict[int, float]:
    device = group.device
    t = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    for program_bytes in (0, *PROGRAM_BYTES):
        group.use_reduce_plan(ReducePlan(program_bytes=(program_bytes,) * len(REDUCED_BYTES)))
        with torch.cuda.stream(stream):
            group.all_reduce(t)
        stream.synchronize()
        group.barrier()
        graphs[program_bytes] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graphs[program_bytes], stream=stream, capture_error_mode="thread_local"
        ):
            for _ in range(launches):
                group.all_reduce(t)
    times: dict[int, list[float]] = {program_bytes: [] for program_bytes in graphs}
    with torch.cuda.stream(stream):
        for repeat in range(repeats + 1):
            for program_bytes, graph in graphs.items():
                us = replay_us(graph, stream) / launches
                if repeat:  # the first is for warming up
                    times[program_bytes].append(us)
    group.raise_if_failed()
    group.barrier()
    for graph in graphs.values():
        graph.reset()
    return {program_bytes: median(each) for program_bytes, each in times.items()}

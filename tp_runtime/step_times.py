"""Where the host's time of a step goes, kept for the last few thousand steps."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator


class Phase(IntEnum):
    """Parts of a step on the host. RECEIVE is a peer's; PLAN, PUBLISH and HARVEST are rank 0's."""

    PLAN = 0
    PUBLISH = 1
    RECEIVE = 2
    PREPARE = 3
    MODEL = 4
    HARVEST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeStatistics:
    """Medians over the kept steps, in microseconds; None where nothing was measured.

    `outside_model_us` is the median over steps of all phases but RECEIVE (which is mostly waiting
    for rank 0) and MODEL.
    """

    steps: int
    phase_us: dict[str, float | None]
    outside_model_us: float | None


class StepTimes:
    """A ring of phase times. `harvest` may be timed by another thread than the rest."""

    def __init__(self, capacity: int = 4096) -> None:
        self._ns = np.zeros((capacity, len(Phase)), dtype=np.int64)
        self._steps = 0

    @contextmanager
    def measure(self, step: int, phase: Phase) -> Iterator[None]:
        """Add the time of the block to a phase of a step."""
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(step, phase, time.perf_counter_ns() - begin)

    def add(self, step: int, phase: Phase, nanoseconds: int) -> None:
        """Add time that was measured elsewhere."""
        self._ns[step % len(self._ns), phase] += nanoseconds

    def begin(self, step: int) -> None:
        """Forget what the ring holds of an older step in this place."""
        self._ns[step % len(self._ns)] = 0
        self._steps = step + 1

    def statistics(self) -> StepTimeStatistics:
        kept = self._ns[: min(self._steps, len(self._ns))].astype(np.float64) / 1e3
        if not len(kept):
            return StepTimeStatistics(
                steps=0,
                phase_us={phase.name.lower(): None for phase in Phase},
                outside_model_us=None,
            )
        outside = kept.sum(axis=1) - kept[:, Phase.RECEIVE] - kept[:, Phase.MODEL]
        return StepTimeStatistics(
            steps=len(kept),
            phase_us={phase.name.lower(): float(np.median(kept[:, phase])) for phase in Phase},
            outside_model_us=float(np.median(outside)),
        )

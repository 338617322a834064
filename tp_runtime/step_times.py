"""Where the host's time of a step goes, kept for the last few thousand steps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable


class Phase(IntEnum):
    """Parts of a step on the host. RECEIVE is a peer's; PLAN, PUBLISH and HARVEST are rank 0's.

    MESSAGE is the end of RECEIVE: from the later of rank 0's sending and this rank's asking on.
    HARVEST is processor time of the worker, which runs beside the model; the others are wall time.
    """

    PLAN = 0
    PUBLISH = 1
    RECEIVE = 2
    PREPARE = 3
    MODEL = 4
    HARVEST = 5
    MESSAGE = 6


_NOT_OUTSIDE = (Phase.RECEIVE, Phase.MESSAGE, Phase.MODEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeStatistics:
    """Medians over the kept steps, in microseconds; None where nothing was measured.

    `outside_model_us` is the median over steps of all phases but RECEIVE (which is mostly waiting
    for rank 0), its end MESSAGE, and MODEL.
    """

    steps: int
    phase_us: dict[str, float | None]
    outside_model_us: float | None


class _Span:
    """Adds the time of a `with` block to one phase. One for each phase, used again and again,
    since a step has several and each is measured in every step."""

    __slots__ = ("_began_ns", "_clock_ns", "_column", "_step")

    def __init__(
        self, column: np.ndarray[Any, np.dtype[np.int64]], clock_ns: Callable[[], int]
    ) -> None:
        self._column = column
        self._clock_ns = clock_ns
        self._step = self._began_ns = 0

    def at(self, step: int) -> Self:
        self._step = step
        return self

    def __enter__(self) -> None:
        self._began_ns = self._clock_ns()

    def __exit__(self, *error: object) -> None:
        spent_ns = self._clock_ns() - self._began_ns
        self._column[self._step % len(self._column)] += spent_ns


def _clock_of(phase: Phase) -> Callable[[], int]:
    return time.thread_time_ns if phase is Phase.HARVEST else time.perf_counter_ns


_CAPACITY = 1 << 14


class StepTimes:
    """A ring of phase times. Each phase is measured by one thread, not always the same for all."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._ns = np.zeros((capacity, len(Phase)), dtype=np.int64)
        self._spans = [_Span(self._ns[:, phase], _clock_of(phase)) for phase in Phase]
        self._steps = 0

    def measure(self, step: int, phase: Phase) -> _Span:
        """A context that adds its time to a phase of a step; not to be nested in itself."""
        return self._spans[phase].at(step)

    def add(self, step: int, phase: Phase, nanoseconds: int) -> None:
        """Add time that was measured elsewhere."""
        self._ns[step % len(self._ns), phase] += nanoseconds

    def begin(self, step: int) -> None:
        """Forget what the ring holds of an older step in this place."""
        self._ns[step % len(self._ns)] = 0
        self._steps = step + 1

    @property
    def steps(self) -> int:
        """How many steps there have been; the next one has this number."""
        return self._steps

    def of(self, phase: Phase) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Nanoseconds of a phase in each kept step, [capacity]; step n stands at n % capacity."""
        return self._ns[:, phase].copy()

    def statistics(self, last: int | None = None) -> StepTimeStatistics:
        """Of the steps that are kept, or of the `last` of them."""
        count = min(self._steps, len(self._ns), self._steps if last is None else last)
        places = np.arange(self._steps - count, self._steps) % len(self._ns)
        kept = self._ns[places].astype(np.float64) / 1e3
        if not len(kept):
            return StepTimeStatistics(
                steps=0,
                phase_us={phase.name.lower(): None for phase in Phase},
                outside_model_us=None,
            )
        outside = kept.sum(axis=1) - kept[:, [*_NOT_OUTSIDE]].sum(axis=1)
        return StepTimeStatistics(
            steps=len(kept),
            phase_us={phase.name.lower(): float(np.median(kept[:, phase])) for phase in Phase},
            outside_model_us=float(np.median(outside)),
        )

"""One meaning of "timeout" for every wait: a point on the monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]

# A kernel wait that returns this much later than asked means that this process, or the machine
# under it, was frozen. That time says nothing about the other side and is not counted.
FROZEN_S = 0.25


class Deadline:
    """A deadline that does not run while this process is frozen.

    Every wait is bracketed by `asleep(seconds)`, which tells how long the kernel was asked to
    wait; what it took on top of that (a stopped process, a suspended machine) moves the deadline.

    Args:
        timeout_s: seconds from `from_s`, which is a point of the clock; from now if None.
        clock: monotonic seconds; tests inject their own.
    """

    __slots__ = ("_at_s", "_clock", "_started_s", "timeout_s")

    def __init__(
        self, timeout_s: float, *, from_s: float | None = None, clock: Clock = time.monotonic
    ) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._started_s = clock() if from_s is None else from_s
        self._at_s = self._started_s + timeout_s

    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._at_s - self._clock())

    def expired(self) -> bool:
        return self._clock() >= self._at_s

    def elapsed_s(self) -> float:
        """Seconds since this deadline was made, frozen time included."""
        return self._clock() - self._started_s

    def restart(self, from_s: float) -> None:
        """Count the whole timeout again from a point of the clock that the other side was heard."""
        self._at_s = max(self._at_s, from_s + self.timeout_s)

    def woke(self, *, slept_from_s: float, asked_s: float) -> None:
        """Tell that a wait of at most `asked_s` seconds began at `slept_from_s` and is over."""
        waited_s = self._clock() - slept_from_s
        if waited_s - asked_s > FROZEN_S:
            # how much of it passed before the freeze is not known: none of it counts
            self._at_s += waited_s

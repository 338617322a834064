"""How long a peer goes on waiting for rank 0."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tp_runtime.broadcast.deadline import Clock, Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

# No single wait in the kernel is longer.
LONGEST_S = 3600.0


class Patience:
    """Ends when rank 0 was silent for the whole timeout, which is not when it sent no message.

    Args:
        timeout_s: longest silence, seconds from now.
        heard_s: when rank 0 was last heard, seconds of the clock; None: whatever is heard, the
            time is not counted anew.
        ask: asks rank 0 for a sign of life, since this timeout may be shorter than its heartbeat.
        from_s: when the silence began, seconds of the clock; now if None.
        clock: monotonic seconds; tests inject their own.
    """

    __slots__ = ("_ask", "_asked", "_deadline", "_heard_s", "_last_s")

    def __init__(
        self,
        timeout_s: float,
        *,
        heard_s: Callable[[], float] | None,
        ask: Callable[[], None],
        from_s: float | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._deadline = Deadline(timeout_s, from_s=from_s, clock=clock)
        self._heard_s = heard_s
        self._ask = ask
        self._asked = heard_s is None
        self._last_s = 0.0

    @property
    def timeout_s(self) -> float:
        return self._deadline.timeout_s

    def next_s(self) -> float | None:
        """How long to wait at most before this is asked again, seconds; None: it is over."""
        deadline = self._deadline
        if self._heard_s is not None and (heard_s := self._heard_s()) != self._last_s:
            self._last_s, self._asked = heard_s, False
            deadline.restart(heard_s)
        if deadline.expired():
            return None
        wait_s = deadline.remaining_s()
        if not self._asked:
            half_s = wait_s - deadline.timeout_s / 2
            if half_s > 0:
                return min(half_s, LONGEST_S)
            self._ask()
            self._asked = True
        return min(wait_s, LONGEST_S)

    def woke(self, *, slept_from_s: float, asked_s: float) -> None:
        """Tell that a wait of at most `asked_s` seconds began at `slept_from_s` and is over."""
        self._deadline.woke(slept_from_s=slept_from_s, asked_s=asked_s)

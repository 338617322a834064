"""The receiving end of the data connection: looks, sleeps until shortly before, spins."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, TypeVar

from tp_runtime.broadcast.pace import Sleeper

if TYPE_CHECKING:
    from collections.abc import Callable

    from tp_runtime.broadcast.failure import FailureLatch
    from tp_runtime.broadcast.pace import Pace
    from tp_runtime.broadcast.patience import Patience
    from tp_runtime.broadcast.statistics import Counters

Taken = TypeVar("Taken")

# Often enough that the caches keep it, seldom enough that no message is late because of it.
_REHEARSE_EVERY_S = 500e-6


class Inbox:
    """Waits for what comes next, at the cost in CPU that the wait mode allows.

    Each wait ends in the call that takes: nothing is between it and the caller but returns, since
    what runs there runs after a step of the model has put it out of the caches.

    Args:
        data_fd: of the connection.
        latch: ends every wait.
        rehearse: goes the way of a message that has arrived; called while there is time.
    """

    def __init__(
        self,
        data_fd: int,
        *,
        pace: Pace,
        latch: FailureLatch,
        rehearse: Callable[[], None],
        counters: Counters,
    ) -> None:
        self._pace = pace
        self._latch = latch
        self._counters = counters
        self._rehearse = rehearse
        self._sleeper = Sleeper(data_fd, latch.wake_fd)
        # Waits in the kernel until something may be there: seconds, and 2.
        self.poll = self._sleeper.block
        self._spun_from_s = 0.0

    def wait(self, take: Callable[[], Taken], patience: Patience) -> Taken | None:
        """Sleep, spin and block until `take` gives something; None: the patience is over.

        Args:
            take: raises BlockingIOError while nothing is there.

        Raises:
            BroadcastError: the channel has ended.
            OSError: as `take`.
        """
        started_s = time.monotonic()
        sleep_until_s, spin_until_s = self._pace.plan(started_s)
        limit_s = started_s + patience.timeout_s
        if sleep_until_s > started_s:
            self._counters.waits += 1
            sleep_until_s = min(sleep_until_s, limit_s)
            self._sleeper.sleep(sleep_until_s - started_s)
            woke_s = time.monotonic()
            self._pace.woke(late_s=woke_s - sleep_until_s)
            started_s = woke_s
        if spin_until_s > started_s:
            # Accounted when the message has been delivered, see `spun_until`.
            self._spun_from_s = started_s
            taken = self._spin(take, min(spin_until_s, limit_s))
            if taken is not None:
                return taken
            self.spun_until(time.monotonic())
            self._counters.misses += 1
        return self._block(take, patience)

    def _spin(self, take: Callable[[], Taken], until_s: float) -> Taken | None:
        yield_core, clock, latch = os.sched_yield, time.monotonic, self._latch
        rehearse_s = 0.0
        while (now_s := clock()) < until_s:
            if now_s > rehearse_s:
                self._rehearse()
                rehearse_s = now_s + _REHEARSE_EVERY_S
            try:
                return take()
            except BlockingIOError:
                # Let whoever needs this core have it: a spin that does not yield is the worst
                # neighbour of the rank that it waits for.
                yield_core()
            if latch.error is not None:
                latch.check()
        return None

    def _block(self, take: Callable[[], Taken], patience: Patience) -> Taken | None:
        block, clock = self.poll, time.monotonic
        while True:
            self._latch.check()
            asked_s = patience.next_s()
            if asked_s is None:
                return None
            self._counters.waits += 1
            slept_from_s = clock()
            block(asked_s, 2)
            try:
                return take()
            except BlockingIOError:
                patience.woke(slept_from_s=slept_from_s, asked_s=asked_s)

    def spun_until(self, now_s: float) -> None:
        """Account for the spin that ended now, if there was one."""
        if self._spun_from_s:
            self._counters.spun_s += now_s - self._spun_from_s
            self._spun_from_s = 0.0

    def close(self) -> None:
        self._sleeper.close()

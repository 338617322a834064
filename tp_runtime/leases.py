"""A count of work that is under way, which cannot leak when starting the work fails."""

from __future__ import annotations

import threading
from typing import Self


class LeaseCounter:
    """Counts leases that are out. Any thread may take or return one.

    Example::

        with in_flight.lease() as lease:
            runner.launch(task, lease=lease)  # returns it when the task ends
        # launch raised: the lease is back already
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        """Leases taken and not yet returned."""
        with self._lock:
            return self._count

    def lease(self) -> Lease:
        """Take one. Use it as a context manager, so that it comes back if nobody takes it over."""
        with self._lock:
            self._count += 1
        return Lease(self)

    def _returned(self) -> None:
        with self._lock:
            self._count -= 1


class Lease:
    """One unit of a `LeaseCounter`. Leaving its context returns it unless it was handed over."""

    __slots__ = ("_counter", "_handed_over", "_lock", "_out")

    def __init__(self, counter: LeaseCounter) -> None:
        self._counter = counter
        self._lock = threading.Lock()
        self._out = True
        self._handed_over = False

    def hand_over(self) -> None:
        """From here on another owner returns it. Harmless if that has happened already."""
        with self._lock:
            self._handed_over = True

    def release(self) -> None:
        """Return it. Idempotent; any thread."""
        with self._lock:
            if not self._out:
                return
            self._out = False
        self._counter._returned()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            owned = not self._handed_over
        if owned:
            self.release()

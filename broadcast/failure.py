"""The first cause of a channel's end, kept for every later call."""

from __future__ import annotations

import os
import select
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tp_runtime.errors import BroadcastError


class FailureLatch:
    """Holds one error, wakes everybody who waits, and shows it on a descriptor.

    `wake_fd` becomes readable when the channel ends for any reason, so that waits of the owner
    return. `watch_fd` is an epoll descriptor for outsiders: readable when the channel FAILED,
    not when it was closed in good order.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.error: BroadcastError | None = None
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._failed_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._watch = select.epoll()
        self._watch.register(self._failed_fd, select.EPOLLIN)
        self.closed = False

    @property
    def watch_fd(self) -> int:
        return -1 if self.closed else self._watch.fileno()

    def set(self, error: BroadcastError, *, failed: bool) -> bool:
        """Keep the error if it is the first; True if it is."""
        with self.changed:
            if self.error is not None or self.closed:
                return False
            # Who sees the error finds `watch_fd` readable, and who is woken finds the error.
            if failed:
                os.eventfd_write(self._failed_fd, 1)
            self.error = error
            os.eventfd_write(self.wake_fd, 1)
            self.changed.notify_all()
            return True

    def check(self) -> None:
        """Raise the cause if there is one, the same object each time."""
        if self.error is not None:
            raise self.error.with_traceback(None)

    def close(self) -> None:
        with self.changed:
            self.release()

    def release(self) -> None:
        """Close the descriptors; alone, without the lock, in a forked child."""
        if not self.closed:
            self.closed = True
            self._watch.close()
            os.close(self.wake_fd)
            os.close(self._failed_fd)

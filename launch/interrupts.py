"""Ctrl-C and SIGTERM: end between two steps if we can, within a few seconds in any case.

While ranks decode, an exception thrown into the middle of a collective would leave the others in
it. So the handler only notes the signal there: rank 0 sees it between two steps and stops everybody
in good order. The peers wait for that; if the steps go on for a second, the signal was for that
peer alone, and it tells the others. Elsewhere (loading, selecting) it raises at once. A rank whose
main thread is stuck in native code never runs a Python handler at all; for that case a second
thread, woken by the C-level handler, ends the process when the grace time is over.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

from tp_runtime.launch.exits import INTERRUPTED, prefix

if TYPE_CHECKING:
    from types import FrameType, TracebackType
    from typing import Self

ALONE_S = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Context manager around the work of one command. Main thread only.

    Args:
        grace_s: seconds from the first signal to the forced end of the process.
    """

    def __init__(self, *, grace_s: float = 4.0) -> None:
        self._grace_s = grace_s
        self._deferring = False
        self._noted = False
        self._noted_s = 0.0
        self._done = threading.Event()
        self._old_handlers: dict[int, object] = {}
        self._old_wakeup = -1
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._guard = threading.Thread(target=self._end_when_stuck, name="interrupts", daemon=True)

    @property
    def noted(self) -> bool:
        """A signal came."""
        return self._noted

    @property
    def alone(self) -> bool:
        """A signal came so long ago that this rank alone must have got it: rank 0 goes on."""
        return self._noted and time.monotonic() - self._noted_s > ALONE_S

    @property
    def deferred(self) -> bool:
        """`defer` was called."""
        return self._deferring

    def defer(self) -> None:
        """From here on a first signal is only noted; the caller looks at `noted`."""
        self._deferring = True

    def raise_if_noted(self) -> None:
        """Raises: KeyboardInterrupt, if a signal was noted."""
        if self._noted:
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._old_handlers[number] = signal.signal(number, self._handle)
        self._old_wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._guard.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        signal.set_wakeup_fd(self._old_wakeup)
        for number, old in self._old_handlers.items():
            signal.signal(number, old)  # type: ignore[arg-type]
        self._write.close()
        self._guard.join()
        self._read.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self._noted
        self._noted, self._noted_s = True, self._noted_s or time.monotonic()
        if again or not self._deferring:
            raise KeyboardInterrupt

    def _end_when_stuck(self) -> None:
        while True:
            woken = self._read.recv(1)
            if not woken:
                return
            if woken[0] in SIGNALS:
                break
        if self._done.wait(self._grace_s):
            return
        sys.stderr.write(
            f"{prefix()}interrupted; still busy after {self._grace_s:g} s, ending now\n"
        )
        sys.stderr.flush()
        os._exit(INTERRUPTED)

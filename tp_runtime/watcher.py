"""Sees the failure of another rank while this rank's main thread waits somewhere else.

The channel's failure descriptor becomes readable when the channel fails: a peer died, was silent
for too long, or aborted. The watcher sleeps on it. It then ends every wait of the group that can
be ended, and does what the host asked for. A collective inside a driver or a library cannot be
interrupted; only "exit" ends a process that is stuck there, so only the command line asks for it.

While the ranks start it also looks for ranks that are stopped. In steps the channel notices them,
but NCCL, which is formed before the first step, waits for them without end.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from tp_runtime.broadcast.sockets import process_state

if TYPE_CHECKING:
    from tp_runtime.broadcast import CpuTpBroadcaster
    from tp_runtime.errors import BroadcastError
    from tp_runtime.group import TpGroup

log = logging.getLogger(__name__)

OnFailure = Literal["raise", "exit"] | Callable[["BroadcastError"], None]

EXIT_CODE = 1
EXIT_GRACE_S = 2.0
"""How long the main thread may take to end by itself, with its own error message."""
_LOOK_S = 0.5
_CALLBACK_S = 10.0  # for a host's `on_failure` that is under way at the end


class FailureWatcher:
    """One daemon thread on the failure descriptor of a channel.

    Args:
        on_failure: "raise": waits of the group raise, and so does the next call of the channel;
            a callable is called with the cause, on this thread; "exit": the process ends with
            code 1 if its main thread has not ended it within 2 s.
        start_timeout_s: how long a rank may be stopped before `started`.
    """

    def __init__(
        self,
        channel: CpuTpBroadcaster,
        *,
        rank: int,
        on_failure: OnFailure,
        start_timeout_s: float,
    ) -> None:
        self._channel = channel
        self._rank = rank
        self._on_failure = on_failure
        self._group: TpGroup | None = None
        self._lock = threading.Lock()
        self._cause: BroadcastError | None = None
        self._start_timeout_s = start_timeout_s
        self._started = False
        self._stopped = threading.Event()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._watch, name="tp-failure-watcher", daemon=True)
        self._thread.start()

    def watch_group(self, group: TpGroup) -> None:
        """From now on a failure also ends the waits of this group."""
        with self._lock:
            self._group = group
            cause = self._cause
        if cause is not None:
            group.fail(cause)

    def started(self) -> None:
        """From here on the ranks run steps, and the channel notices who is stopped."""
        self._started = True

    def close(self) -> None:
        """Stop watching; idempotent. To be called before the channel is closed."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        os.write(self._wake_write, b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(_CALLBACK_S)
            if self._thread.is_alive():
                log.warning("rank %d: the host's on_failure has not returned", self._rank)
                return
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        stopped_s = defaultdict[int, float](float)
        while not self._stopped.is_set():
            poll.poll(None if self._started else _LOOK_S * 1e3)
            cause = self._channel.failure
            if cause is not None:
                self._failed(cause)
                return
            for rank, pid in enumerate(self._channel.pids if not self._started else ()):
                # counted by looks, so that time in which this process was frozen does not count
                seen = process_state(pid) == "stopped"
                stopped_s[rank] = stopped_s[rank] + _LOOK_S if seen else 0.0
                if stopped_s[rank] > self._start_timeout_s:
                    self._channel.abort(
                        f"rank {rank} (pid {pid}) was stopped for {self._start_timeout_s:g} s "
                        "while the ranks started"
                    )
                    break

    def _failed(self, cause: BroadcastError) -> None:
        with self._lock:
            self._cause = cause
            group = self._group
        if group is not None:
            group.fail(cause)
        if callable(self._on_failure):
            self._on_failure(cause)
        elif self._on_failure == "exit":
            self._exit(cause)

    def _exit(self, cause: BroadcastError) -> None:
        deadline = time.monotonic() + EXIT_GRACE_S
        while time.monotonic() < deadline:
            if self._stopped.wait(0.05):
                return  # the main thread is on its way out
        print(  # noqa: T201 - the process ends here, and a log handler may be stuck as well
            f"[rank {self._rank}] error: {cause} (while this rank waited in a collective)",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_CODE)

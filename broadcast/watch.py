"""The thread that listens while the owner of the channel is elsewhere."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from typing import TYPE_CHECKING, Protocol

from tp_runtime.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tp_runtime.broadcast.control import ControlFrame, ControlPort

# Frames taken from one connection before the others have their turn.
_FRAMES_IN_A_ROW = 64


class Listener(Protocol):
    """What the watch tells, always from its own thread."""

    def on_frame(self, rank: int, frame: ControlFrame) -> None: ...
    def on_garbage(self, rank: int, error: ProtocolError) -> None: ...
    def on_hang_up(self, rank: int) -> None: ...
    def on_exit(self, rank: int) -> None: ...
    def on_tick(self) -> None: ...
    def is_over(self) -> bool: ...


class Watch:
    """Reads every control connection and notices every death; does only small work.

    What a rank said before it left is heard before its end is noticed, so a good-bye or the
    reason of an abort is never overtaken by the exit of the process.

    Args:
        ports: control connections by rank.
        pidfds: processes by rank; those of -1 are not watched.
        tick_s: longest time between two `on_tick`; None = no ticks.
    """

    def __init__(
        self,
        listener: Listener,
        *,
        ports: Mapping[int, ControlPort],
        pidfds: Mapping[int, int],
        tick_s: float | None,
        name: str,
    ) -> None:
        self._listener = listener
        self._tick_s = tick_s
        self._ports = dict(ports)
        self._port_ranks = {port.fileno(): rank for rank, port in ports.items()}
        self._pidfd_ranks = {pidfd: rank for rank, pidfd in pidfds.items() if pidfd >= 0}
        with contextlib.ExitStack() as undo:
            self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, self._stop_fd)
            self._epoll = undo.enter_context(select.epoll())
            for descriptor in (self._stop_fd, *self._port_ranks, *self._pidfd_ranks):
                self._epoll.register(descriptor, select.EPOLLIN)
            undo.pop_all()
        self._stopping = threading.Event()
        self._released = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set() and not self._listener.is_over():
            events = self._epoll.poll(self._tick_s)
            if self._stopping.is_set():
                return
            exited = [fd for fd, _ in events if fd in self._pidfd_ranks]
            speaking = [fd for fd, _ in events if fd in self._port_ranks]
            if exited:
                speaking = list(self._port_ranks)
            for descriptor in speaking:
                if not self._listener.is_over():
                    self._hear(descriptor, to_the_end=bool(exited))
            for descriptor in exited:
                # one exit is reported once; the descriptor stays readable for ever
                self._epoll.unregister(descriptor)
                rank = self._pidfd_ranks.pop(descriptor)
                if not self._listener.is_over():
                    self._listener.on_exit(rank)
            if self._tick_s is not None and not self._listener.is_over():
                self._listener.on_tick()

    def _hear(self, descriptor: int, *, to_the_end: bool) -> None:
        rank = self._port_ranks[descriptor]
        port = self._ports[rank]
        left = _FRAMES_IN_A_ROW
        while (left or to_the_end) and not self._listener.is_over():
            left = max(0, left - 1)
            try:
                frame = port.receive()
            except BlockingIOError:
                return
            except ProtocolError as error:
                self._listener.on_garbage(rank, error)
                return
            except (EOFError, OSError):
                self._epoll.unregister(descriptor)
                del self._port_ranks[descriptor]
                self._listener.on_hang_up(rank)
                return
            self._listener.on_frame(rank, frame)

    def stop(self) -> None:
        """End the thread and wait for it, unless it is the caller."""
        if self._released:
            return
        self._stopping.set()
        os.eventfd_write(self._stop_fd, 1)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self.release()

    def release(self) -> None:
        """Close the descriptors; alone, without the thread, in a forked child."""
        if not self._released:
            self._released = True
            self._epoll.close()
            os.close(self._stop_fd)

"""The same frame to every peer: first to all that can take them, then to the rest."""

from __future__ import annotations

import logging
import select
import socket
import time
from typing import TYPE_CHECKING

from tp_runtime.broadcast.deadline import Deadline
from tp_runtime.broadcast.wire import MEMFD_MARK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tp_runtime.broadcast.link import Link
    from tp_runtime.broadcast.statistics import Counters

log = logging.getLogger(__name__)

# epoll calls a socket writable only when three quarters of its buffer are free, which a peer that
# takes a message now and then may never reach: it is tried again this often.
_RETRY_S = 0.01
_NO_SIGNAL = socket.MSG_NOSIGNAL


class LinkBroken(Exception):
    """A connection ended while something was sent over it."""

    def __init__(self, link: Link, error: OSError) -> None:
        super().__init__(str(error))
        self.link = link
        self.error = error


class LinksFull(Exception):
    """The buffers of these peers stayed full until the deadline."""

    def __init__(self, links: list[Link], deadline: Deadline) -> None:
        super().__init__(f"ranks {[link.rank for link in links]}")
        self.links = links
        self.deadline = deadline


class FanOut:
    """Sends to the data connections of all peers; no slow peer delays another.

    Args:
        wake_fd: becomes readable when the channel ends; `check` then raises why.
        timeout_s: how long buffers may stay full, seconds, if a call says nothing else.
    """

    def __init__(
        self,
        links: Sequence[Link],
        *,
        wake_fd: int,
        check: Callable[[], None],
        counters: Counters,
        timeout_s: float,
    ) -> None:
        self._order = [(link.data.sock.send, link) for link in links]
        self._wake_fd = wake_fd
        self._check = check
        self._counters = counters
        self._timeout_s = timeout_s
        # Per rank: sends that found a full buffer.
        self.full = {link.rank: 0 for link in links}

    def send(self, frame: bytes, timeout_s: float | None, memfd: int = -1) -> None:
        """Send a frame to all peers, and the memfd that holds its body if there is one.

        Args:
            timeout_s: how long buffers may stay full, seconds; None: as told to all calls.

        Raises:
            LinkBroken, LinksFull: some peers may have the frame and some not.
        """
        waiting: list[tuple[Link, int]] | None = None
        order = self._order
        for send, link in order:
            try:
                send(frame, _NO_SIGNAL)
            except BlockingIOError:
                waiting = [*(waiting or ()), (link, 0)]
            except OSError as error:
                raise LinkBroken(link, error) from None
            else:
                if memfd >= 0 and not _try_memfd(link, memfd):
                    waiting = [*(waiting or ()), (link, 1)]
        if waiting is not None:
            deadline = Deadline(self._timeout_s if timeout_s is None else timeout_s)
            self._send_rest(waiting, frame, memfd, deadline)
        # Wake another peer first next time: the last of a row waits for all wake-ups.
        order.append(order.pop(0))

    def _send_rest(
        self, full: list[tuple[Link, int]], frame: bytes, memfd: int, deadline: Deadline
    ) -> None:
        """The second pass, over those whose buffers were full; with each, packets sent to it."""
        waiting = {link.data.fileno(): (link, sent) for link, sent in full}
        packets = 1 if memfd < 0 else 2
        with select.epoll() as epoll:
            epoll.register(self._wake_fd, select.EPOLLIN)
            for descriptor, (link, _) in waiting.items():
                self.full[link.rank] += 1
                epoll.register(descriptor, select.EPOLLOUT)
            while waiting:
                if deadline.expired():
                    raise LinksFull([link for link, _ in waiting.values()], deadline)
                asked_s, started_s = min(deadline.remaining_s(), _RETRY_S), time.monotonic()
                self._counters.waits += 1
                epoll.poll(asked_s)
                deadline.woke(slept_from_s=started_s, asked_s=asked_s)
                self._check()
                for descriptor in list(waiting):
                    link, sent = waiting[descriptor]
                    if sent == 0:
                        sent += _try_frame(link, frame)
                    if sent == 1 and memfd >= 0:
                        sent += _try_memfd(link, memfd)
                    waiting[descriptor] = (link, sent)
                    if sent == packets:
                        epoll.unregister(descriptor)
                        del waiting[descriptor]

    def send_last(self, packet: bytes, deadline: Deadline) -> None:
        """Send to everybody who can still be reached; raises nothing."""
        waiting = {link.data.fileno(): link for _, link in self._order if not link.left}
        with select.epoll() as epoll:
            for descriptor in waiting:
                epoll.register(descriptor, select.EPOLLOUT)
            while waiting and not deadline.expired():
                # Tried before it is waited for: epoll calls a socket writable only when three
                # quarters of its buffer are free.
                for descriptor in list(waiting):
                    try:
                        waiting[descriptor].data.send(packet)
                    except BlockingIOError:
                        continue
                    except OSError as error:
                        log.debug("rank %d is gone: %s", waiting[descriptor].rank, error)
                    epoll.unregister(descriptor)
                    del waiting[descriptor]
                if waiting:
                    epoll.poll(min(deadline.remaining_s(), _RETRY_S))


def _try_frame(link: Link, frame: bytes) -> bool:
    try:
        link.data.send(frame)
    except BlockingIOError:
        return False
    except OSError as error:
        raise LinkBroken(link, error) from None
    return True


def _try_memfd(link: Link, memfd: int) -> bool:
    try:
        link.data.send(MEMFD_MARK, (memfd,))
    except BlockingIOError:
        return False
    except OSError as error:
        raise LinkBroken(link, error) from None
    return True

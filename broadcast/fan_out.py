"""The same packets to every peer: first to all that can take them, then to the rest."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tp_runtime.broadcast.deadline import Deadline
    from tp_runtime.broadcast.link import Link

log = logging.getLogger(__name__)

# A packet and the descriptors attached to it.
Part = tuple[bytes, Sequence[int]]

_LONGEST_WAIT_S = 3600.0


class LinkBroken(Exception):
    """A connection ended while something was sent over it."""

    def __init__(self, link: Link, error: OSError) -> None:
        super().__init__(str(error))
        self.link = link
        self.error = error


class LinksFull(Exception):
    """The buffers of these peers stayed full until the deadline."""

    def __init__(self, links: list[Link]) -> None:
        super().__init__(f"ranks {[link.rank for link in links]}")
        self.links = links


class FanOut:
    """Sends to the data connections of all peers; no slow peer delays another.

    Args:
        wake_fd: becomes readable when the channel ends; `check` then raises why.
    """

    def __init__(self, links: Sequence[Link], *, wake_fd: int, check: Callable[[], None]) -> None:
        self._order = list(links)
        self._wake_fd = wake_fd
        self._check = check
        # Per rank: sends that found a full buffer; waits of the second pass.
        self.full = {link.rank: 0 for link in links}
        self.waits = 0

    def send(self, parts: Sequence[Part], deadline: Deadline) -> None:
        """Send all parts to all peers.

        Raises:
            LinkBroken, LinksFull: some peers may have the parts and some not.
        """
        waiting: dict[int, tuple[Link, int]] = {}
        # Wake another peer first each time: the last of a row waits for all wake-ups.
        self._order.append(self._order.pop(0))
        for link in self._order:
            sent = _try_parts(link, parts, 0)
            if sent < len(parts):
                self.full[link.rank] += 1
                waiting[link.data.fileno()] = (link, sent)
        if waiting:
            self._send_rest(waiting, parts, deadline)

    def _send_rest(
        self, waiting: dict[int, tuple[Link, int]], parts: Sequence[Part], deadline: Deadline
    ) -> None:
        with select.epoll() as epoll:
            epoll.register(self._wake_fd, select.EPOLLIN)
            for descriptor in waiting:
                epoll.register(descriptor, select.EPOLLOUT)
            while waiting:
                if deadline.expired():
                    raise LinksFull([link for link, _ in waiting.values()])
                asked_s, started_s = deadline.remaining_s(), time.monotonic()
                self.waits += 1
                events = epoll.poll(min(asked_s, _LONGEST_WAIT_S))
                deadline.woke(slept_from_s=started_s, asked_s=asked_s)
                self._check()
                for descriptor, _ in events:
                    link, sent = waiting[descriptor]
                    sent = _try_parts(link, parts, sent)
                    waiting[descriptor] = (link, sent)
                    if sent == len(parts):
                        epoll.unregister(descriptor)
                        del waiting[descriptor]

    def send_last(self, packet: bytes, deadline: Deadline) -> None:
        """Send to everybody who can still be reached; raises nothing."""
        waiting = {link.data.fileno(): link for link in self._order if not link.left}
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
                    epoll.poll(min(deadline.remaining_s(), _LONGEST_WAIT_S))


def _try_parts(link: Link, parts: Sequence[Part], sent: int) -> int:
    """Send as many parts as the buffer takes; how many are sent in all."""
    while sent < len(parts):
        packet, descriptors = parts[sent]
        try:
            link.data.send(packet, descriptors)
        except BlockingIOError:
            return sent
        except OSError as error:
            raise LinkBroken(link, error) from None
        sent += 1
    return sent

"""The receiving end of the data connection: looks, sleeps until shortly before, spins."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

from tp_runtime.broadcast.pace import Sleeper

if TYPE_CHECKING:
    from collections.abc import Callable

    from tp_runtime.broadcast.pace import Pace
    from tp_runtime.broadcast.sockets import PacketSocket
    from tp_runtime.broadcast.statistics import Counters


# Often enough that the caches keep it, seldom enough that no message is late because of it.
_REHEARSE_EVERY_S = 500e-6


class Inbox:
    """Takes packets as soon as they are there, at the cost in CPU that the wait mode allows.

    Args:
        wake_fd: becomes readable when the channel ends; `check` then raises why.
        rehearse: goes the way of a message that has arrived; called while there is time.
    """

    def __init__(
        self,
        packets: PacketSocket,
        *,
        pace: Pace,
        wake_fd: int,
        check: Callable[[], None],
        rehearse: Callable[[], None],
        counters: Counters,
    ) -> None:
        self._pace = pace
        self._counters = counters
        self._packets = packets
        self._check = check
        self._rehearse = rehearse
        self._sleeper = Sleeper(packets.fileno(), wake_fd)

    def soon(self, limit_s: float) -> memoryview | None:
        """Sleep and spin as planned, at most `limit_s` seconds; None: nothing came meanwhile.

        Raises:
            OSError: the connection is broken.
        """
        started_s = time.monotonic()
        sleep_until_s, spin_until_s = self._pace.plan(started_s)
        limit_s += started_s
        if sleep_until_s > started_s:
            self._counters.waits += 1
            sleep_until_s = min(sleep_until_s, limit_s)
            self._sleeper.sleep(sleep_until_s - started_s)
            woke_s = time.monotonic()
            self._pace.woke(late_s=woke_s - sleep_until_s)
            started_s = woke_s
        if spin_until_s <= started_s:
            return None
        packet = self._spin(min(spin_until_s, limit_s))
        self._counters.spun_s += time.monotonic() - started_s
        self._counters.misses += packet is None
        return packet

    def _spin(self, until_s: float) -> memoryview | None:
        # Looks without the layers of `look`: what a turn costs is what a message waits.
        receive_into, buffer = self._packets.sock.recv_into, self._packets.buffer
        yield_core, clock, check = os.sched_yield, time.monotonic, self._check
        rehearse_s = 0.0
        while (now_s := clock()) < until_s:
            if now_s > rehearse_s:
                self._rehearse()
                rehearse_s = now_s + _REHEARSE_EVERY_S
            try:
                size = receive_into(buffer, 0, socket.MSG_TRUNC)
            except BlockingIOError:
                # Let whoever needs this core have it: a spin that does not yield is the worst
                # neighbour of the rank that it waits for.
                yield_core()
                check()
            except ConnectionResetError:
                return self._packets.look()
            else:
                return self._packets.packet(size)
        return None

    def block(self, timeout_s: float) -> None:
        """Wait in the kernel until something is there or the channel ends."""
        self._counters.waits += 1
        self._sleeper.block(timeout_s)

    def close(self) -> None:
        self._sleeper.close()

"""How far each peer has read, and who takes nothing although messages wait for it."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from typing import TYPE_CHECKING

from tp_runtime.broadcast.deadline import FROZEN_S, Clock
from tp_runtime.broadcast.sockets import seals_of
from tp_runtime.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# A peer further behind than this many messages is late even if its process runs: it does not
# receive. With fewer it may be busy, which is its right, unless it is stopped.
MAX_LAG_MESSAGES = 16
_WORD_BYTES = 8
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Progress:
    """One word per rank in a memfd: the sequence that the rank took last, written by it alone.

    An acknowledgement that costs its sender one store and its reader one load: no packet, no
    system call, no thread woken on rank 0, and nothing unread when a socket is closed. It only
    tells how far a rank is. The slots of a region are used again because of it, see region.py for
    the order of loads and stores which that needs.
    """

    __slots__ = ("_map", "words")

    def __init__(self, descriptor: int, *, world_size: int) -> None:
        """Map a page; the descriptor stays the caller's.

        Raises:
            ProtocolError: it is no memfd, or could shrink under its readers, or has another size.
        """
        size = world_size * _WORD_BYTES
        _check_page(descriptor, size)
        self._map = mmap.mmap(descriptor, size)
        # The sequence that each rank took last; a rank writes its own.
        self.words: memoryview | list[int] = memoryview(self._map).cast("Q")

    def seen(self, rank: int) -> int:
        """Sequence that the rank took last; 0 = none yet."""
        return self.words[rank]

    def close(self) -> None:
        """Give the memory back; what was noted by then stays readable."""
        words = self.words
        if isinstance(words, memoryview):
            self.words = words.tolist()
            words.release()
            self._map.close()


def make_page(world_size: int) -> int:
    """A descriptor of zeroed memory for `Progress` that nobody can resize."""
    descriptor = os.memfd_create("tp_runtime_progress", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, world_size * _WORD_BYTES)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def _check_page(descriptor: int, size: int) -> None:
    if seals_of(descriptor, "progress page") & _SEALS != _SEALS:
        raise ProtocolError("progress page: the memfd is not sealed against resizing")
    got = os.fstat(descriptor).st_size
    if got != size:
        raise ProtocolError(f"progress page: expected {size} bytes, got {got}")


class LagBound:
    """Rank 0's patience with peers that do not take what was published.

    Args:
        timeout_s: how long a peer may take nothing, seconds.
        clock: monotonic seconds; tests inject their own.
    """

    def __init__(
        self, ranks: Iterable[int], *, timeout_s: float, clock: Clock = time.monotonic
    ) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._looked_s = clock()
        # Per rank: what it had taken at the last look, and since when that is so.
        self._taken: dict[int, tuple[int, float]] = dict.fromkeys(ranks, (0, self._looked_s))

    def late(
        self,
        *,
        sent: int,
        taken: Callable[[int], int],
        stopped: Callable[[int], bool],
        tick_s: float,
    ) -> list[int]:
        """Ranks that took nothing for the whole timeout although messages wait for them.

        Args:
            sent: sequence of the last message.
            taken: sequence that a rank took last.
            stopped: whether the process of a rank is stopped; asked only when it is long silent.
            tick_s: how often this is called; a longer gap means that this process was frozen,
                and such time is not counted.
        """
        now_s = self._clock()
        frozen_s = now_s - self._looked_s - tick_s
        self._looked_s = now_s
        late = []
        for rank, (before, since_s) in self._taken.items():
            if frozen_s > FROZEN_S:
                since_s += frozen_s
            seen = taken(rank)  # once: it goes on changing
            behind = sent - seen
            if behind <= 0 or seen != before:
                since_s = now_s
            elif now_s - since_s >= self._timeout_s and (
                behind > MAX_LAG_MESSAGES or stopped(rank)
            ):
                late.append(rank)
            self._taken[rank] = (seen, since_s)
        return late

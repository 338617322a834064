"""Tells which of the other ranks of a group has ended, without asking it."""

from __future__ import annotations

import contextlib
import os
import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PeerWatch"]


class PeerWatch:
    """A pidfd for each peer: readable as soon as the process has ended, also as a zombie.

    Args:
        pids: process id of each TP rank, all seen from the same PID namespace.
        rank: the TP rank of this process, which is not watched.
    """

    def __init__(self, pids: Sequence[int], *, rank: int) -> None:
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}
        self._gone: int | None = None
        for peer, pid in enumerate(pids):
            if peer == rank:
                continue
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._gone = peer
            else:
                self._ranks[fd] = peer
                self._poll.register(fd, select.POLLIN)

    def dead(self) -> int | None:
        """The TP rank of a peer that has ended, or None. Takes about a microsecond."""
        if self._gone is None:
            for fd, _ in self._poll.poll(0):
                self._gone = self._ranks.get(fd)
        return self._gone

    def close(self) -> None:
        """Gives the descriptors back. Idempotent."""
        while self._ranks:
            fd, _ = self._ranks.popitem()
            with contextlib.suppress(KeyError):
                self._poll.unregister(fd)
            os.close(fd)

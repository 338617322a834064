"""Tells which of the other ranks of a group has ended, without asking it."""

from __future__ import annotations

import hashlib
import logging
import os
import select
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["PeerWatch", "watch_peers"]

log = logging.getLogger(__name__)


class PeerWatch:
    """A pidfd for each peer: readable as soon as the process has ended, also as a zombie.

    Args:
        pids: process id of each TP rank, all seen from the same PID namespace.
        rank: the TP rank of this process, which is not watched.
    """

    def __init__(self, pids: Sequence[int], *, rank: int) -> None:
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}
        self._gone: list[int] = []
        self._lock = threading.Lock()
        for peer, pid in enumerate(pids):
            if peer == rank:
                continue
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._gone.append(peer)
            else:
                self._ranks[fd] = peer
                self._poll.register(fd, select.POLLIN)

    def dead(self) -> int | None:
        """The TP rank of the first peer that has ended, or None. Takes about a microsecond."""
        gone = self.all_dead()
        return gone[0] if gone else None

    def all_dead(self) -> list[int]:
        """The TP ranks of the peers that have ended, in the order in which that was seen."""
        with self._lock:  # two threads may not poll at once
            for fd, _ in self._poll.poll(0) if self._ranks else ():
                peer = self._ranks.pop(fd)
                self._poll.unregister(fd)
                os.close(fd)
                self._gone.append(peer)
            return list(self._gone)

    def close(self) -> None:
        """Gives the descriptors back. Idempotent."""
        with self._lock:
            while self._ranks:
                fd, _ = self._ranks.popitem()
                self._poll.unregister(fd)
                os.close(fd)


def watch_peers(exchange: Callable[[torch.Tensor], torch.Tensor], *, rank: int) -> PeerWatch | None:
    """Watches the other ranks of a group, on all ranks or on none of them.

    Args:
        exchange: all-gather of an int64 row [n] to [size, n]; called twice on every rank.
        rank: TP rank of this process.

    Returns:
        None on every rank if a rank cannot see the processes of all others.
    """
    own = torch.tensor([os.getpid(), *_process_numbering()])
    rows = exchange(own)
    watch = None
    if bool((rows[:, 1:] == own[1:]).all()):
        try:
            watch = PeerWatch(rows[:, 0].tolist(), rank=rank)
        except OSError as error:
            log.info("TP rank %d cannot watch its peers: %s", rank, error)
    everyone = bool(exchange(torch.tensor([int(watch is not None)])).all())
    if watch is not None and not everyone:
        watch.close()
        return None
    return watch


def _process_numbering() -> tuple[int, int]:
    """Two numbers that are equal where process ids mean the same processes."""
    host = hashlib.blake2b(Path("/proc/sys/kernel/random/boot_id").read_bytes(), digest_size=7)
    return int.from_bytes(host.digest(), "little"), os.stat("/proc/self/ns/pid").st_ino

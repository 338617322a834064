"""One piece of memory that all ranks of a group map, and that leaves nothing behind.

It is a memfd, which has no place in the file system. Peers open it through /proc while rank 0
holds it; the kernel frees it with the last process that maps it, however the ranks end.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MEMORY_NAME", "share_memory"]

log = logging.getLogger(__name__)

MEMORY_NAME = "tp_runtime_reduce"
"""A label for ``/proc/<pid>/maps``; any number of memories have it."""

_TOKEN_BYTES = 8


def share_memory(
    exchange: Callable[[torch.Tensor], torch.Tensor], *, rank: int, nbytes: int
) -> mmap.mmap | None:
    """Maps ``nbytes`` of zeros on all ranks of a group, or on none of them.

    Args:
        exchange: all-gather of an int64 row [n] to [size, n]; called twice on every rank.
        rank: TP rank of this process. Rank 0 makes the memory.
        nbytes: size, a multiple of 8; 0 on any rank if it cannot take part.

    Returns:
        None on every rank if any rank cannot map the memory.
    """
    memory: mmap.mmap | None = None
    fd = -1
    token = secrets.randbits(63)
    reason = "another rank cannot map it"
    try:
        if rank == 0 and nbytes:
            try:
                fd, memory = _make(nbytes, token)
            except OSError as error:
                reason = f"memfd: {error}"
        offer = exchange(torch.tensor([os.getpid(), fd, token]))[0].tolist()
        if rank != 0 and nbytes and offer[1] >= 0:
            try:
                memory = _attach(offer[0], offer[1], nbytes=nbytes, token=offer[2])
            except OSError as error:
                reason = f"memory of TP rank 0: {error}"
        mapped = exchange(torch.tensor([int(memory is not None)]))
    finally:
        if fd >= 0:
            os.close(fd)
    if memory is None or not bool(mapped.all()):
        log.info("TP rank %d uses no shared memory: %s", rank, reason)
        if memory is not None:
            memory.close()
        return None
    return memory


def _make(nbytes: int, token: int) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes + _TOKEN_BYTES)
        # Of fixed size: memory that shrinks would kill the others with SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        memory = mmap.mmap(fd, nbytes + _TOKEN_BYTES)
    except OSError:
        os.close(fd)
        raise
    memory[nbytes:] = token.to_bytes(_TOKEN_BYTES, "little")
    return fd, memory


def _attach(pid: int, fd: int, *, nbytes: int, token: int) -> mmap.mmap:
    """Maps what another process holds open, and makes sure that it is what was meant.

    In another PID namespace the number means another process.
    """
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(own).st_size
        if found != nbytes + _TOKEN_BYTES:
            raise OSError(f"{found} bytes, expected {nbytes + _TOKEN_BYTES}")
        memory = mmap.mmap(own, found)
    finally:
        os.close(own)
    if memory[nbytes:] != token.to_bytes(_TOKEN_BYTES, "little"):
        memory.close()
        raise OSError("not the memory of this group")
    return memory

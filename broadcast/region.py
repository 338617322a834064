"""Memory that is kept for large bodies: rank 0 writes one there, all peers read it where it lies.

A memfd of its own for each body is made, filled, mapped, faulted in and freed by every rank for
every message, which takes several times as long as to copy what is in it. A region is passed and
mapped once. It has two slots, used in turn. A slot begins with the sequence of the frame whose
body it holds, 0 while it is written; the body follows 64 bytes later.

Rank 0 writes to a slot again only when every peer has noted on the progress page that it took the
message. Its mapping is the only one that can write (F_SEAL_FUTURE_WRITE), so no peer can change
what another reads, and nobody can shrink it under a reader. That rank 0 keeps to this is trusted:
it could send a wrong message as well. A peer checks the sequence before and after it has decoded
the body, so a rank 0 with a defect is an error and not a wrong message; and a body that changes
meanwhile cannot make the decoder leave its bounds, which are those of the frame.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import TYPE_CHECKING

from tp_runtime.broadcast.codec import Message, decode
from tp_runtime.broadcast.sockets import seals_of
from tp_runtime.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOT_HEAD_BYTES = 64
_SLOTS = 2
# A larger body has a memfd of its own, so that what is kept is bounded.
MOST_KEPT_BYTES = 8 << 20
_LEAST_SLOT_BYTES = 512 << 10
_MOST_BYTES = _SLOTS * (MOST_KEPT_BYTES + mmap.PAGESIZE)
# A peer tells by a store that it has read, which must not be seen before its loads are done. This
# processor promises that; where it does not, each large body has a memfd of its own.
IS_ORDERED = os.uname().machine == "x86_64"
_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; not among the names of fcntl
_NO_RESIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class RegionWriter:
    """Rank 0's side."""

    def __init__(self) -> None:
        self._view: memoryview | None = None
        self._slot_bytes = 0
        # By slot: sequence of the frame whose body it holds.
        self._held = [0] * _SLOTS
        self._next = 0
        self._usable = IS_ORDERED
        self._descriptor = -1

    def place(
        self, parts: Sequence[bytes | memoryview], *, length: int, sequence: int, taken: int
    ) -> int | None:
        """Write a body to a free slot.

        Args:
            parts: the body in pieces; length: of all of them.
            sequence: of the frame that will announce it.
            taken: sequence that every peer has taken.

        Returns:
            Offset of the slot in the region, or None: both slots are still being read, or the body
            is larger than what is kept, or this machine has no such regions.
        """
        if not self._usable or length > MOST_KEPT_BYTES:
            return None
        if self._view is None or length > self._slot_bytes - SLOT_HEAD_BYTES:
            self._make(length)
            if self._view is None:
                return None
        slot = self._next
        if self._held[slot] > taken:
            return None
        self._next = (slot + 1) % _SLOTS
        self._held[slot] = sequence
        at = slot * self._slot_bytes
        with self._view[at : at + 8].cast("Q") as word:
            word[0] = 0
            start = at + SLOT_HEAD_BYTES
            for part in parts:
                self._view[start : start + len(part)] = part
                start += len(part)
            word[0] = sequence
        return at

    def take_descriptor(self) -> int:
        """The descriptor of a region that no peer knows yet, for the caller to pass and to close.

        -1: the peers know it.
        """
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor

    def _make(self, length: int) -> None:
        """A larger region in place of the one before, which its readers keep until they read on."""
        self.close()
        slot_bytes = max(_LEAST_SLOT_BYTES, 1 << (length - 1).bit_length()) + mmap.PAGESIZE
        descriptor = os.memfd_create("tp_runtime_region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # now, since a page that cannot be had when it is written to ends the process
            os.posix_fallocate(descriptor, 0, _SLOTS * slot_bytes)
            view = memoryview(mmap.mmap(descriptor, _SLOTS * slot_bytes))
            seals = _NO_RESIZE | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        except OSError:
            # no such seal in this kernel, or no memory for it: a memfd for each body still works
            os.close(descriptor)
            self._usable = False
            return
        self._view, self._slot_bytes, self._descriptor = view, slot_bytes, descriptor
        self._held, self._next = [0] * _SLOTS, 0

    def close(self) -> None:
        _unmap(self._view)
        self._view = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class RegionReader:
    """A peer's side: a region that rank 0 passed; the descriptor stays the caller's.

    Raises:
        ProtocolError: its size could change, or others than rank 0 could write to it.
    """

    def __init__(self, descriptor: int) -> None:
        seals = seals_of(descriptor, "region")
        if seals & _NO_RESIZE != _NO_RESIZE:
            raise ProtocolError("region: the memfd is not sealed against resizing")
        if not seals & (_SEAL_FUTURE_WRITE | fcntl.F_SEAL_WRITE):
            raise ProtocolError("region: the memfd is not sealed against other writers")
        size = os.fstat(descriptor).st_size
        if not 0 < size <= _MOST_BYTES:
            raise ProtocolError(f"region: expected 1 to {_MOST_BYTES} bytes, got {size}")
        self._view = memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ))

    def read(self, offset: int, length: int, *, sequence: int) -> Message:
        """Decode the body of frame `sequence` that lies in the slot at `offset`.

        Raises:
            ProtocolError: there is no such slot, it holds another body, or what it holds is none.
        """
        view = self._view
        if offset % SLOT_HEAD_BYTES or offset + SLOT_HEAD_BYTES + length > len(view):
            raise ProtocolError(
                f"region of {len(view)} bytes: no body of {length} bytes can be at {offset}"
            )
        start = offset + SLOT_HEAD_BYTES
        with view[offset : offset + 8].cast("Q") as word, view[start : start + length] as body:
            if word[0] != sequence:
                raise ProtocolError(
                    f"region: expected the body of frame {sequence} at {offset}, found {word[0]}"
                )
            message = decode(body)
            if word[0] != sequence:
                raise ProtocolError(
                    f"region: the body of frame {sequence} at {offset} was replaced by "
                    f"that of {word[0]} while it was read"
                )
        return message

    def close(self) -> None:
        _unmap(self._view)


def _unmap(view: memoryview | None) -> None:
    if view is not None:
        mapped = view.obj
        view.release()
        if isinstance(mapped, mmap.mmap):
            mapped.close()

"""Packets, descriptors and credentials over Unix sockets."""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tp_runtime.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

# Asked for; the kernel grants at most net.core.wmem_max without privilege.
SEND_BUFFER_BYTES = 1 << 20
# Larger bodies go by memfd: one copy for all peers instead of one for each.
LARGEST_PACKET_BYTES = 256 << 10
# Hard limit of the kernel for one SCM_RIGHTS message.
MAX_DESCRIPTORS = 253
_UCRED = struct.Struct("iII")
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Credentials(NamedTuple):
    """Who is at the other end, as the kernel recorded it; pid 0 = in another pid namespace."""

    pid: int
    uid: int
    gid: int


class PacketSocket:
    """A non-blocking SOCK_SEQPACKET connection."""

    __slots__ = ("buffer", "sock", "view")

    def __init__(self, sock: socket.socket, *, receive_bytes: int = LARGEST_PACKET_BYTES) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.sock = sock
        self.buffer = bytearray(receive_bytes)
        self.view = memoryview(self.buffer)

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def packet_bytes(self) -> int:
        """Largest packet worth sending whole: half a send buffer, so that two always fit."""
        granted = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        return min(LARGEST_PACKET_BYTES, granted // 2 - 4096)

    def send(self, packet: bytes | memoryview, descriptors: Sequence[int] = ()) -> None:
        """Send one packet whole.

        Raises:
            BlockingIOError: the buffer is full; nothing was sent.
            OSError: the other side is gone.
        """
        if descriptors:
            rights = array.array("i", descriptors)
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
            self.sock.sendmsg([packet], ancillary, socket.MSG_NOSIGNAL)
        else:
            self.sock.send(packet, socket.MSG_NOSIGNAL)

    def receive(self) -> memoryview:
        """Receive one packet; the view is valid until the next call. Empty = the other side left.

        Raises:
            BlockingIOError: nothing is there.
            OSError: the connection is broken.
            ProtocolError: the packet is larger than any allowed.
        """
        try:
            size = self.sock.recv_into(self.buffer, 0, socket.MSG_TRUNC)
        except ConnectionResetError:
            # The other side closed with unread packets of ours. That error is reported once and
            # hides what it had sent before; those packets are still in the queue.
            size = self.sock.recv_into(self.buffer, 0, socket.MSG_TRUNC)
        return self.packet(size)

    def packet(self, size: int) -> memoryview:
        """The packet of `size` bytes that was just received into `buffer`."""
        if size > len(self.buffer):
            raise ProtocolError(
                f"packet of {size} bytes, at most {len(self.buffer)} may be sent in one packet"
            )
        return self.view[:size]

    def receive_with_descriptors(self) -> tuple[memoryview, list[int]]:
        """As `receive`, with the descriptors attached to the packet; the caller owns them."""
        try:
            answer = self._receive_message()
        except ConnectionResetError:
            answer = self._receive_message()
        size, ancillary, flags, _ = answer
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            close_all(descriptors)
            raise ProtocolError(f"packet or its descriptors are larger than {len(self.buffer)}")
        return self.view[:size], list(descriptors)

    def _receive_message(self) -> tuple[int, list[tuple[int, int, bytes]], int, object]:
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        return self.sock.recvmsg_into([self.buffer], space, socket.MSG_CMSG_CLOEXEC)

    def shutdown(self) -> None:
        """End both directions; what is in the other side's queue stays readable there."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            # not connected any more: nothing is left to end
            return

    def close(self) -> None:
        self.sock.close()

    def credentials(self) -> Credentials:
        raw = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        return Credentials(*_UCRED.unpack(raw))


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def open_pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process exits; -1 if it cannot be had.

    Raises:
        ProcessLookupError: the process is gone already.
    """
    if pid <= 0:
        return -1
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        # an old kernel or a sandbox without the call: the end of the connection still tells
        return -1


def process_state(pid: int) -> str:
    """ "running", "stopped" or "dead": what to tell about a rank that is late."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "dead"
    letter = status.rpartition(")")[2].split()[0]
    if letter in "Tt":
        return "stopped"
    return "dead" if letter in "ZX" else "running"


def write_memfd(parts: Sequence[bytes | memoryview]) -> int:
    """A sealed memfd that holds the parts in a row; nobody can change it after this."""
    descriptor = os.memfd_create("tp_runtime", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                view = view[os.write(descriptor, view) :]
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def seals_of(descriptor: int, what: str) -> int:
    """The seals of a memfd that came over a socket. Raises ProtocolError: it is none."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError(f"{what}: the descriptor is no memfd ({error})") from None


def read_memfd(descriptor: int, length: int) -> mmap.mmap:
    """Map a memfd that must be sealed and hold exactly `length` bytes.

    Raises:
        ProtocolError: it is not sealed (its sender could change or shrink it under the reader,
            which kills the reader with SIGBUS) or has another size.
    """
    if seals_of(descriptor, "large body") & _SEALS != _SEALS:
        raise ProtocolError("large body: the memfd is not sealed against writing and resizing")
    size = os.fstat(descriptor).st_size
    if size != length or size == 0:
        raise ProtocolError(f"large body: the memfd has {size} bytes, header says {length}")
    return mmap.mmap(descriptor, length, prot=mmap.PROT_READ)

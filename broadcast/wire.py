"""Layout of a frame: a 32-byte header, a MessagePack body, and a CRC-32 if its flag is set.

All numbers are little-endian.

| offset | size | field       | meaning                                                        |
|--------|------|-------------|----------------------------------------------------------------|
| 0      | 2    | magic       | 0x5054, "TP" in memory                                         |
| 2      | 1    | version     | of this layout, 1                                              |
| 3      | 1    | kind        | `Kind`                                                         |
| 4      | 2    | flags       | `Flag`                                                         |
| 6      | 2    | epoch       | low 16 bits of the run's restart count                         |
| 8      | 4    | length      | bytes of the body                                              |
| 12     | 4    | interval_us | expected time to the sender's next message; 0 = unknown        |
| 16     | 8    | sequence    | of this direction of this socket, from 1, without gaps         |
| 24     | 8    | sent_ns     | CLOCK_MONOTONIC of the sender                                  |

One frame is one SOCK_SEQPACKET packet. A body with Flag.MEMFD is not in the packet: the next
packet is the single byte MEMFD_MARK with a sealed memfd attached, which holds `length` bytes. With
Flag.REGION the body lies in a region (see region.py) and the packet has its offset there instead;
with both flags the memfd that follows is a new region, which takes the place of the one before.
"""

from __future__ import annotations

import enum
import struct
import time
import zlib
from typing import NamedTuple

from tp_runtime.errors import ProtocolError

MAGIC = 0x5054
VERSION = 1
HEADER = struct.Struct("<HBBHHIIQQ")
HEADER_BYTES = HEADER.size
CHECKSUM = struct.Struct("<I")
OFFSET = struct.Struct("<Q")
MEMFD_MARK = b"M"
# The header of the frame of every step, a MESSAGE without flags: its first 8 bytes are one number
# that is known before (`plain_first`), then length, interval_us, sequence and sent_ns.
PLAIN_HEADER = struct.Struct("<QIIQQ")
MAX_INTERVAL_S = 4294.0
# Both sides read one clock, so a send time ahead of it by more than this is not one of ours.
FUTURE_NS = 1_000_000_000


class Kind(enum.IntEnum):
    """What a frame is. 1-15 travel on the data socket, the rest on the control socket."""

    MESSAGE = 1
    CONFIRM = 2
    DECISION = 3
    CLOSE = 4
    HELLO = 16
    WELCOME = 17
    REFUSED = 18
    READY = 19
    HEARTBEAT = 20
    PING = 21
    ACK = 22
    ABORT = 23
    CLOSING = 24
    BYE = 25
    BYE_OK = 26
    LEFT = 27


class Flag(enum.IntFlag):
    MEMFD = 1
    CHECKSUM = 2
    REGION = 4


# Plain numbers for the hot path: building an enum member costs more than the rest of a check.
_KINDS: dict[int, Kind] = {int(kind): kind for kind in Kind}
_MEMFD = int(Flag.MEMFD)
_CHECKSUM = int(Flag.CHECKSUM)
_REGION = int(Flag.REGION)
_OUTSIDE = _MEMFD | _REGION
_KNOWN_FLAGS = _MEMFD | _CHECKSUM | _REGION


class Header(NamedTuple):
    """The checked header of a frame."""

    kind: Kind
    flags: int
    length: int
    interval_us: int
    sequence: int
    sent_ns: int

    @property
    def outside(self) -> bool:
        """The body is not in the packet."""
        return bool(self.flags & _OUTSIDE)

    @property
    def with_memfd(self) -> bool:
        """A memfd follows."""
        return bool(self.flags & _MEMFD)

    @property
    def in_region(self) -> bool:
        return bool(self.flags & _REGION)


def pack_frame(
    kind: Kind,
    body: bytes = b"",
    *,
    sequence: int,
    epoch: int,
    interval_us: int = 0,
    outside: int = 0,
    outside_bytes: int = 0,
    checksum: bool = False,
    sent_ns: int | None = None,
) -> bytes:
    """Build one packet.

    Args:
        interval_us: expected time to the next message, below 2**32.
        outside: Flag.MEMFD, Flag.REGION or both, if the body is not in the packet; `body` is then
            empty or the packed offset in the region.
        outside_bytes: length of such a body.
        sent_ns: send time to write; now if None.
    """
    flags = int(outside)
    length = outside_bytes if flags else len(body)
    if checksum:
        flags |= _CHECKSUM
    head = HEADER.pack(
        MAGIC,
        VERSION,
        kind,
        flags,
        epoch & 0xFFFF,
        length,
        interval_us,
        sequence,
        time.monotonic_ns() if sent_ns is None else sent_ns,
    )
    frame = head + body
    if checksum:
        frame += CHECKSUM.pack(zlib.crc32(frame))
    return frame


def plain_first(epoch: int) -> int:
    """The first 8 bytes of a MESSAGE without flags."""
    head = HEADER.pack(MAGIC, VERSION, Kind.MESSAGE, 0, epoch & 0xFFFF, 0, 0, 0, 0)
    return int.from_bytes(head[:8], "little")


def parse_frame(
    packet: memoryview, *, sequence: int, epoch: int | None, now_ns: int | None = None
) -> tuple[Header, memoryview]:
    """Check one packet and split it.

    Args:
        packet: exactly the bytes received.
        sequence: the number that this frame must have.
        epoch: restart count that the sender must have; None while a handshake is checking it.
        now_ns: CLOCK_MONOTONIC at arrival; read here if None.

    Returns:
        The header, and the body as a view of `packet`: empty if it is in a memfd, the packed offset
        if it is in a region.

    Raises:
        ProtocolError: any field is not what it must be; the message names the field.
    """
    size = len(packet)
    if size < HEADER_BYTES:
        raise ProtocolError(f"frame of {size} bytes: a header alone has {HEADER_BYTES}")
    magic, version, number, flags, low_epoch, length, interval_us, got, sent_ns = (
        HEADER.unpack_from(packet)
    )
    if magic != MAGIC:
        raise ProtocolError(f"magic: expected {MAGIC:#06x}, got {magic:#06x}")
    if version != VERSION:
        raise ProtocolError(
            f"protocol version: expected {VERSION}, got {version}; "
            "install the same tp-runtime on every rank"
        )
    kind = _KINDS.get(number)
    if kind is None:
        raise ProtocolError(f"kind: {number} is unknown to protocol version {VERSION}")
    if flags & ~_KNOWN_FLAGS:
        raise ProtocolError(f"flags: {flags:#06x} has bits unknown to protocol version {VERSION}")
    if epoch is not None and low_epoch != epoch & 0xFFFF:
        raise ProtocolError(f"epoch: expected {epoch & 0xFFFF}, got {low_epoch}")
    end = size
    if flags & _CHECKSUM:
        end -= CHECKSUM.size
        if end < HEADER_BYTES:
            raise ProtocolError(f"frame of {size} bytes: too short for its checksum")
        expected = CHECKSUM.unpack_from(packet, end)[0]
        actual = zlib.crc32(packet[:end])
        if actual != expected:
            raise ProtocolError(f"checksum: expected {expected:#010x}, got {actual:#010x}")
    in_packet = length
    if flags & _OUTSIDE:
        in_packet = OFFSET.size if flags & _REGION else 0
    if end - HEADER_BYTES != in_packet:
        raise ProtocolError(
            f"length: header says {in_packet} bytes of body, packet has {end - HEADER_BYTES}"
        )
    if got != sequence:
        raise ProtocolError(f"sequence: expected {sequence}, got {got} ({kind.name})")
    if now_ns is None:
        now_ns = time.monotonic_ns()
    if sent_ns > now_ns + FUTURE_NS:
        raise ProtocolError(
            f"sent_ns: {sent_ns} is {(sent_ns - now_ns) / 1e9:.1f} s ahead of this host's clock"
        )
    header = Header(kind, flags, length, interval_us, got, sent_ns)
    return header, packet[HEADER_BYTES:end]

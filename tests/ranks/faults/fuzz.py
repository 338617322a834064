"""What a hostile rank with the right uid sends: seeded, from noise to almost valid frames."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tp_runtime.broadcast.codec import encode
from tp_runtime.broadcast.sockets import MAX_DESCRIPTORS, write_memfd
from tp_runtime.broadcast.wire import MEMFD_MARK, OFFSET, Flag, Kind, pack_frame

if TYPE_CHECKING:
    from collections.abc import Callable

EPOCH = 7
MOST_BYTES = 1 << 20
# What rank 0 says in golden frames; a peer may return nothing else from a frame with a checksum.
GOLDEN_MESSAGES: tuple[Any, ...] = ("step", {"step": 1, "slots": [1, 2, 3]}, b"\x00" * 40, None)
LARGE_MESSAGE = b"L" * 400_000
TO_ROOT = (Kind.ACK, Kind.PING, Kind.ABORT, Kind.BYE)
TO_PEERS = (Kind.HEARTBEAT, Kind.ABORT, Kind.LEFT, Kind.CLOSING, Kind.BYE_OK)
_DATA = (Kind.MESSAGE, Kind.CONFIRM, Kind.DECISION, Kind.CLOSE)


@dataclass(kw_only=True)
class Shot:
    """Packets for one kind of socket, each with descriptors to attach."""

    on: str
    packets: list[bytes]
    descriptors: list[list[int]] = field(default_factory=list)

    def fire(self, sock: socket.socket) -> None:
        for number, packet in enumerate(self.packets):
            attached = self.descriptors[number] if number < len(self.descriptors) else []
            try:
                if attached:
                    socket.send_fds(sock, [packet], attached, socket.MSG_DONTWAIT)
                else:
                    sock.send(packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:
                # refused by the other side already, or too large for the kernel
                break

    def close(self) -> None:
        for attached in self.descriptors:
            for descriptor in attached:
                os.close(descriptor)


# Extension type -1, which msgpack itself takes for a point of time. A number may come out.
TIMESTAMPS = [b"\xd6\xff" + bytes(4), b"\xd7\xff" + bytes(8), b"\xc7\x0c\xff" + bytes(12)]


def hostile_bodies() -> list[bytes]:
    """MessagePack that decodes to nothing that may travel, or tries to make that expensive."""
    bodies = [
        # extension types that are not known, integer arrays that are none
        b"\xd4\x05\x00",
        b"\xd4\xff\x00",
        *TIMESTAMPS,
        b"\xc7\x00\x01",
        b"\xc7\x04\x01\x63\x01\x00\x00",
        *(_array_body(size) for size in (1, 1 << 16, 1 << 31, (1 << 32) - 1)),
        # keys that are no str, text that is no UTF-8, trailing bytes, an unused code, nothing
        b"\x81\x01\x02",
        b"\x81\x91\x01\x02",
        b"\x81\xc4\x01k\x02",
        b"\xa2\xff\xfe",
        b"\xc0\xc0",
        b"\xc1",
        b"",
    ]
    for size in (1 << 20, 1 << 28, (1 << 32) - 1):
        huge = struct.pack(">I", size)
        # declared lengths far beyond the body: array, map, str, bin, ext
        bodies += [code + huge + bytes(20) for code in (b"\xdd", b"\xdf", b"\xdb", b"\xc6")]
        bodies += [b"\xc9" + huge + b"\x01" + bytes(20), (b"\xdd" + huge) * 1000]
    for depth in (66, 600, 1020, 60_000):
        bodies += [b"\x91" * depth + b"\xc0", b"\x81\xa1k" * depth + b"\xc0"]
    return bodies


def _array_body(size: int) -> bytes:
    """An integer array with a shape that its elements do not fill."""
    array = struct.pack("<BBH4I", 3, 4, 0, size, size, size, size)
    return b"\xc7" + bytes([len(array)]) + b"\x01" + array


class Fuzzer:
    """One hostile rank.

    Args:
        to_root: the victim is rank 0, which reads control connections only.
        checksum: frames carry one, so that a damaged body cannot pass for another message.
    """

    def __init__(self, seed: int, *, to_root: bool, checksum: bool) -> None:
        self.source = random.Random(seed)
        self._to_root = to_root
        self._checksum = checksum

    def shot(self) -> Shot:
        makers: list[Callable[[], Shot]] = [
            self._noise,
            self._flipped,
            self._flipped,
            self._cut,
            self._hostile_fields,
            self._odd_descriptors,
            self._out_of_turn,
        ]
        if not self._checksum:  # with one, a body is what its sender meant, however odd
            makers.append(self._hostile_body)
        if not self._to_root:
            makers += [self._memfd, self._memfd, self._region, self._region]
        return self.source.choice(makers)()

    # valid frames ----------------------------------------------------------------------------

    def _on(self) -> str:
        """What rank 0 gets on a data connection it must not even look at."""
        return self.source.choice(["control", "data"])

    def _frame(self, kind: Kind, body: bytes = b"", *, sequence: int = 1, **fields: Any) -> bytes:
        return pack_frame(
            kind, body, sequence=sequence, epoch=EPOCH, checksum=self._checksum, **fields
        )

    def golden(self, on: str) -> bytes:
        if on == "data":
            kind = self.source.choice(_DATA)
            message: Any = self.source.choice(GOLDEN_MESSAGES)
            if kind is Kind.DECISION:
                message = {"sequence": 1, "committed": True}
            return self._frame(kind, b"" if kind is Kind.CLOSE else encode(message))
        kind = self.source.choice(TO_ROOT if self._to_root else TO_PEERS)
        return self._frame(kind, encode(self._fields(kind)))

    def _fields(self, kind: Kind) -> dict[str, Any]:
        known: dict[Kind, dict[str, Any]] = {
            Kind.ACK: {"sequence": 1, "ok": True, "detail": ""},
            Kind.ABORT: {"rank": 1, "reason": "hostile"},
            Kind.LEFT: {"rank": 2},
        }
        return known.get(kind, {})

    # and what is made of them ----------------------------------------------------------------

    def _noise(self) -> Shot:
        size = self.source.choice([0, 1, 31, 32, 33, 100, 5000, 100_000, 300_000])
        return Shot(on=self._on(), packets=[self.source.randbytes(size)])

    def _flipped(self) -> Shot:
        on = self._on()
        frame = bytearray(self.golden(on))
        for _ in range(self.source.choice([1, 1, 1, 2, 8])):
            frame[self.source.randrange(len(frame))] ^= 1 << self.source.randrange(8)
        return Shot(on=on, packets=[bytes(frame)])

    def _cut(self) -> Shot:
        on = self._on()
        frame = self.golden(on)
        if self.source.random() < 0.5:
            frame = frame[: self.source.randrange(len(frame))]
        else:
            frame += self.source.randbytes(self.source.randrange(1, 50))
        return Shot(on=on, packets=[frame])

    def _hostile_body(self) -> Shot:
        on = self._on()
        kind = Kind.MESSAGE if on == "data" else (Kind.ACK if self._to_root else Kind.ABORT)
        return Shot(on=on, packets=[self._frame(kind, self.hostile_msgpack())])

    def hostile_msgpack(self) -> bytes:
        return self.source.choice(hostile_bodies())

    def _hostile_fields(self) -> Shot:
        """Control frames with fields that are missing, of another type, or out of any range."""
        kind = self.source.choice(TO_ROOT if self._to_root else TO_PEERS)
        values: list[Any] = [None, True, -1, 1 << 63, 1.5, "x", "y" * 100_000, b"z", [], {}, [[[]]]]
        body: Any = self._fields(kind)
        for name in list(body):
            change = self.source.random()
            if change < 0.3:
                del body[name]
            elif change < 0.8:
                body[name] = self.source.choice(values)
        if self.source.random() < 0.2:
            body = self.source.choice([None, 1, "text", [1, 2]])
        return Shot(on="control", packets=[self._frame(kind, encode(body))])

    def _odd_descriptors(self) -> Shot:
        """Frames with descriptors that nobody asked for."""
        on = self._on()
        count = self.source.choice([1, 2, 30, MAX_DESCRIPTORS])
        frames = [self.golden(on) for _ in range(self.source.choice([1, 3]))]
        return Shot(
            on=on, packets=frames, descriptors=[self.descriptors(count) for _ in range(len(frames))]
        )

    def _out_of_turn(self) -> Shot:
        """Frames of the other socket, of the handshake, again and again, of a wrong number."""
        on = self._on()
        other = "control" if on == "data" else "data"
        choice = self.source.randrange(4)
        if choice == 0:
            return Shot(on=on, packets=[self.golden(other)])
        if choice == 1:
            kind = self.source.choice([Kind.HELLO, Kind.WELCOME, Kind.READY, Kind.REFUSED])
            return Shot(on=on, packets=[self._frame(kind, encode({"rank": 1}))])
        if choice == 2:
            return Shot(on=on, packets=[self.golden(on)] * 5)
        sequence = self.source.choice([0, 2, 1 << 32, (1 << 64) - 1])
        kind = Kind.MESSAGE if on == "data" else Kind.HEARTBEAT
        return Shot(on=on, packets=[self._frame(kind, b"\xc0", sequence=sequence)])

    def _memfd(self) -> Shot:
        """A large message that is not what its header and mark say."""
        body = encode(LARGE_MESSAGE)
        length = len(body)
        mark = MEMFD_MARK
        descriptors = [write_memfd([body])]
        choice = self.source.randrange(9)
        if choice == 0:
            length = self.source.choice([0, 1, length - 1, length + 1, MOST_BYTES, (1 << 32) - 1])
        elif choice == 1:
            mark = self.source.choice([b"", b"X", MEMFD_MARK * 2, b"\x00" * 1000])
        elif choice == 2:
            descriptors = _closed(descriptors)
        elif choice == 3:
            descriptors = [*_closed(descriptors), *self.descriptors(1)]
        elif choice == 4:
            descriptors += self.descriptors(self.source.choice([1, MAX_DESCRIPTORS - 1]))
        elif choice == 5:
            descriptors = [*_closed(descriptors), _sparse(self.source.choice([length, 1 << 40]))]
        elif choice == 6:
            flags = Flag.MEMFD if self.source.random() < 0.5 else Flag(0)
            small = bytearray(self._frame(Kind.MESSAGE, b"\xc0"))
            small[4] |= int(flags)
            return Shot(on="data", packets=[bytes(small), mark], descriptors=[[], descriptors])
        elif choice == 7:
            # the mark alone, and twice
            return Shot(on="data", packets=[mark, mark], descriptors=[descriptors])
        frame = self._frame(Kind.MESSAGE, outside=Flag.MEMFD, outside_bytes=length)
        return Shot(on="data", packets=[frame, mark], descriptors=[[], descriptors])

    def _region(self) -> Shot:
        """A region that is not what its frame says, or one that was never passed."""
        body, choose = encode(LARGE_MESSAGE), self.source.choice
        offset, word, length = choose([0, 64, 4096]), 1, len(body)
        said, flags = offset, Flag.REGION | Flag.MEMFD
        choice = self.source.randrange(6)
        if choice == 0:
            said = choose([8, 1 << 20, 1 << 40, (1 << 64) - 64])
        elif choice == 1:
            word = choose([0, 2, (1 << 64) - 1])
        elif choice == 2:
            length = choose([0, 1, length - 1, length + 1, (1 << 32) - 1])
        elif choice == 3:
            flags = Flag.REGION
        content = bytes(offset) + struct.pack("<Q", word) + bytes(56) + body
        descriptors = [write_memfd([content])]
        if choice == 4:
            size = choose([1, len(content), 1 << 24, 1 << 40])
            descriptors = [*_closed(descriptors), _sparse(size)]
        elif choice == 5:
            descriptors = [*_closed(descriptors), *self.descriptors(1)]
        packed = OFFSET.pack(said)
        frame = self._frame(Kind.MESSAGE, packed, outside=flags, outside_bytes=length)
        return Shot(on="data", packets=[frame, MEMFD_MARK], descriptors=[[], descriptors])

    def descriptors(self, count: int) -> list[int]:
        """Descriptors of all kinds."""
        made: list[int] = []
        while len(made) < count:
            choice = self.source.randrange(5)
            if choice == 0:
                made += os.pipe()
            elif choice == 1:
                made.append(os.open(os.devnull, os.O_RDWR))
            elif choice == 2:
                made.append(os.memfd_create("unsealed"))
            elif choice == 3:
                made += [sock.detach() for sock in socket.socketpair()]
            else:
                made.append(os.pidfd_open(os.getpid()))
        return [*made[:count], *_closed(made[count:])]


def _closed(descriptors: list[int]) -> list[int]:
    for descriptor in descriptors:
        os.close(descriptor)
    return []


def _sparse(size: int) -> int:
    """A sealed memfd without a page behind it."""
    descriptor = os.memfd_create("sparse", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor

"""The bytes of a frame, and that nothing else than them is taken for one."""

from __future__ import annotations

import pytest

from tp_runtime.broadcast.codec import encode
from tp_runtime.broadcast.wire import (
    HEADER_BYTES,
    OFFSET,
    PLAIN_HEADER,
    Flag,
    Kind,
    pack_frame,
    parse_frame,
    plain_first,
)
from tp_runtime.errors import ProtocolError

SEED = 20261129
NOW_NS = 5_000_000_000


def frame(*, checksum: bool = False, body: bytes = b"\xa3abc") -> bytes:
    return pack_frame(
        Kind.MESSAGE,
        body,
        sequence=7,
        epoch=3,
        interval_us=1000,
        checksum=checksum,
        sent_ns=NOW_NS,
    )


def parse(packet: bytes, *, sequence: int = 7, epoch: int | None = 3) -> tuple[object, bytes]:
    header, body = parse_frame(memoryview(packet), sequence=sequence, epoch=epoch, now_ns=NOW_NS)
    return header, bytes(body)


def test_golden_frame() -> None:
    expected = bytes.fromhex(
        "5450"  # magic
        "01"  # version
        "01"  # MESSAGE
        "0000"  # flags
        "0300"  # epoch
        "04000000"  # length
        "e8030000"  # 1000 us to the next message
        "0700000000000000"  # sequence
        "00f2052a01000000"  # sent_ns
        "a3616263"  # "abc" in MessagePack
    )
    assert frame() == expected
    assert HEADER_BYTES == 32


@pytest.mark.parametrize("checksum", [False, True])
def test_round_trip(checksum: bool) -> None:
    header, body = parse_frame(
        memoryview(frame(checksum=checksum)), sequence=7, epoch=3, now_ns=NOW_NS
    )
    assert header.kind is Kind.MESSAGE
    assert (header.length, header.interval_us, header.sequence) == (4, 1000, 7)
    assert header.sent_ns == NOW_NS
    assert not header.outside
    assert bytes(body) == encode("abc")


def test_a_body_in_a_memfd_is_not_in_the_packet() -> None:
    packet = pack_frame(
        Kind.CONFIRM, sequence=1, epoch=0, outside=Flag.MEMFD, outside_bytes=1 << 20
    )
    header, body = parse_frame(memoryview(packet), sequence=1, epoch=0)
    assert header.with_memfd
    assert not header.in_region
    assert header.length == 1 << 20
    assert len(body) == 0
    with pytest.raises(ProtocolError, match="length"):
        parse_frame(memoryview(packet + b"x"), sequence=1, epoch=0)


def test_of_a_body_in_a_region_the_packet_has_the_offset() -> None:
    packet = pack_frame(
        Kind.MESSAGE,
        OFFSET.pack(4096),
        sequence=1,
        epoch=0,
        outside=Flag.REGION,
        outside_bytes=1 << 20,
    )
    header, body = parse_frame(memoryview(packet), sequence=1, epoch=0)
    assert header.in_region
    assert not header.with_memfd
    assert header.length == 1 << 20
    assert OFFSET.unpack(body) == (4096,)
    for wrong in (packet[:-1], packet + b"x", packet[:HEADER_BYTES]):
        with pytest.raises(ProtocolError, match="length: header says 8 bytes"):
            parse_frame(memoryview(wrong), sequence=1, epoch=0)


@pytest.mark.parametrize("checksum", [False, True])
def test_every_truncation_and_trailing_byte_is_refused(checksum: bool) -> None:
    packet = frame(checksum=checksum)
    for end in range(len(packet)):
        with pytest.raises(ProtocolError):
            parse(packet[:end])
    with pytest.raises(ProtocolError):
        parse(packet + b"\x00")


def test_with_a_checksum_every_flipped_bit_is_refused() -> None:
    packet = frame(checksum=True)
    for bit in range(len(packet) * 8):
        damaged = bytearray(packet)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            parse(bytes(damaged))


def test_without_one_every_flipped_bit_that_decides_how_a_frame_is_read_is_refused() -> None:
    packet = frame()
    undecided = {*range(12, 16), *range(24, 29), *range(32, len(packet))}
    for byte in sorted(set(range(len(packet))) - undecided):
        for bit in range(8):
            damaged = bytearray(packet)
            damaged[byte] ^= 1 << bit
            if byte == 3 and damaged[3] in list(Kind):
                # another known kind: the channel's state decides whether it may come now
                continue
            with pytest.raises(ProtocolError):
                parse(bytes(damaged))


@pytest.mark.parametrize(
    ("at", "value", "named"),
    [
        (0, b"\x00", "magic"),
        (2, b"\x02", "protocol version: expected 1, got 2"),
        (3, b"\x63", "kind: 99"),
        (4, b"\x80", "flags"),
        (6, b"\x04", "epoch: expected 3, got 4"),
        (8, b"\x05", "length"),
        (16, b"\x08", "sequence: expected 7, got 8"),
        (28, b"\xff", "sent_ns"),
    ],
)
def test_the_error_names_the_field(at: int, value: bytes, named: str) -> None:
    packet = frame()
    with pytest.raises(ProtocolError, match=named):
        parse(packet[:at] + value + packet[at + 1 :])


def test_a_handshake_reads_frames_of_any_epoch() -> None:
    header, _ = parse(frame(), epoch=None)
    assert header is not None


def test_the_plain_frame_is_what_pack_frame_makes() -> None:
    made = PLAIN_HEADER.pack(plain_first(3), 3, 1000, 7, NOW_NS) + b"abc"
    same = pack_frame(Kind.MESSAGE, b"abc", sequence=7, epoch=3, interval_us=1000, sent_ns=NOW_NS)
    assert made == same

"""Large bodies in a region that is kept: when a slot is used again, and what a peer refuses."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from typing import TYPE_CHECKING

import pytest

from tp_runtime.broadcast import region
from tp_runtime.broadcast.codec import decode, encode, encode_parts
from tp_runtime.broadcast.region import MOST_KEPT_BYTES, RegionReader, RegionWriter
from tp_runtime.broadcast.sockets import write_memfd
from tp_runtime.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_RESIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.fixture(autouse=True)
def ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested here in one process holds on every processor."""
    monkeypatch.setattr(region, "IS_ORDERED", True)


@pytest.fixture
def writer() -> Iterator[RegionWriter]:
    one = RegionWriter()
    yield one
    one.close()


def place(writer: RegionWriter, message: object, *, sequence: int, taken: int) -> int | None:
    parts = encode_parts(message)
    return writer.place(parts, length=sum(map(len, parts)), sequence=sequence, taken=taken)


def body(number: int, size: int = 300_000) -> bytes:
    return number.to_bytes(8, "little") * (size // 8)


def length_of(message: object) -> int:
    return len(encode(message))


def passed(writer: RegionWriter) -> RegionReader:
    descriptor = writer.take_descriptor()
    try:
        return RegionReader(descriptor)
    finally:
        os.close(descriptor)


def test_a_slot_is_used_again_only_when_every_peer_has_taken_what_was_in_it(
    writer: RegionWriter,
) -> None:
    first = place(writer, body(1), sequence=1, taken=0)
    second = place(writer, {"k": body(2)}, sequence=5, taken=0)
    assert first is not None
    assert second is not None
    assert first != second
    reader = passed(writer)
    assert writer.take_descriptor() == -1
    # a peer that has taken nothing yet finds both
    assert place(writer, body(3), sequence=6, taken=0) is None
    assert reader.read(first, length_of(body(1)), sequence=1) == body(1)
    assert place(writer, body(3), sequence=6, taken=4) == first
    assert reader.read(second, length_of({"k": body(2)}), sequence=5) == {"k": body(2)}
    assert reader.read(first, length_of(body(3)), sequence=6) == body(3)
    with pytest.raises(ProtocolError, match="the body of frame 1 at 0, found 6"):
        reader.read(first, length_of(body(1)), sequence=1)
    reader.close()


def test_a_larger_body_gets_a_larger_region_and_the_largest_none(writer: RegionWriter) -> None:
    small = place(writer, body(1), sequence=1, taken=0)
    before = passed(writer)
    large = body(2, 3 << 20)
    at = place(writer, large, sequence=2, taken=0)
    assert at is not None
    assert small is not None
    after = passed(writer)
    assert after.read(at, length_of(large), sequence=2) == large
    # its readers keep what they have until they read on
    assert before.read(small, length_of(body(1)), sequence=1) == body(1)
    assert place(writer, body(3, MOST_KEPT_BYTES + 8), sequence=3, taken=2) is None
    before.close()
    after.close()


def test_no_region_where_the_processor_or_the_kernel_has_not_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(region, "IS_ORDERED", False)
    assert place(RegionWriter(), body(1), sequence=1, taken=0) is None
    monkeypatch.setattr(region, "IS_ORDERED", True)
    monkeypatch.setattr(region, "_SEAL_FUTURE_WRITE", 1 << 20)
    before = sorted(os.listdir("/proc/self/fd"))
    writer = RegionWriter()
    assert place(writer, body(1), sequence=1, taken=0) is None
    assert place(writer, body(1), sequence=2, taken=1) is None
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_no_peer_can_write_to_a_region(writer: RegionWriter) -> None:
    place(writer, body(1), sequence=1, taken=0)
    descriptor = writer.take_descriptor()
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, 4096)
        with pytest.raises(PermissionError):
            os.write(descriptor, b"x")
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def raw_region(seals: int, content: bytes = bytes(4096)) -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(descriptor, content)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize(
    ("seals", "content", "match"),
    [
        (fcntl.F_SEAL_WRITE, bytes(4096), "not sealed against resizing"),
        (NO_RESIZE, bytes(4096), "not sealed against other writers"),
        (NO_RESIZE | fcntl.F_SEAL_WRITE, b"", "expected 1 to [0-9]+ bytes, got 0"),
    ],
)
def test_a_region_that_could_hurt_its_reader_is_refused(
    seals: int, content: bytes, match: str
) -> None:
    descriptor = raw_region(seals, content)
    try:
        with pytest.raises(ProtocolError, match=match):
            RegionReader(descriptor)
    finally:
        os.close(descriptor)


def test_a_body_outside_of_its_region_is_refused() -> None:
    packed = encode([1, 2])
    descriptor = write_memfd([struct.pack("<Q", 1), bytes(56), packed])
    try:
        reader = RegionReader(descriptor)
    finally:
        os.close(descriptor)
    assert reader.read(0, len(packed), sequence=1) == [1, 2]
    for offset, length in ((0, len(packed) + 1), (64, 1), (8, 1), (1 << 63, 1), (0, 1 << 32)):
        with pytest.raises(ProtocolError, match="can be at"):
            reader.read(offset, length, sequence=1)
    with pytest.raises(ProtocolError, match="cannot be decoded"):
        reader.read(0, len(packed) - 1, sequence=1)
    reader.close()


def test_a_body_that_is_replaced_while_it_is_read_is_no_message(
    writer: RegionWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = place(writer, body(1), sequence=1, taken=0)
    assert at is not None
    reader = passed(writer)

    def decode_slowly(view: memoryview) -> object:
        place(writer, body(2), sequence=2, taken=9)
        place(writer, body(3), sequence=3, taken=9)
        return decode(view)

    monkeypatch.setattr(region, "decode", decode_slowly)
    with pytest.raises(ProtocolError, match="was replaced by that of 3 while it was read"):
        reader.read(at, length_of(body(1)), sequence=1)
    reader.close()

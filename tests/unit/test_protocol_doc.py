"""docs/protocol.md says what the code does."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tp_runtime.broadcast.codec import decode, encode
from tp_runtime.broadcast.wire import HEADER, OFFSET, Flag, Kind, pack_frame, parse_frame

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text()
ROWS = re.findall(r"^\| ([A-Z].*?) \| ([0-9a-f]{64,}) \|$", TEXT, flags=re.MULTILINE)

frame = partial(pack_frame, epoch=2, sent_ns=1_000_000_000)
FRAMES = [
    frame(Kind.MESSAGE, encode([10001, 3, 99, 20003]), sequence=7, interval_us=8000),
    frame(
        Kind.MESSAGE,
        encode({"ids": np.array([1, -1], dtype=np.int32)}),
        sequence=8,
        interval_us=8000,
    ),
    frame(
        Kind.CONFIRM,
        encode({"plan": b"\x01\x02"}),
        sequence=9,
        interval_us=30_000_000,
        checksum=True,
    ),
    frame(Kind.DECISION, encode({"sequence": 9, "committed": True}), sequence=10),
    frame(Kind.MESSAGE, sequence=11, outside=Flag.MEMFD, outside_bytes=1 << 20),
    frame(
        Kind.MESSAGE,
        OFFSET.pack(4096),
        sequence=11,
        outside=Flag.REGION | Flag.MEMFD,
        outside_bytes=1 << 20,
    ),
    frame(Kind.MESSAGE, OFFSET.pack(4096), sequence=11, outside=Flag.REGION, outside_bytes=1 << 20),
    frame(Kind.CLOSE, sequence=12),
    frame(Kind.ACK, encode({"sequence": 9, "ok": True, "detail": ""}), sequence=2),
]


def test_the_table_of_golden_frames_is_read() -> None:
    assert len(ROWS) == len(FRAMES)


@pytest.mark.parametrize(("row", "expected"), list(zip(ROWS, FRAMES, strict=True)))
def test_golden_frames(row: tuple[str, str], expected: bytes) -> None:
    what, dumped = row
    golden = bytes.fromhex(dumped)
    assert golden == expected, what
    sequence = re.search(r"sequence (\d+)(?!.*sequence)", what)
    assert sequence is not None
    header, body = parse_frame(memoryview(golden), sequence=int(sequence[1]), epoch=2)
    assert what.startswith(header.kind.name)
    if body and not header.outside:
        decode(body)


def test_every_kind_and_every_field_is_listed() -> None:
    kinds = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", TEXT, flags=re.MULTILINE)
    assert [(int(number), name) for number, name in kinds] == [(k, k.name) for k in Kind]
    fields = re.findall(r"^\| (\d+) \| (\d) \| ([a-z_]+) \|", TEXT, flags=re.MULTILINE)
    end = 0
    for offset, size, _ in fields:
        assert int(offset) == end
        end += int(size)
    assert end == HEADER.size

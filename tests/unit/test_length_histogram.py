"""A user's file of KV lengths, and the batches drawn from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tp_runtime.errors import ConfigError
from tp_runtime.selection import BenchRequest, DecodeShape
from tp_runtime.selection.bench import cells_of
from tp_runtime.selection.histogram import LengthHistogram

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = DecodeShape(
    q_heads=6, kv_heads=2, head_dim=64, dtype="float32", page_size=64, table_width=8
)


def test_lengths_and_counts_are_read(tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text("# seen in June\n300 7\n\n  20\t2 # short\n300\n9\n")
    assert LengthHistogram.read(file) == LengthHistogram(lengths=(9, 20, 300), counts=(1, 2, 8))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("10\nlong 3\n", "line 2: expected a length in tokens and perhaps a count"),
        ("10 3 5\n", "line 1"),
        ("0 5\n", "line 1: .*both at least 1"),
        ("10 0\n", "line 1"),
        ("-3\n", "line 1"),
        ("1_000\n", "line 1"),
        ("1.5\n", "line 1"),
        ("9" * 40, "line 1"),
        ("# nothing\n", "holds no length"),
        ("", "holds no length"),
        ("\udcff", "cannot be read"),
    ],
)
def test_what_is_no_histogram_is_named(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError, match=said) as caught:
        LengthHistogram.read(file)
    assert str(file) in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent: cannot be read"):
        LengthHistogram.read(tmp_path / "absent")


def test_every_bucket_gets_batches_of_these_lengths(caplog: pytest.LogCaptureFixture) -> None:
    histogram = LengthHistogram(lengths=(5, 40, 9000), counts=(50, 49, 1))
    request = BenchRequest(shape=SHAPE, buckets=(1, 4, 32))
    more = histogram.added_to(request)
    assert {len(batch) for batch in more.batches} == {1, 4, 32}
    assert len(set(more.batches)) == len(more.batches)
    # an end beyond the longest sequence is the longest sequence, and the log says so
    assert caplog.messages[0] == (
        "length histogram: 1 of 100 requests are longer than 512 tokens, the longest sequence "
        "here; they are taken as that long"
    )
    assert {n for batch in more.batches for n in batch} <= {5, 40, SHAPE.max_kv_len}
    assert histogram.added_to(request) == more  # seeded
    seen = [cell.kv_lens for cell in cells_of(more)]
    assert set(more.batches) <= set(seen)
    assert len(seen) == len(cells_of(request)) + len(more.batches)


def test_rare_lengths_are_rare() -> None:
    histogram = LengthHistogram(lengths=(10, 500), counts=(90, 10))
    request = BenchRequest(shape=SHAPE, buckets=(512,), max_total_kv=1 << 20)
    lengths = [n for batch in histogram.added_to(request).batches for n in batch]
    assert 0.05 < lengths.count(500) / len(lengths) < 0.15


def test_batches_beyond_the_memory_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    histogram = LengthHistogram(lengths=(500,), counts=(1,))
    request = BenchRequest(shape=SHAPE, buckets=(1, 64), max_total_kv=1000)
    assert histogram.added_to(request).batches == ((500,),)
    assert caplog.messages == [
        "length histogram: 3 of 6 batches drawn from it have more than 2000 tokens and are not "
        "measured"
    ]


def test_nothing_is_said_of_a_histogram_that_fits(caplog: pytest.LogCaptureFixture) -> None:
    histogram = LengthHistogram(lengths=(5, SHAPE.max_kv_len), counts=(1, 1))
    histogram.added_to(BenchRequest(shape=SHAPE, buckets=(1, 4)))
    assert caplog.messages == []

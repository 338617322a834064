from __future__ import annotations

import os

import pytest

from tp_runtime.broadcast.progress import MAX_LAG_MESSAGES, LagBound, Progress, make_page
from tp_runtime.errors import ProtocolError

TICK_S = 0.1


class Peers:
    """Three peers behind a rank 0 that looks every tick, on a clock of its own."""

    def __init__(self, timeout_s: float = 1.0) -> None:
        self.now_s = 100.0
        self.taken = {1: 0, 2: 0, 3: 0}
        self.stopped: set[int] = set()
        self.bound = LagBound(self.taken, timeout_s=timeout_s, clock=lambda: self.now_s)

    def late_after(self, seconds: float, *, sent: int, gap_s: float = TICK_S) -> list[int]:
        late: list[int] = []
        for _ in range(round(seconds / gap_s)):
            self.now_s += gap_s
            late = self.bound.late(
                sent=sent,
                taken=self.taken.__getitem__,
                stopped=self.stopped.__contains__,
                tick_s=TICK_S,
            )
        return late


def test_a_rank_far_behind_that_takes_nothing_is_late_after_the_timeout() -> None:
    peers = Peers()
    sent = MAX_LAG_MESSAGES + 1
    peers.taken.update({1: sent, 2: sent - 1})
    assert peers.late_after(0.9, sent=sent) == []
    assert peers.late_after(0.3, sent=sent) == [3]


def test_a_busy_rank_may_leave_a_few_messages_for_as_long_as_it_likes() -> None:
    peers = Peers()
    assert peers.late_after(60.0, sent=MAX_LAG_MESSAGES) == []


def test_a_stopped_rank_is_late_with_one_message() -> None:
    peers = Peers()
    peers.stopped.add(2)
    assert peers.late_after(60.0, sent=0) == []
    assert peers.late_after(0.9, sent=1) == []
    assert peers.late_after(0.3, sent=1) == [2]


def test_a_slow_rank_that_goes_on_taking_is_not_late() -> None:
    peers = Peers()
    for step in range(30):
        peers.taken.update({1: step + 1, 2: step + 1, 3: step + 1})
        assert peers.late_after(0.9, sent=1000) == []


def test_time_in_which_rank_0_was_frozen_does_not_count() -> None:
    peers = Peers()
    assert peers.late_after(0.5, sent=100) == []
    assert peers.late_after(600.0, sent=100, gap_s=600.0) == []
    assert peers.late_after(0.3, sent=100) == []
    assert peers.late_after(0.2, sent=100) == [1, 2, 3]


def test_what_one_rank_notes_the_other_sees() -> None:
    page = make_page(3)
    root, peer = Progress(page, world_size=3), Progress(page, world_size=3)
    os.close(page)
    peer.words[2] = 2**40
    assert [root.seen(rank) for rank in range(3)] == [0, 0, 2**40]
    root.close()
    root.close()
    peer.words[2] = 7
    assert root.seen(2) == 2**40
    peer.close()


def test_a_page_that_could_kill_its_reader_is_refused() -> None:
    page = make_page(2)
    with pytest.raises(ProtocolError, match="expected 24 bytes, got 16"):
        Progress(page, world_size=3)
    os.close(page)
    # a memfd that can shrink under a mapping ends the process that reads it
    loose = os.memfd_create("loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 24)
    with pytest.raises(ProtocolError, match="not sealed against resizing"):
        Progress(loose, world_size=3)
    os.close(loose)
    reader, writer = os.pipe()
    with pytest.raises(ProtocolError, match="no memfd"):
        Progress(reader, world_size=3)
    os.close(reader)
    os.close(writer)

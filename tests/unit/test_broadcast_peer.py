"""The receiving side alone: its short way, what it rehearses, what it puts off, its patience.

Both ranks are in this process; `_owner` makes them belong to its one thread.
"""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from tp_runtime.broadcast import BroadcasterConfig, CpuTpBroadcaster, PeerLost, ProtocolError
from tp_runtime.broadcast.patience import Patience
from tp_runtime.broadcast.peer import PeerBroadcaster
from tp_runtime.broadcast.wire import HEADER_BYTES, Kind, pack_frame, parse_frame

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SEED = 20261130
EPOCH = 3


def pair(folder: Path, config: BroadcasterConfig) -> tuple[CpuTpBroadcaster, PeerBroadcaster]:
    joined: dict[int, CpuTpBroadcaster] = {}

    def join(rank: int) -> None:
        joined[rank] = CpuTpBroadcaster.join(
            rank=rank, world_size=2, address=folder / "channel", config=config
        )

    other = threading.Thread(target=join, args=(0,))
    other.start()
    join(1)
    other.join()
    root, peer = joined[0], joined[1]
    root._owner = threading.get_ident()
    assert isinstance(peer, PeerBroadcaster)
    return root, peer


@pytest.fixture
def spinning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[CpuTpBroadcaster, PeerBroadcaster]]:
    monkeypatch.setattr("tp_runtime.broadcast.peer.cores_available", lambda: 2)
    root, peer = pair(tmp_path, BroadcasterConfig(wait="latency", timeout_s=5, epoch=EPOCH))
    yield root, peer
    root.close()
    peer.close()


class GoesTheLongWay(Exception):
    pass


def test_the_short_way_takes_no_frame_that_the_long_way_refuses(
    spinning: tuple[CpuTpBroadcaster, PeerBroadcaster], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, peer = spinning
    body = b"\x93\x01\x02\x03"
    good = pack_frame(Kind.MESSAGE, body, sequence=7, epoch=EPOCH, interval_us=1000)

    def long_way(*_: object) -> None:
        raise GoesTheLongWay

    monkeypatch.setattr(peer, "_open_other", long_way)
    rng, taken = random.Random(SEED), 0
    for _ in range(20_000):
        packet = bytearray(good)
        for _ in range(rng.randrange(3)):
            # the body is the codec's affair
            packet[rng.randrange(HEADER_BYTES)] ^= 1 << rng.randrange(8)
        if rng.random() < 0.1:
            del packet[rng.randrange(len(packet)) :]
        peer._root.data.view[: len(packet)] = packet
        try:
            message = peer._open(len(packet), 7, None)
        except GoesTheLongWay:
            continue
        taken += 1
        assert message == [1, 2, 3]
        header, _ = parse_frame(memoryview(packet), sequence=7, epoch=EPOCH)
        assert (header.kind, header.flags, header.sequence) == (Kind.MESSAGE, 0, 7)
    assert taken > 5_000
    peer._root.data.view[: len(good)] = good
    for size, sequence in ((len(good), 8), (len(good) + 1, 7), (1 << 30, 7), (0, 7)):
        with pytest.raises(GoesTheLongWay):
            peer._open(size, sequence, None)
    monkeypatch.setattr(peer, "_most_plain_bytes", 3)
    with pytest.raises(GoesTheLongWay):
        peer._open(len(good), 7, None)


def test_what_is_rehearsed_is_the_message_taken_last(
    spinning: tuple[CpuTpBroadcaster, PeerBroadcaster],
) -> None:
    root, peer = spinning
    rehearsed: list[Any] = []
    peer.rehearse_with(rehearsed.append)
    root.rehearse_with(rehearsed.append)

    def receive_later(message: Any) -> Any:
        later = threading.Timer(0.003, publish, [message])
        later.start()
        got = peer.receive()
        later.join()
        return got

    def publish(message: Any) -> None:
        root._owner = threading.get_ident()
        root.publish(message)

    assert receive_later([1, 2]) == [1, 2]
    assert rehearsed == []
    assert receive_later([3]) == [3]
    assert rehearsed != []
    assert all(message == [1, 2] for message in rehearsed)
    rehearsed.clear()
    # a body that lies elsewhere, or a longer one, is not gone through again
    for large in (b"L" * 400_000, b"M" * 5000):
        assert receive_later(large) == large
        rehearsed.clear()
        assert receive_later(large) == large
        assert rehearsed == []
    assert peer.statistics().messages == 6
    assert peer.statistics().sequence == 6


def test_a_peer_that_is_late_for_every_message_still_counts_them(
    spinning: tuple[CpuTpBroadcaster, PeerBroadcaster],
) -> None:
    root, peer = spinning
    for number in range(150):
        root.publish([number])
        assert peer.receive() == [number]
    seen_by_another: list[int] = []
    other = threading.Thread(target=lambda: seen_by_another.append(peer.statistics().messages))
    other.start()
    other.join()
    assert 150 - 64 < seen_by_another[0] <= 150
    statistics = peer.statistics()
    assert statistics.messages == sum(statistics.latency_us) == 150
    assert statistics.body_bytes == root.statistics().body_bytes
    with pytest.raises(ProtocolError, match="only rank 0 may publish"):
        peer.publish([1])


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("body", [1, "x" * (1 << 20)])
def test_a_peer_knows_when_each_message_was_sent(
    spinning: tuple[CpuTpBroadcaster, PeerBroadcaster], body: object
) -> None:
    root, peer = spinning
    assert peer.message_sent_ns == root.message_sent_ns == 0
    for _ in range(2):
        before_ns = time.monotonic_ns()
        root.publish(body)
        after_ns = time.monotonic_ns()
        assert peer.receive() == body
        assert before_ns <= peer.message_sent_ns <= after_ns


def test_patience_asks_at_half_time_and_ends_when_nothing_is_heard() -> None:
    clock, asked, heard = Clock(), [], [100.0]
    patience = Patience(
        2.0, heard_s=lambda: heard[0], ask=lambda: asked.append(clock.now_s), clock=clock
    )
    assert patience.next_s() == pytest.approx(1.0)
    clock.now_s = 101.0
    assert patience.next_s() == pytest.approx(1.0)
    assert asked == [101.0]
    heard[0] = clock.now_s = 101.9
    assert patience.next_s() == pytest.approx(1.0)
    clock.now_s = 103.0
    assert patience.next_s() == pytest.approx(0.9)
    assert asked == [101.0, 103.0]
    # a suspended machine: that time says nothing about rank 0
    patience.woke(slept_from_s=103.0, asked_s=0.9)
    clock.now_s = 203.0
    patience.woke(slept_from_s=103.0, asked_s=0.9)
    assert patience.next_s() == pytest.approx(0.9)
    clock.now_s = 203.9
    assert patience.next_s() is None


def test_patience_that_began_before_counts_what_has_passed() -> None:
    clock = Clock()
    patience = Patience(
        2.0, heard_s=lambda: 100.0, ask=lambda: None, from_s=clock.now_s - 1.0, clock=clock
    )
    assert patience.timeout_s == 2.0
    # rank 0 was heard only now
    assert patience.next_s() == pytest.approx(1.0)
    clock.now_s = 101.5
    unheard = Patience(
        2.0, heard_s=lambda: 90.0, ask=lambda: None, from_s=clock.now_s - 1.9, clock=clock
    )
    assert unheard.next_s() == pytest.approx(0.1)


def test_a_peer_that_blocks_waits_no_longer_than_the_timeout(tmp_path: Path) -> None:
    root, peer = pair(tmp_path, BroadcasterConfig(wait="efficient", timeout_s=0.4, epoch=EPOCH))
    started_s = time.monotonic()
    root.publish([1])
    assert peer.receive() == [1]
    assert time.monotonic() - started_s < 0.2
    # rank 0 lives, so this is no silence, however long it lasts
    later = threading.Timer(0.7, peer._root.control.packets.shutdown)
    later.start()
    with pytest.raises(PeerLost):
        peer.receive()
    assert 0.6 < time.monotonic() - started_s < 2.0
    later.join()
    root.close()
    peer.close()


def test_patience_with_a_decision_is_not_renewed_by_a_sign_of_life() -> None:
    clock, asked = Clock(), []
    patience = Patience(1.0, heard_s=None, ask=lambda: asked.append(1), clock=clock)
    assert patience.next_s() == pytest.approx(1.0)
    clock.now_s += 1.0
    assert patience.next_s() is None
    assert asked == []


def test_large_messages_go_through_one_region_and_past_it_when_a_peer_is_slow(
    spinning: tuple[CpuTpBroadcaster, PeerBroadcaster],
) -> None:
    root, peer = spinning
    bodies = [bytes([number]) * 400_000 for number in range(8)]
    root.publish(bodies[0])
    assert peer.receive() == bodies[0]
    first = peer._region
    for large in bodies:
        root.publish(large)  # both slots are full from the third on
    assert [peer.receive() for _ in bodies] == bodies
    assert peer._region is first
    assert peer.statistics().large_messages == root.statistics().large_messages == 9
    larger = b"L" * 3_000_000
    root.publish({"k": larger})
    assert peer.receive() == {"k": larger}
    assert peer._region is not first
    root.publish(bodies[1])
    assert peer.receive() == bodies[1]

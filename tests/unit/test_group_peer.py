"""What a group says when a sum on the device ended without its peer."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from tp_runtime.errors import BroadcastError, DeadlineExceeded, PeerLost
from tp_runtime.group import TpGroup


class FakePeerReduce:
    def __init__(self, *, gave_up: bool) -> None:
        self.gave_up = gave_up
        self.stopped = False
        self.timeout_s = 0.0

    def stop(self) -> None:
        self.stopped = True

    def set_timeout(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s


class FakeWatch:
    def __init__(self, dead: int | None) -> None:
        self._dead = dead

    def dead(self) -> int | None:
        return self._dead

    def close(self) -> None:
        pass


def group_with(peer: FakePeerReduce, dead: int | None = None) -> TpGroup:
    group = TpGroup.single(torch.device("cpu"))
    group._peer = cast("Any", peer)
    group._watch = cast("Any", FakeWatch(dead))
    group.set_timeout(7.0)
    return group


def test_nothing_is_raised_while_peers_come() -> None:
    peer = FakePeerReduce(gave_up=False)
    group_with(peer).raise_if_failed()
    assert peer.timeout_s == 7.0
    assert not peer.stopped


def test_a_peer_that_ended_is_named() -> None:
    peer = FakePeerReduce(gave_up=True)
    group = group_with(peer, dead=3)
    with pytest.raises(PeerLost, match="rank 0 lost TP rank 3") as caught:
        group.raise_if_failed()
    assert caught.value.rank == 3
    assert peer.stopped, "the sums behind it must not wait as long again"
    with pytest.raises(PeerLost):
        group.raise_if_failed()


def test_a_peer_that_is_late_is_a_deadline() -> None:
    with pytest.raises(DeadlineExceeded, match="longer than 7 s"):
        group_with(FakePeerReduce(gave_up=True)).raise_if_failed()


def test_the_cause_that_the_watcher_knows_comes_first() -> None:
    peer = FakePeerReduce(gave_up=True)
    group = group_with(peer, dead=1)
    group.fail(BroadcastError("rank 0 said stop"))
    assert peer.stopped
    with pytest.raises(BroadcastError, match="rank 0 said stop"):
        group.raise_if_failed()

"""What a group says and does when a collective of its device ends without its peer."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from tp_runtime.errors import BroadcastError, DeadlineExceeded, PeerLost
from tp_runtime.group import TpGroup

if TYPE_CHECKING:
    from tp_runtime.device_collectives import DeviceCollectives


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


class FakeNccl:
    """Aborts when its graphs are gone."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.graphs_gone = threading.Event()

    def abort(self) -> None:
        self.calls.append("abort")
        assert self.graphs_gone.wait(30)
        self.calls.append("aborted")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def group_on(nccl: FakeNccl, *, owned: bool) -> TpGroup:
    return TpGroup(
        rank=0,
        size=1,
        device=torch.device("cpu"),
        timeout_s=0.0,
        accelerator=cast("Any", nccl),
        owned=owned,
    )


def device_of(group: TpGroup) -> DeviceCollectives:
    assert group._on_device is not None
    return group._on_device


def group_with(peer: FakePeerReduce, dead: int | None = None) -> TpGroup:
    group = group_on(FakeNccl(), owned=False)
    device_of(group)._peer = cast("Any", peer)
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


def test_a_failure_aborts_nccl_once_and_waits_for_nothing() -> None:
    nccl = FakeNccl()
    group = group_on(nccl, owned=True)
    for _ in range(2):
        group.fail(PeerLost("TP rank 1 is gone", rank=1, reason="test"))
    with pytest.raises(PeerLost, match="TP rank 1 is gone"):
        group.raise_if_failed()
    nccl.graphs_gone.set()
    group.close()
    assert nccl.calls == ["abort", "aborted"]


def test_nccl_is_aborted_only_after_a_collective_that_is_being_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tp_runtime.device_collectives._START_S", 30.0)
    nccl = FakeNccl()
    nccl.graphs_gone.set()
    group = group_on(nccl, owned=True)
    begun, aborting = threading.Event(), threading.Event()

    def start() -> None:
        nccl.calls.append("start")
        begun.set()
        assert not aborting.wait(0.02)
        nccl.calls.append("started")

    nccl.abort = aborting.set  # type: ignore[method-assign]
    device = device_of(group)
    worker = threading.Thread(target=device._start, args=(start,))
    worker.start()
    assert begun.wait(10)
    group.fail(BroadcastError("rank 1 said stop"))
    worker.join()
    assert aborting.wait(10)
    with pytest.raises(BroadcastError, match="rank 1 said stop"):
        device._start(start)
    assert nccl.calls == ["start", "started"]
    group.close()


def test_an_abort_that_never_ends_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tp_runtime.device_collectives._ABORT_S", 0.05)
    nccl = FakeNccl()
    group = group_on(nccl, owned=True)
    group.fail(BroadcastError("rank 1 said stop"))
    group.close()
    assert "NCCL has not given up" in caplog.text
    nccl.graphs_gone.set()


def test_a_host_programs_nccl_is_left_alone() -> None:
    nccl = FakeNccl()
    group = group_on(nccl, owned=False)
    group.fail(BroadcastError("rank 1 said stop"))
    group.close()
    assert not nccl.calls


def test_without_a_failure_nccl_is_shut_down() -> None:
    nccl = FakeNccl()
    group_on(nccl, owned=True).close()
    assert nccl.calls == ["shutdown"]

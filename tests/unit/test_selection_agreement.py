"""Agreement over an in-memory channel: the same messages, one thread per rank."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from tp_runtime.errors import (
    BackendUnavailable,
    PeerLost,
    PlanMismatch,
    ProtocolError,
    TpRuntimeError,
)
from tp_runtime.selection.agreement import agree, agree_capture, announce, device_check
from tp_runtime.selection.base import DecodeShape, DeviceInfo
from tp_runtime.selection.plan import BackendPlan
from tp_runtime.selection.registry import Eligibility

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPE = DecodeShape(
    q_heads=6, kv_heads=2, head_dim=64, dtype="float32", page_size=64, table_width=8
)
CPU = DeviceInfo(type="cpu", name="cpu")
NAMES = ("cpu_grouped", "cpu_rowwise", "torch_reference")
WAIT_S = 20.0


class Aborted(TpRuntimeError):
    """What a fake channel's waits raise after an abort."""


@dataclass
class FakeReceipt:
    committed: bool
    refusals: dict[int, str]
    details: dict[int, str] = field(default_factory=dict)


@dataclass
class FakeChannel:
    """Rank 0's end and the peers' ends of one two-phase channel."""

    peers: int
    messages: list[queue.Queue[Any]] = field(init=False)
    answers: queue.Queue[tuple[int, bool, str]] = field(default_factory=queue.Queue)
    decisions: list[queue.Queue[Any]] = field(init=False)
    confirmed: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages = [queue.Queue() for _ in range(self.peers)]
        self.decisions = [queue.Queue() for _ in range(self.peers)]

    def confirm(self, message: Any, /, *, timeout_s: float | None = None) -> FakeReceipt:
        self.confirmed.append(message)
        for box in self.messages:
            box.put(message)
        answers = [self.answers.get(timeout=WAIT_S) for _ in range(self.peers)]
        refusals = {rank: detail for rank, ok, detail in answers if not ok}
        for box in self.decisions:
            box.put(not refusals)
        return FakeReceipt(committed=not refusals, refusals=refusals)

    def publish(self, message: Any, /, *, timeout_s: float | None = None) -> None:
        for box in self.messages:
            box.put(message)

    def receive(self, *, timeout_s: float | None = None) -> Any:
        raise AssertionError("rank 0 does not receive")

    def acknowledge(self, ok: bool, detail: str = "", *, timeout_s: float | None = None) -> bool:
        raise AssertionError("rank 0 does not acknowledge")

    def abort(self, reason: str) -> None:
        for box in [*self.messages, *self.decisions]:
            box.put(Aborted(reason))


@dataclass
class FakePeer:
    hub: FakeChannel
    rank: int

    def confirm(self, message: Any, /, *, timeout_s: float | None = None) -> FakeReceipt:
        raise AssertionError("a peer does not confirm")

    def receive(self, *, timeout_s: float | None = None) -> Any:
        return self._get(self.hub.messages[self.rank - 1])

    def acknowledge(self, ok: bool, detail: str = "", *, timeout_s: float | None = None) -> bool:
        self.hub.answers.put((self.rank, ok, detail))
        decision: bool = self._get(self.hub.decisions[self.rank - 1])
        return decision

    def abort(self, reason: str) -> None:
        raise AssertionError("no peer aborts here")

    def _get(self, box: queue.Queue[Any]) -> Any:
        item = box.get(timeout=WAIT_S)
        if isinstance(item, Aborted):
            raise item
        return item


def together(*ranks: Callable[[Any], Any]) -> tuple[list[Any], FakeChannel]:
    """Run rank 0 and the peers at once; returns each one's result or error."""
    hub = FakeChannel(peers=len(ranks) - 1)
    ends: list[Any] = [hub, *(FakePeer(hub, rank) for rank in range(1, len(ranks)))]

    def guarded(rank: int) -> Any:
        try:
            return ranks[rank](ends[rank])
        except TpRuntimeError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(guarded, range(len(ranks)))), hub


def plan_of(names: tuple[str, ...] = NAMES, shape: DecodeShape | None = SHAPE) -> BackendPlan:
    return BackendPlan.fixed(names, [1, 4], shape=shape)


def rank(
    plan: BackendPlan | None, *, disabled: tuple[str, ...] = (), shape: DecodeShape = SHAPE
) -> Callable[[Any], BackendPlan]:
    check = device_check(shape, CPU, eligibility=Eligibility(disabled=frozenset(disabled)))
    return lambda channel: agree(channel, plan, check=check)


def test_all_ranks_take_the_plan() -> None:
    plan = plan_of()
    results, hub = together(rank(plan), rank(None), rank(None))
    assert results == [plan] * 3
    assert len(hub.confirmed) == 1


def test_peers_hear_how_far_rank_0_is() -> None:
    plan = plan_of()
    heard: list[tuple[str, int, int]] = []
    check = device_check(SHAPE, CPU)

    def root(channel: Any) -> BackendPlan:
        announce(channel, "build", 1, 4)
        announce(channel, "selection", 20, 90)
        return agree(channel, plan, check=check)

    def listening(channel: Any) -> BackendPlan:
        return agree(channel, None, check=check, progress=lambda *news: heard.append(news))

    results, _ = together(root, listening, rank(None))
    assert results == [plan] * 3
    assert heard == [("build", 1, 4), ("selection", 20, 90)]


def test_news_that_is_none_is_a_protocol_error() -> None:
    hub = FakeChannel(peers=1)
    hub.publish({"kind": "progress", "progress": {"stage": "build", "done": "all"}})
    with pytest.raises(ProtocolError, match="expected a stage and two counts"):
        rank(None)(FakePeer(hub, 1))


def test_a_refused_backend_is_dropped_on_all_ranks_together() -> None:
    results, hub = together(
        rank(plan_of()),
        rank(None, disabled=("cpu_grouped",)),
        rank(None, disabled=("torch_reference",)),
    )
    assert results == [plan_of().without({"cpu_grouped", "torch_reference"})] * 3
    assert results[0][4] == ("cpu_rowwise",)
    assert len(hub.confirmed) == 2


def test_rank_0_checks_its_own_device_first() -> None:
    results, hub = together(rank(plan_of(), disabled=("cpu_rowwise",)), rank(None))
    assert results == [plan_of().without({"cpu_rowwise"})] * 2
    assert len(hub.confirmed) == 1


def test_no_backend_in_common_ends_every_rank() -> None:
    results, _ = together(
        rank(plan_of(("cpu_grouped", "cpu_rowwise"))),
        rank(None, disabled=("cpu_grouped",)),
        rank(None, disabled=("cpu_rowwise",)),
    )
    assert isinstance(results[0], BackendUnavailable)
    assert all(isinstance(error, Aborted) for error in results[1:])
    assert "cpu_grouped, cpu_rowwise" in str(results[2])


def test_another_shape_is_named_with_rank_and_field() -> None:
    results, _ = together(
        rank(plan_of()), rank(None), rank(None, shape=replace(SHAPE, page_size=16))
    )
    assert isinstance(results[0], PlanMismatch)
    assert "rank 2" in str(results[0])
    assert "shape.page_size: expected 16 here, got 64" in str(results[0])
    assert isinstance(results[2], PlanMismatch)
    assert isinstance(results[1], Aborted)


def test_an_unreadable_plan_ends_every_rank() -> None:
    class Old(BackendPlan):
        def to_bytes(self) -> bytes:
            return super().to_bytes().replace(b'"version":1', b'"version":9')

    old = Old(priority=NAMES, entries=plan_of().entries, shape=SHAPE)
    results, _ = together(rank(old), rank(None))
    assert "rank 1 cannot take plan" in str(results[0])
    assert "version: expected 1, got 9" in str(results[0])


def test_a_backend_the_peer_has_never_heard_of() -> None:
    plan = plan_of(("invented", "cpu_padded"))
    results, _ = together(lambda channel: agree(channel, plan, check=lambda _: {}), rank(None))
    assert results == [plan.without({"invented"})] * 2


def test_a_stray_message_is_a_protocol_error() -> None:
    hub = FakeChannel(peers=1)
    hub.messages[0].put({"kind": "step", "plan": b""})
    with pytest.raises(ProtocolError, match="kind 'plan', got 'step'"):
        rank(None)(FakePeer(hub, 1))


def test_alone_a_plan_commits_at_once() -> None:
    results, _ = together(rank(plan_of()))
    assert results == [plan_of()]


def test_equal_captures_give_one_digest() -> None:
    one: dict[str, str | int] = {"bucket4.variant0": "cpu_grouped", "table_width": 8}
    other = dict(reversed(one.items()))
    results, _ = together(
        lambda channel: agree_capture(channel, one, root=True),
        lambda channel: agree_capture(channel, other, root=False),
    )
    assert results[0] == results[1]
    assert len(results[0]) == 64


def test_a_different_capture_names_rank_and_field() -> None:
    results, _ = together(
        lambda channel: agree_capture(channel, {"kernels": "a", "table_width": 4}, root=True),
        lambda channel: agree_capture(channel, {"kernels": "a", "table_width": 4}, root=False),
        lambda channel: agree_capture(channel, {"kernels": "a", "table_width": 8}, root=False),
    )
    assert all(isinstance(result, PlanMismatch) for result in results)
    assert "rank 2: field table_width: expected 4, got 8" in str(results[0])
    assert "field table_width" in str(results[2])


class OvertakenChannel:
    """A peer's end: rank 0 ends the channel before its decision is read."""

    def __init__(self, values: dict[str, int]) -> None:
        self.message = {"kind": "alike", "alike": {"what": "the capture", "values": values}}

    def receive(self, *, timeout_s: float | None = None) -> Any:
        return self.message

    def acknowledge(self, ok: bool, detail: str = "", *, timeout_s: float | None = None) -> bool:
        raise PeerLost("rank 0 was told to stop", rank=0, reason="the capture differs")


@pytest.mark.parametrize(("mine", "expected"), [(16, PlanMismatch), (8, PeerLost)])
def test_a_rank_that_differs_says_so_whatever_becomes_of_the_channel(
    mine: int, expected: type[Exception]
) -> None:
    channel = cast("Any", OvertakenChannel({"table_width": 8}))
    with pytest.raises(expected):
        agree_capture(channel, {"table_width": mine}, root=False)

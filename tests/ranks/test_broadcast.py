"""The channel between real processes, when all goes well."""

from __future__ import annotations

import os
import random
import select
import signal
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tp_runtime.broadcast import (
    BroadcasterConfig,
    ChannelClosed,
    CpuTpBroadcaster,
    PeerLost,
    ProtocolError,
    WaitMode,
)
from tp_runtime.broadcast.sockets import process_state
from tp_runtime.ranks import RankInfo
from tp_runtime.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

SEED = 20261129


def join(folder: str, *, timeout_s: float = 20.0, wait: WaitMode = "balanced") -> CpuTpBroadcaster:
    info = RankInfo.from_env()
    return CpuTpBroadcaster.join(
        rank=info.rank,
        world_size=info.world_size,
        address=Path(folder) / "channel",
        config=BroadcasterConfig(join_timeout_s=30, timeout_s=timeout_s, wait=wait),
    )


def until(condition: object, limit_s: float = 20.0) -> None:
    assert callable(condition)
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def failed(channel: CpuTpBroadcaster, wait_s: float = 0.0) -> bool:
    return bool(select.select([channel.fileno()], [], [], wait_s)[0])


def messages(count: int) -> list[dict[str, object]]:
    rng = random.Random(SEED)
    made: list[dict[str, object]] = []
    for step in range(count):
        size = rng.choice([0, 10, 700, 5000]) if step % 500 else 700_000
        made.append({"step": step, "body": rng.randbytes(size), "ids": list(range(step % 9))})
    return made


def many_messages(folder: str, wait: WaitMode, count: int) -> list[object]:
    channel = join(folder, wait=wait)
    expected = messages(count)
    with channel:
        if channel.rank == 0:
            for message in expected:
                channel.publish(message)
            channel.publish({"column": np.arange(7, dtype=np.int32)})
        else:
            for message in expected:
                assert channel.receive() == message
            assert channel.receive()["column"].tolist() == list(range(7))
            with pytest.raises(ChannelClosed):
                channel.receive()
        statistics = channel.statistics()
    assert os.listdir(folder) == []
    return [statistics.messages, statistics.large_messages, sum(statistics.latency_us)]


@pytest.mark.parametrize("wait", ["balanced", "latency", "efficient"])
def test_messages_of_any_size_arrive_in_order_and_equal(tmp_path: Path, wait: str) -> None:
    results = run_ranks(many_messages, 3, 60, args=(str(tmp_path), wait, 2000))
    assert results == [[2001, 4, 0], [2001, 4, 2001], [2001, 4, 2001]]


def confirm_rounds(folder: str) -> list[object]:
    with join(folder) as channel:
        if channel.rank == 0:
            committed = channel.confirm({"plan": b"a"})
            refused = channel.confirm({"plan": b"b"})
            channel.publish("after")
            return [
                [receipt.sequence, receipt.committed, receipt.refusals, receipt.details]
                for receipt in (committed, refused)
            ]
        with pytest.raises(ProtocolError, match="nothing to acknowledge"):
            channel.acknowledge(True)
        assert channel.receive() == {"plan": b"a"}
        with pytest.raises(ProtocolError, match="call acknowledge before the next receive"):
            channel.receive()
        first = channel.acknowledge(True, f"digest {channel.rank}")
        with pytest.raises(ProtocolError, match="nothing to acknowledge"):
            channel.acknowledge(True)
        assert channel.receive() == {"plan": b"b"}
        second = channel.acknowledge(
            channel.rank != 2, "" if channel.rank != 2 else "no such kernel"
        )
        assert channel.receive() == "after"
        return [first, second]


def test_confirm_commits_on_all_ranks_or_on_none(tmp_path: Path) -> None:
    root, first, second = run_ranks(confirm_rounds, 3, 60, args=(str(tmp_path),))
    # keys of a JSON object are strings
    assert root == [
        [1, True, {}, {"1": "digest 1", "2": "digest 2"}],
        [3, False, {"2": "no such kernel"}, {"1": "", "2": "no such kernel"}],
    ]
    assert first == second == [True, False]


def closed_before_read(folder: str) -> list[object]:
    channel = join(folder)
    if channel.rank == 0:
        for step in range(50):
            channel.publish(step)
        channel.close()
        return []
    until(lambda: process_state(channel.pids[0]) == "dead")
    # a good end is no failure, even when the process of rank 0 is gone before its words were read
    readable = failed(channel, 0.1)
    received = [channel.receive() for _ in range(50)]
    causes = []
    for _ in range(2):
        with pytest.raises(ChannelClosed) as caught:
            channel.receive()
        causes.append(caught.value)
    assert causes[0] is causes[1]
    readable |= failed(channel)
    channel.close()
    return [received == list(range(50)), readable]


def test_close_delivers_what_was_published_first(tmp_path: Path) -> None:
    results = run_ranks(closed_before_read, 3, 60, args=(str(tmp_path),))
    assert results[1:] == [[True, False], [True, False]]


def silence_of_a_living_root(folder: str) -> list[object]:
    with join(folder, timeout_s=0.4) as channel:
        if channel.rank == 0:
            # several times the deadline of the peers, while this thread is in a system call
            time.sleep(1.5)
            channel.publish("late")
            return [channel.statistics().heartbeats > 0]
        return [channel.receive(timeout_s=0.25 if channel.rank == 1 else None)]


def test_waiting_for_a_root_that_lives_is_no_failure(tmp_path: Path) -> None:
    results = run_ranks(silence_of_a_living_root, 3, 60, args=(str(tmp_path),))
    assert results == [[True], ["late"], ["late"]]


def one_leaves(folder: str) -> list[object]:
    channel = join(folder)
    if channel.rank == 1:
        channel.close()
        return []
    if channel.rank == 0:
        until(lambda: channel.statistics().peers[0].left)
        until(lambda: process_state(channel.pids[1]) == "dead")
        before = failed(channel, 0.1)
        until((Path(folder) / "looked").exists)  # or the other peer would see our failure first
        with pytest.raises(PeerLost) as caught:
            channel.publish("anyone?")
        after = failed(channel)
    else:
        until(lambda: process_state(channel.pids[1]) == "dead")
        before = failed(channel, 0.1)
        (Path(folder) / "looked").touch()
        with pytest.raises(PeerLost) as caught:
            channel.receive()
        after = failed(channel)
    channel.close()
    return [before, after, caught.value.rank, caught.value.reason]


def test_a_peer_that_leaves_in_good_order_is_missed_only_when_it_is_needed(tmp_path: Path) -> None:
    results = run_ranks(one_leaves, 3, 60, args=(str(tmp_path),))
    assert results[0] == results[2] == [False, True, 1, "left the channel"]


def a_fork_in_the_middle(folder: str) -> list[object]:
    channel = join(folder)
    if channel.rank == 0:
        said = said_by_a_child(channel, lambda: channel.publish([1, 2, 3]))
        for step in range(20):
            channel.publish(step)
        channel.close()
        return ["a forked child may not use it" in said]
    said = said_by_a_child(channel, channel.receive)
    received = [channel.receive() for _ in range(20)]
    channel.close()
    return ["a forked child may not use it" in said, received == list(range(20))]


def said_by_a_child(channel: CpuTpBroadcaster, call: Callable[[], object]) -> str:
    """What a forked child is told when it makes this call."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # the child only touches the channel and ends
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        words = b"no error"
        try:
            call()
        except ProtocolError as error:
            words = str(error).encode()
        channel.close()
        os.write(writer, words)
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(reader, 1000).decode()
    for descriptor in (reader, writer):
        os.close(descriptor)
    return said


def test_a_forked_child_cannot_take_messages(tmp_path: Path) -> None:
    assert run_ranks(a_fork_in_the_middle, 2, 60, args=(str(tmp_path),)) == [
        [True],
        [True, True],
    ]


def death_hidden_by_a_fork(folder: str) -> list[object]:
    channel = join(folder)
    if channel.rank == 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            until(lambda: os.path.exists(f"{folder}/seen"))
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    assert failed(channel, 20)
    with pytest.raises(PeerLost) as caught:
        channel.publish("x")
    Path(folder, "seen").touch()
    channel.close()
    return [caught.value.rank]


def test_a_child_that_lives_on_does_not_hide_the_death_of_its_parent(tmp_path: Path) -> None:
    results = run_ranks(
        death_hidden_by_a_fork, 2, 60, args=(str(tmp_path),), expect_exit={1: -signal.SIGKILL}
    )
    assert results[0] == [1]

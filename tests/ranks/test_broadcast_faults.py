"""The channel between real processes, when one of them fails: who raises what, and when.

A rank reports [error type, the rank it names, descriptor readable, seconds since the fault].
The bounds are loose, they tell a notice from a hang; how fast a notice is, a benchmark measures.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, NoReturn

import pytest

from tests.ranks.test_broadcast import failed, join, until
from tp_runtime.broadcast import BroadcastError, CpuTpBroadcaster, PeerLost
from tp_runtime.broadcast.sockets import process_state
from tp_runtime.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KILLED = -int(signal.SIGKILL)
SOON_S = 3.0
# deadline of the calls in the tests that let it expire
BRIEF_S = 0.4


def mark(folder: str) -> None:
    """Write the time of the fault."""
    partial = f"{folder}/fault.partial"
    with open(partial, "w") as file:
        file.write(str(time.monotonic_ns()))
    os.rename(partial, f"{folder}/fault")


def since_fault_s(folder: str) -> float:
    with open(f"{folder}/fault") as file:
        return (time.monotonic_ns() - int(file.read())) / 1e9


def die(folder: str, how: signal.Signals = signal.SIGKILL) -> None:
    mark(folder)
    os.kill(os.getpid(), how)


def repeat(call: Callable[[], object]) -> NoReturn:
    while True:
        call()


def outcome(channel: CpuTpBroadcaster, folder: str, call: Callable[[], object]) -> list[object]:
    """Call until it raises; every later call must raise the very same error."""
    with pytest.raises(BroadcastError) as caught:
        repeat(call)
    seconds = since_fault_s(folder)
    assert channel.failure is caught.value
    for again in (channel.publish, channel.confirm) if channel.rank == 0 else ():
        with pytest.raises(BroadcastError) as later:
            again("more")
        assert later.value is caught.value
    report = [type(caught.value).__name__, getattr(caught.value, "rank", None)]
    readable = failed(channel)
    channel.close()
    return [*report, readable, seconds]


def check(results: list[list[object] | None], expected: dict[int, list[object]]) -> None:
    for rank, report in expected.items():
        got = results[rank]
        assert got is not None
        assert got[:3] == [*report, True], f"rank {rank}: {got}"
        assert isinstance(got[3], float)
        assert got[3] < SOON_S, f"rank {rank}: {got}"


def publish_slowly(channel: CpuTpBroadcaster) -> None:
    channel.publish("step")
    time.sleep(0.002)


def peer_killed_in_a_loop(folder: str) -> list[object] | None:
    channel = join(folder)
    if channel.rank == 2:
        channel.receive()
        die(folder)
    if channel.rank == 0:
        return outcome(channel, folder, lambda: publish_slowly(channel))
    return outcome(channel, folder, channel.receive)


def peer_killed_while_all_are_elsewhere(folder: str) -> list[object] | None:
    channel = join(folder)
    if channel.rank == 2:
        die(folder)
    noticed = failed(channel, 10)
    report = outcome(
        channel, folder, lambda: channel.publish("x") if channel.rank == 0 else channel.receive()
    )
    return [*report[:2], noticed, report[3]]


def root_killed(folder: str) -> list[object] | None:
    channel = join(folder)
    if channel.rank == 0:
        channel.publish("last words")
        until(lambda: os.path.exists(f"{folder}/1") and os.path.exists(f"{folder}/2"))
        die(folder)
    assert channel.receive() == "last words"
    open(f"{folder}/{channel.rank}", "w").close()
    return outcome(channel, folder, channel.receive)


def peer_killed_between_the_phases(folder: str) -> list[object] | None:
    channel = join(folder)
    if channel.rank == 0:
        return outcome(channel, folder, lambda: channel.confirm("plan"))
    assert channel.receive() == "plan"
    if channel.rank == 2:
        die(folder)
    return outcome(channel, folder, lambda: channel.acknowledge(True))


def root_killed_between_the_phases(folder: str) -> list[object] | None:
    channel = join(folder)
    if channel.rank == 0:
        mark(folder)
        channel.confirm("plan")
        raise AssertionError("nobody acknowledges before this process is killed")
    assert channel.receive() == "plan"
    if channel.rank == 1:
        until(lambda: os.path.exists(f"{folder}/2"))
        os.kill(channel.pids[0], signal.SIGKILL)
    else:
        open(f"{folder}/2", "w").close()
    return outcome(channel, folder, lambda: channel.acknowledge(True))


@pytest.mark.parametrize(
    ("scenario", "victim"),
    [
        (peer_killed_in_a_loop, 2),
        (peer_killed_while_all_are_elsewhere, 2),
        (root_killed, 0),
        (peer_killed_between_the_phases, 2),
        (root_killed_between_the_phases, 0),
    ],
)
def test_a_killed_rank_is_named_by_every_survivor(
    tmp_path: Path, scenario: Callable[[str], object], victim: int
) -> None:
    results = run_ranks(scenario, 3, 60, args=(str(tmp_path),), expect_exit={victim: KILLED})
    survivors = {0, 1, 2} - {victim}
    check(results, {rank: ["PeerLost", victim] for rank in survivors})
    assert not (tmp_path / "channel").exists()


def peer_stopped_with_a_full_buffer(folder: str) -> list[object] | None:
    channel = join(folder, timeout_s=BRIEF_S)
    if channel.rank == 1:
        die(folder, signal.SIGSTOP)
    until(lambda: os.path.exists(f"{folder}/fault"))
    report = outcome(channel, folder, lambda: channel.publish(b"x" * 50_000))
    os.kill(channel.pids[1], signal.SIGKILL)
    return report


def test_a_stopped_peer_that_takes_nothing_is_late(tmp_path: Path) -> None:
    results = run_ranks(
        peer_stopped_with_a_full_buffer, 2, 60, args=(str(tmp_path),), expect_exit={1: KILLED}
    )
    check(results, {0: ["DeadlineExceeded", 1]})


def peer_stopped_between_the_phases(folder: str) -> list[object] | None:
    channel = join(folder, timeout_s=BRIEF_S)
    if channel.rank == 0:
        report = outcome(channel, folder, lambda: channel.confirm("plan"))
        os.kill(channel.pids[2], signal.SIGKILL)
        return report
    assert channel.receive() == "plan"
    if channel.rank == 2:
        die(folder, signal.SIGSTOP)
    until(lambda: process_state(channel.pids[2]) == "stopped")
    return outcome(channel, folder, lambda: channel.acknowledge(True))


def test_a_peer_that_does_not_acknowledge_is_late_and_named_to_the_others(tmp_path: Path) -> None:
    results = run_ranks(
        peer_stopped_between_the_phases, 3, 60, args=(str(tmp_path),), expect_exit={2: KILLED}
    )
    check(results, {0: ["DeadlineExceeded", 2], 1: ["PeerLost", 2]})


def root_stopped(folder: str) -> list[object] | None:
    channel = join(folder, timeout_s=BRIEF_S)
    if channel.rank == 0:
        die(folder, signal.SIGSTOP)
    until(lambda: process_state(channel.pids[0]) == "stopped")
    report = outcome(channel, folder, channel.receive)
    open(f"{folder}/{channel.rank}", "w").close()
    if channel.rank == 1:
        until(lambda: os.path.exists(f"{folder}/2"))
        os.kill(channel.pids[0], signal.SIGKILL)
    return report


def test_a_stopped_root_is_silent(tmp_path: Path) -> None:
    results = run_ranks(root_stopped, 3, 60, args=(str(tmp_path),), expect_exit={0: KILLED})
    check(results, {1: ["DeadlineExceeded", 0], 2: ["DeadlineExceeded", 0]})


def peer_aborts(folder: str) -> list[object] | None:
    channel = join(folder)
    if channel.rank == 1:
        mark(folder)
        channel.abort("out of memory")
        return outcome(channel, folder, channel.receive)
    noticed = failed(channel, 10)
    assert "out of memory" in str(channel.failure)
    call = channel.receive if channel.rank else lambda: channel.publish("x")
    report = outcome(channel, folder, call)
    return [*report[:2], noticed, report[3]]


def root_aborts(folder: str) -> list[object] | None:
    channel = join(folder)
    if channel.rank == 0:
        mark(folder)
        channel.abort("no plan")
        return outcome(channel, folder, lambda: channel.publish("x"))
    return outcome(channel, folder, channel.receive)


def root_raises_inside_with(folder: str) -> list[object] | None:
    channel = join(folder)
    if channel.rank == 0:
        mark(folder)
        with pytest.raises(ValueError, match="odd"), channel:
            raise ValueError("odd")
        with pytest.raises(PeerLost) as caught:
            channel.publish("x")
        return [type(caught.value).__name__, caught.value.rank, True, since_fault_s(folder)]
    report = outcome(channel, folder, channel.receive)
    assert "ValueError: odd" in str(channel.failure)
    return report


@pytest.mark.parametrize(
    ("scenario", "culprit"), [(peer_aborts, 1), (root_aborts, 0), (root_raises_inside_with, 0)]
)
def test_an_abort_reaches_every_rank(
    tmp_path: Path, scenario: Callable[[str], object], culprit: int
) -> None:
    results = run_ranks(scenario, 3, 60, args=(str(tmp_path),))
    check(results, {rank: ["PeerLost", culprit] for rank in range(3)})

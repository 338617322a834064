"""Deadline, pace, configuration, statistics: the parts that need no second rank."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tp_runtime.broadcast import (
    BroadcasterConfig,
    ChannelClosed,
    CpuTpBroadcaster,
    PeerLost,
    ProtocolError,
)
from tp_runtime.broadcast.cores import _quota_cores
from tp_runtime.broadcast.deadline import Deadline
from tp_runtime.broadcast.failure import FailureLatch
from tp_runtime.broadcast.pace import Cadence, Pace
from tp_runtime.broadcast.sockets import open_pidfd, process_state, read_memfd, write_memfd
from tp_runtime.broadcast.statistics import BroadcasterStatistics, Counters
from tp_runtime.errors import ConfigError


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_import_loads_no_torch() -> None:
    script = "import sys, tp_runtime.broadcast; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert done.returncode == 0


def test_the_folder_is_no_second_package() -> None:
    script = "import broadcast"
    done = subprocess.run(
        [sys.executable, "-c", script],
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 1
    assert "import tp_runtime.broadcast, not broadcast" in done.stderr


def test_deadline_expires_and_restarts() -> None:
    clock = Clock()
    deadline = Deadline(2.0, clock=clock)
    clock.now_s += 1.5
    assert deadline.remaining_s() == pytest.approx(0.5)
    deadline.restart(clock.now_s)
    assert deadline.remaining_s() == pytest.approx(2.0)
    deadline.restart(0.0)
    assert deadline.remaining_s() == pytest.approx(2.0)
    clock.now_s += 2.0
    assert deadline.expired()
    assert deadline.elapsed_s() == pytest.approx(3.5)


def test_time_in_which_this_process_was_frozen_does_not_count() -> None:
    clock = Clock()
    deadline = Deadline(2.0, clock=clock)
    started_s = clock.now_s
    clock.now_s += 600.0
    deadline.woke(slept_from_s=started_s, asked_s=0.5)
    assert deadline.remaining_s() == pytest.approx(2.0)
    # an ordinary late wake-up counts
    started_s = clock.now_s
    clock.now_s += 0.7
    deadline.woke(slept_from_s=started_s, asked_s=0.5)
    assert deadline.remaining_s() == pytest.approx(1.3)


def test_balanced_sleeps_until_shortly_before_the_announced_message() -> None:
    pace = Pace("balanced", may_spin=True)
    assert pace.plan(100.0) == (0.0, 0.0)
    pace.observe(sent_s=100.0, interval_s=0.01)
    sleep_until_s, spin_until_s = pace.plan(100.001)
    assert 100.009 < sleep_until_s < 100.01 < spin_until_s < 100.011
    # far too early for a sleep that short of precision, or long past: the kernel waits
    assert pace.plan(103.0) == (0.0, 0.0)
    pace.observe(sent_s=103.0, interval_s=0.0)
    assert pace.plan(103.0) == (0.0, 0.0)


def test_an_irregular_sender_widens_the_margin_up_to_a_bound() -> None:
    regular, irregular = Pace("balanced", may_spin=True), Pace("balanced", may_spin=True)
    for step in range(50):
        late_s = 0.001 * (step % 2)
        regular.observe(sent_s=1 + step * 0.01, interval_s=0.01)
        irregular.observe(sent_s=1 + step * 0.01 + late_s, interval_s=0.01)
    narrow = regular.plan(1.495)
    wide = irregular.plan(1.495)
    assert narrow[1] - narrow[0] < wide[1] - wide[0] <= 0.0041


def test_predictions_that_failed_twice_are_not_spun_for_until_one_holds_again() -> None:
    pace = Pace("balanced", may_spin=True)
    pace.observe(sent_s=1.0, interval_s=0.01)
    pace.observe(sent_s=1.1, interval_s=0.01)
    assert pace.plan(1.1)[0] > 1.1  # one pause is no reason to be late for the next message too
    pace.observe(sent_s=1.2, interval_s=0.01)
    assert pace.plan(1.2) == (0.0, 0.0)
    pace.observe(sent_s=1.21, interval_s=0.01)
    assert pace.plan(1.211)[0] > 1.211


def test_no_mode_spins_without_a_core_for_every_rank() -> None:
    for mode in ("latency", "balanced", "efficient"):
        pace = Pace(mode, may_spin=False)
        pace.observe(sent_s=1.0, interval_s=0.01)
        assert pace.plan(1.0) == (0.0, 0.0)
    assert Pace("latency", may_spin=True).plan(1.0)[1] > 1.0


def seen(cadence: Cadence, now_s: float, kind: int = 0) -> float:
    cadence.count(now_s, kind)
    return cadence.expected_s(kind)


def test_cadence_follows_the_sender_and_is_not_fooled_by_a_pause() -> None:
    cadence, now_s = Cadence(), 50.0
    assert seen(cadence, now_s) == 0.0
    for step in range(60):
        now_s += 0.0098 if step % 2 else 0.0102
        interval_s = seen(cadence, now_s)
    assert interval_s == pytest.approx(0.01, rel=0.02)
    for pause_s in (0.3, 20.0):
        now_s += pause_s
        assert seen(cadence, now_s) == pytest.approx(0.01, rel=0.02)
        now_s += 0.01
        assert seen(cadence, now_s) == pytest.approx(0.01, rel=0.02)


def test_cadence_takes_up_a_new_one_at_its_second_interval() -> None:
    cadence, now_s = Cadence(), 50.0
    for _ in range(20):
        now_s += 0.001
        seen(cadence, now_s)
    now_s += 0.01
    assert seen(cadence, now_s) == pytest.approx(0.001)
    now_s += 0.0101
    assert seen(cadence, now_s) == pytest.approx(0.0101)


def test_a_timer_that_is_late_by_always_the_same_needs_no_more_than_that() -> None:
    def margin_s(lates_s: list[float]) -> float:
        pace = Pace("balanced", may_spin=True)
        for step in range(100):
            pace.observe(sent_s=1 + step * 0.01, interval_s=0.01)
            pace.woke(late_s=lates_s[step % len(lates_s)])
        return 2.0 - pace.plan(1.995)[0]

    steady, varying = margin_s([200e-6]), margin_s([50e-6, 350e-6])
    assert 200e-6 < steady < 300e-6
    assert 400e-6 < varying < 700e-6
    # a sleep that a message ended says nothing about the timer
    assert margin_s([-0.005]) == margin_s([-0.001])


def test_one_pause_of_the_sender_widens_the_margin_only_a_little() -> None:
    pace, sent_s = Pace("balanced", may_spin=True), 1.0
    for _ in range(30):
        pace.observe(sent_s=sent_s, interval_s=0.01)
        sent_s += 0.01
    before_s, spin_until_s = pace.plan(sent_s - 0.005)
    narrow_s = spin_until_s - before_s
    sent_s += 5.0
    pace.observe(sent_s=sent_s, interval_s=0.01)
    pace.observe(sent_s=sent_s + 0.01, interval_s=0.01)
    before_s, spin_until_s = pace.plan(sent_s + 0.015)
    assert narrow_s < spin_until_s - before_s < 3 * narrow_s


def test_latency_spins_for_the_announced_interval_and_not_for_ever() -> None:
    pace = Pace("latency", may_spin=True)
    assert pace.plan(1.0)[1] == pytest.approx(1.005)
    for interval_s, spin_s in ((1e-4, 2e-3), (4e-3, 6e-3), (1.0, 0.02)):
        pace.observe(sent_s=1.0, interval_s=interval_s)
        assert pace.plan(1.0)[1] == pytest.approx(1.0 + spin_s)


def test_cadence_tells_kinds_of_messages_apart() -> None:
    cadence, now_s = Cadence(), 50.0
    for _ in range(20):
        for kind, interval_s in ((0, 0.01), (1, 0.25)):
            seen(cadence, now_s, kind)
            now_s += interval_s
    assert seen(cadence, now_s, 1) == pytest.approx(0.25)
    assert seen(cadence, now_s + 0.25, 0) == pytest.approx(0.01)


def test_the_quota_of_a_cgroup_limits_the_cores(tmp_path: Path) -> None:
    inner = tmp_path / "pod" / "box"
    inner.mkdir(parents=True)
    membership = tmp_path / "membership"
    membership.write_text("0::/pod/box\n")
    (inner / "cpu.max").write_text("max 100000\n")
    assert _quota_cores(membership, tmp_path) > 1000
    (tmp_path / "pod" / "cpu.max").write_text("150000 100000\n")
    assert _quota_cores(membership, tmp_path) == 1
    assert _quota_cores(tmp_path / "missing", tmp_path) > 1000


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("join_timeout_s", 0.0),
        ("timeout_s", -1.0),
        ("timeout_s", float("nan")),
        ("wait", "busy"),
        ("max_message_bytes", 0),
        ("max_message_bytes", 1 << 32),
        ("epoch", -1),
    ],
)
def test_a_malformed_setting_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field}: expected"):
        BroadcasterConfig(**{field: value})  # type: ignore[arg-type]


def test_the_token_is_not_shown() -> None:
    assert "secret" not in repr(BroadcasterConfig(token="secret"))


def test_latency_quantiles() -> None:
    counters = Counters()
    for microseconds in (0, 3, 3, 900):
        counters.count_latency(microseconds * 1000)
    counters.count_latency(-5)
    assert sum(counters.latency_us) == 5
    statistics = BroadcasterStatistics(
        rank=1, world_size=2, sequence=4, messages=4, body_bytes=0, large_messages=0, confirms=0,
        refused=0, heartbeats=0, waits=0, misses=0, spun_s=0.0,
        latency_us=tuple(counters.latency_us),
    )  # fmt: skip
    assert statistics.latency_quantile_us(0.0) == 1.0
    assert statistics.latency_quantile_us(0.8) == 4.0
    assert statistics.latency_quantile_us(1.0) == 1024.0
    with pytest.raises(ValueError, match="share"):
        statistics.latency_quantile_us(1.1)


def test_a_large_body_must_be_sealed_and_of_the_announced_size() -> None:
    descriptor = write_memfd([b"abc" * 500, memoryview(b"abc" * 500)])
    try:
        with read_memfd(descriptor, 3000) as mapped:
            assert mapped[:3] == b"abc"
        with pytest.raises(ProtocolError, match="3000 bytes, header says 2999"):
            read_memfd(descriptor, 2999)
        with pytest.raises(PermissionError):
            os.write(descriptor, b"x")
    finally:
        os.close(descriptor)
    open_memfd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    reader, writer = os.pipe()
    try:
        os.write(open_memfd, b"abc")
        with pytest.raises(ProtocolError, match="not sealed"):
            read_memfd(open_memfd, 3)
        with pytest.raises(ProtocolError, match="no memfd"):
            read_memfd(reader, 3)
    finally:
        for descriptor in (open_memfd, reader, writer):
            os.close(descriptor)


def test_process_states() -> None:
    assert process_state(os.getpid()) == "running"
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert process_state(child.pid) == "dead"
    assert open_pidfd(0) == -1
    with pytest.raises(ProcessLookupError):
        open_pidfd(child.pid)


def test_a_single_rank_needs_no_socket(tmp_path: Path) -> None:
    address = tmp_path / "channel"
    before = sorted(os.listdir("/proc/self/fd"))
    channel = CpuTpBroadcaster.join(rank=0, world_size=1, address=address)
    assert not address.exists()
    channel.publish({"step": 1})
    receipt = channel.confirm({"plan": b"x"})
    assert receipt.committed
    assert receipt.refusals == {}
    assert receipt.sequence == 2
    assert channel.pids == (os.getpid(),)
    assert not select.select([channel.fileno()], [], [], 0)[0]
    with pytest.raises(ProtocolError, match="only peers"):
        channel.receive()
    with pytest.raises(ProtocolError, match="only peers"):
        channel.acknowledge(True)
    channel.close()
    channel.close()
    with pytest.raises(ChannelClosed):
        channel.publish({"step": 2})
    assert channel.fileno() == -1
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_abort_is_the_cause_of_every_later_call(tmp_path: Path) -> None:
    with CpuTpBroadcaster.join(rank=0, world_size=1, address=tmp_path / "channel") as channel:
        channel.abort("the model has no weights")
        channel.abort("a second reason")
        assert select.select([channel.fileno()], [], [], 0)[0]
        causes = []
        for _ in range(2):
            with pytest.raises(PeerLost, match="the model has no weights") as caught:
                channel.publish(None)
            causes.append(caught.value)
        assert causes[0] is causes[1]
        assert causes[0].rank == 0
        assert causes[0].reason == "the model has no weights"


def test_only_the_owner_thread_may_publish(tmp_path: Path) -> None:
    with CpuTpBroadcaster.join(rank=0, world_size=1, address=tmp_path / "channel") as channel:
        caught: list[Exception] = []

        def publish() -> None:
            try:
                channel.publish(1)
            except ProtocolError as error:
                caught.append(error)

        thread = threading.Thread(target=publish, name="stranger")
        thread.start()
        thread.join()
        assert "stranger may call abort" in str(caught[0])
        channel.publish(1)


@pytest.mark.parametrize(("rank", "world_size"), [(0, 0), (-1, 2), (2, 2)])
def test_impossible_ranks_are_refused(tmp_path: Path, rank: int, world_size: int) -> None:
    with pytest.raises(ConfigError, match="expected"):
        CpuTpBroadcaster.join(rank=rank, world_size=world_size, address=tmp_path / "channel")


def test_a_missing_folder_and_a_long_name_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its folder cannot be opened"):
        CpuTpBroadcaster.join(rank=0, world_size=2, address=tmp_path / "no" / "channel")
    with pytest.raises(ConfigError, match="too long for a Unix socket"):
        CpuTpBroadcaster.join(rank=0, world_size=2, address=tmp_path / ("n" * 120))


def test_whoever_sees_a_failure_finds_its_descriptor_readable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    latch = FailureLatch()
    seen: list[tuple[bool, bool]] = []

    def write(descriptor: int, value: int) -> None:
        seen.append((descriptor == latch.wake_fd, latch.error is not None))
        real_write(descriptor, value)

    real_write = os.eventfd_write
    monkeypatch.setattr("tp_runtime.broadcast.failure.os.eventfd_write", write)
    latch.set(ProtocolError("first"), failed=True)
    # the outsiders' descriptor before the error is seen, the owner's after it
    assert seen == [(False, False), (True, True)]
    assert select.select([latch.watch_fd], [], [], 0)[0]
    assert not latch.set(ProtocolError("second"), failed=True)
    latch.close()

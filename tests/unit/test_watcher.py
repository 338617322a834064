"""The watcher of a rank, on a channel of this process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, cast

import pytest

from tp_runtime.errors import BroadcastError, PeerLost
from tp_runtime.watcher import FailureWatcher

if TYPE_CHECKING:
    from collections.abc import Iterator


class FakeChannel:
    """Fails by a byte in a pipe, as an epoll descriptor becomes readable."""

    def __init__(self) -> None:
        self.failure: BroadcastError | None = None
        self.pids: tuple[int, ...] = (os.getpid(),)
        self._read, self._write = os.pipe()
        self._epoll = select.epoll()
        self._epoll.register(self._read, select.EPOLLIN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def abort(self, reason: str) -> None:
        assert self.failure is None, "aborted twice"
        self.failure = PeerLost(f"rank 1 aborted the channel: {reason}", rank=1, reason=reason)
        os.write(self._write, b"x")

    def close(self) -> None:
        self._epoll.close()
        os.close(self._read)
        os.close(self._write)


class FakeGroup:
    def __init__(self) -> None:
        self.cause: Exception | None = None
        self.failed = threading.Event()

    def fail(self, cause: Exception) -> None:
        self.cause = cause
        self.failed.set()


@pytest.fixture
def channel() -> Iterator[FakeChannel]:
    channel = FakeChannel()
    yield channel
    channel.close()


@pytest.fixture
def watcher(channel: FakeChannel) -> Iterator[FailureWatcher]:
    watcher = watcher_of(channel)
    yield watcher
    watcher.close()


def watcher_of(channel: FakeChannel) -> FailureWatcher:
    return FailureWatcher(cast("Any", channel), rank=1, on_failure="raise", start_timeout_s=0.03)


def test_a_failure_of_the_channel_ends_the_group(
    channel: FakeChannel, watcher: FailureWatcher
) -> None:
    group = FakeGroup()
    watcher.watch_group(cast("Any", group))
    channel.abort("rank 1 was stopped")
    assert group.failed.wait(30)
    assert group.cause is channel.failure


def test_a_group_that_comes_after_the_failure_is_told(
    channel: FakeChannel, watcher: FailureWatcher
) -> None:
    channel.abort("rank 1 was stopped")
    deadline = time.monotonic() + 30
    while watcher._thread.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    group = FakeGroup()
    watcher.watch_group(cast("Any", group))
    assert group.cause is channel.failure


@pytest.mark.parametrize("started", [True, False])
def test_a_rank_that_is_stopped_ends_a_start_and_no_step(
    started: bool, channel: FakeChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tp_runtime.watcher._LOOK_S", 0.01)
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    sleeper.send_signal(signal.SIGSTOP)
    channel.pids = (sleeper.pid, os.getpid())
    watcher = watcher_of(channel)
    if started:
        watcher.started()
    group = FakeGroup()
    watcher.watch_group(cast("Any", group))
    try:
        assert group.failed.wait(0.3 if started else 30) is not started
    finally:
        sleeper.kill()
        sleeper.communicate()
        watcher.close()
    if not started:
        assert f"rank 0 (pid {sleeper.pid}) was stopped for 0.03 s" in str(group.cause)

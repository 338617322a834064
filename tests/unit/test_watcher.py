"""The watcher of a rank, on a channel of this process."""

from __future__ import annotations

import os
import select
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
    watcher = FailureWatcher(cast("Any", channel), rank=1, on_failure="raise")
    yield watcher
    watcher.close()


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

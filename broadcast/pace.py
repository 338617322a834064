"""When a waiting peer sleeps, when it spins, and when it lets the kernel wake it."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tp_runtime.broadcast.config import WaitMode

# Spinning longer than this for one message is not latency any more, it is heating.
LATENCY_SPIN_S = 0.02
# A timer wakes late by 50-80 us; a margin near that misses more than it hits.
_LEAST_MARGIN_S = 300e-6
_MOST_MARGIN_S = 2e-3
# An announced message further away than this is waited for in the kernel.
_LONGEST_PREDICTION_S = 1.0
_SELECT_LIMIT = 1024


def cores_available() -> int:
    """Cores that this process may use: its affinity, and the CPU quota of its cgroups."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, _quota_cores(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))))


def _quota_cores(membership: Path, mount: Path) -> int:
    """Whole cores that the cgroup (version 2) and those above it allow; large if no limit."""
    unlimited = 1 << 20
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return unlimited
    inside = next((line[3:] for line in lines if line.startswith("0::")), "/")
    folder = mount / inside.lstrip("/")
    cores = unlimited
    while True:
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            quota, period = "max", "1"
        if quota != "max":
            cores = min(cores, int(quota) // int(period))
        if folder in (mount, folder.parent):
            return cores
        folder = folder.parent


class Pace:
    """Plans one wait from what rank 0 announced and how well it kept to it so far.

    Args:
        mode: see `BroadcasterConfig.wait`.
        may_spin: there is a core for every rank; otherwise a spin only delays the others.
    """

    __slots__ = ("_error_s", "_expected_s", "_trusted", "mode")

    def __init__(self, mode: WaitMode, *, may_spin: bool) -> None:
        self.mode: WaitMode = mode if may_spin else "efficient"
        self._expected_s = 0.0
        self._error_s = 0.0
        self._trusted = True

    @property
    def _margin_s(self) -> float:
        return min(_MOST_MARGIN_S, _LEAST_MARGIN_S + 3 * self._error_s)

    def plan(self, now_s: float) -> tuple[float, float]:
        """Points of the clock until which to sleep and then to spin; in the past = do not."""
        if self.mode == "efficient":
            return 0.0, 0.0
        if self.mode == "latency":
            return 0.0, now_s + LATENCY_SPIN_S
        expected_s = self._expected_s
        if (
            not self._trusted
            or not 0.0 < expected_s - now_s + _MOST_MARGIN_S < _LONGEST_PREDICTION_S
        ):
            return 0.0, 0.0
        margin_s = self._margin_s
        return expected_s - margin_s, expected_s + margin_s

    def observe(self, *, sent_s: float, interval_s: float) -> None:
        """Learn from a message: how far off its announcement was, and what it announces."""
        if self._expected_s:
            error_s = min(abs(sent_s - self._expected_s), 2 * _MOST_MARGIN_S)
            # A spin that missed was pure cost; the next one waits for a prediction that holds.
            self._trusted = error_s <= self._margin_s
            self._error_s += 0.2 * (error_s - self._error_s)
        self._expected_s = sent_s + interval_s if interval_s > 0 else 0.0


class Cadence:
    """Rank 0's expected interval to its next message, when the caller does not tell it."""

    __slots__ = ("_interval_s", "_last_s")

    def __init__(self) -> None:
        self._interval_s = 0.0
        self._last_s = 0.0

    def next_interval_s(self, now_s: float) -> float:
        """Count a message sent now; seconds to the next one, 0 = unknown."""
        gap_s, self._last_s = now_s - self._last_s, now_s
        if gap_s > _LONGEST_PREDICTION_S:
            self._interval_s = 0.0
        elif self._interval_s == 0.0:
            self._interval_s = gap_s
        else:
            self._interval_s += 0.2 * (gap_s - self._interval_s)
        return self._interval_s


class Sleeper:
    """Waits in the kernel until one of two descriptors is readable."""

    def __init__(self, first: int, second: int) -> None:
        self._both = (first, second)
        self._epoll = select.epoll()
        self._epoll.register(first, select.EPOLLIN)
        self._epoll.register(second, select.EPOLLIN)
        # epoll rounds up to whole milliseconds; select does not, but refuses high descriptors
        self._exact = max(self._both) < _SELECT_LIMIT

    def block(self, timeout_s: float) -> None:
        self._epoll.poll(min(timeout_s, 3600.0), 2)

    def sleep(self, timeout_s: float) -> None:
        """As `block`, but never longer than asked."""
        if self._exact:
            select.select(self._both, (), (), timeout_s)
        elif timeout_s >= 1e-3:
            self._epoll.poll(int(timeout_s * 1000) / 1000, 2)

    def close(self) -> None:
        self._epoll.close()


def spin_yield() -> None:
    """Between two looks of a spin: let whoever needs this core have it."""
    os.sched_yield()

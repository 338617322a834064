"""When a waiting peer sleeps, when it spins, and when it lets the kernel wake it."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tp_runtime.broadcast.config import WaitMode

# "latency" spins for the announced interval and a half, within these bounds; longer than that for
# one message is not latency any more, it is heating. Where nothing is announced, as long as this.
_LEAST_SPIN_S = 2e-3
_MOST_SPIN_S = 0.02
_UNANNOUNCED_SPIN_S = 5e-3
# Bounds of how early the spin for an announced message begins: never shorter than the jitter of
# a quiet machine, never longer than it may cost, in seconds and as a share of the interval.
_LEAST_MARGIN_S = 50e-6
_MOST_MARGIN_S = 2e-3
_MOST_SHARE = 0.2
# A timer wakes late by 50-80 us on a usual machine; what it is on this one, and by how much that
# varies, is learned.
_TIMER_LATE_S = 80e-6
_TIMER_VARIES_S = 40e-6
_MISSES_TO_DISTRUST = 2
# An announced message further away than this is waited for in the kernel.
_LONGEST_PREDICTION_S = 1.0
_SELECT_LIMIT = 1024


class Pace:
    """Plans one wait from what rank 0 announced and how well it kept to it so far.

    Args:
        mode: see `BroadcasterConfig.wait`.
        may_spin: there is a core for every rank; otherwise a spin only delays the others.
    """

    __slots__ = (
        "_error_s",
        "_expected_s",
        "_interval_s",
        "_late_s",
        "_missed",
        "_varies_s",
        "mode",
    )

    def __init__(self, mode: WaitMode, *, may_spin: bool) -> None:
        self.mode: WaitMode = mode if may_spin else "efficient"
        self._expected_s = 0.0
        self._interval_s = 0.0
        self._error_s = 0.0
        self._late_s = _TIMER_LATE_S
        self._varies_s = _TIMER_VARIES_S
        self._missed = 0

    @property
    def _margin_s(self) -> float:
        wanted_s = _LEAST_MARGIN_S + self._late_s + 2 * self._varies_s + 3 * self._error_s
        return min(wanted_s, _MOST_MARGIN_S, _MOST_SHARE * self._interval_s)

    def plan(self, now_s: float) -> tuple[float, float]:
        """Points of the clock until which to sleep and then to spin; in the past = do not."""
        if self.mode == "efficient":
            return 0.0, 0.0
        if self.mode == "latency":
            wanted_s = 1.5 * self._interval_s or _UNANNOUNCED_SPIN_S
            return 0.0, now_s + min(max(wanted_s, _LEAST_SPIN_S), _MOST_SPIN_S)
        expected_s = self._expected_s
        if (
            self._missed >= _MISSES_TO_DISTRUST
            or not 0.0 < expected_s - now_s + _MOST_MARGIN_S < _LONGEST_PREDICTION_S
        ):
            return 0.0, 0.0
        margin_s = self._margin_s
        return expected_s - margin_s, expected_s + margin_s

    def woke(self, *, late_s: float) -> None:
        """Learn from a sleep that ended this much after its time; negative: a message ended it."""
        if late_s >= 0:
            off_s = min(late_s, _MOST_MARGIN_S) - self._late_s
            self._late_s += 0.1 * off_s
            self._varies_s += 0.1 * (abs(off_s) - self._varies_s)

    def observe(self, *, sent_s: float, interval_s: float) -> None:
        """Learn from a message: how far off its announcement was, and what it announces."""
        if self._expected_s:
            error_s, margin_s = abs(sent_s - self._expected_s), self._margin_s
            # A spin that missed was pure cost. One alone is a pause of the sender, and to sleep
            # through the next message because of it would be another late one; after two the next
            # spin waits for a prediction that holds.
            self._missed = self._missed + 1 if error_s > margin_s else 0
            # One pause of the sender must not make all later spins long: the margin grows stepwise.
            self._error_s += 0.2 * (min(error_s, 2 * margin_s) - self._error_s)
        self._expected_s = sent_s + interval_s if interval_s > 0 else 0.0
        self._interval_s = interval_s


class Cadence:
    """Rank 0's expected interval to its next message, learned for each kind of message."""

    __slots__ = ("_intervals_s", "_kind", "_last_s", "_odd_s")

    def __init__(self) -> None:
        self._intervals_s: dict[int, float] = {}
        self._kind = 0
        self._last_s = 0.0
        self._odd_s = 0.0

    def expected_s(self, kind: int = 0) -> float:
        """Seconds from a message of this kind to the next message, 0 = unknown.

        Args:
            kind: messages of one kind are followed by intervals of one length, as a step of
                decode by a short and a step of prefill by a long one.
        """
        return self._intervals_s.get(kind, 0.0)

    def count(self, now_s: float, kind: int = 0) -> float:
        """Learn that a message of this kind was sent now; returns `expected_s(kind)`."""
        gap_s, self._last_s = now_s - self._last_s, now_s
        before, self._kind = self._kind, kind
        intervals_s = self._intervals_s
        if gap_s < _LONGEST_PREDICTION_S:
            mean_s = intervals_s.setdefault(before, gap_s)
            if abs(gap_s - mean_s) <= mean_s / 4:
                intervals_s[before] = mean_s + 0.2 * (gap_s - mean_s)
            elif abs(gap_s - self._odd_s) <= self._odd_s / 4:
                # the second of its length in a row is a new cadence, a single one is a pause
                intervals_s[before] = gap_s
            else:
                self._odd_s = gap_s
        return intervals_s.get(kind, 0.0)


class Sleeper:
    """Waits in the kernel until one of two descriptors is readable."""

    def __init__(self, first: int, second: int) -> None:
        self._both = (first, second)
        self._epoll = select.epoll()
        self._epoll.register(first, select.EPOLLIN)
        self._epoll.register(second, select.EPOLLIN)
        # Waits that may be a little longer: seconds, and how many events to report.
        self.block = self._epoll.poll
        # epoll rounds up to whole milliseconds; select does not, but refuses high descriptors
        self._exact = max(self._both) < _SELECT_LIMIT

    def sleep(self, timeout_s: float) -> None:
        """As `block`, but never longer than asked."""
        if self._exact:
            select.select(self._both, (), (), timeout_s)
        elif timeout_s >= 1e-3:
            self._epoll.poll(int(timeout_s * 1000) / 1000, 2)

    def close(self) -> None:
        self._epoll.close()

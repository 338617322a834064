"""When the device worked on each step, and when it stood idle between two."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpan:
    """One step: busy_us from its first to its last work on the device, idle_us since the step
    before it ended (0 for the first)."""

    busy_us: float
    idle_us: float


class DeviceTimes:
    """Marks the beginning and the end of steps; on a GPU by events, which cost it about 1 us each.

    On a CPU the calling thread does the work, and its clock is read instead.

    Args:
        steps: that will be marked; the events of more than these are made in the steps themselves.
    """

    def __init__(self, device: torch.device, *, steps: int = 0) -> None:
        self._cuda = device.type == "cuda"
        self._unused: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._clock: list[tuple[float, float]] = []
        self._began_s = 0.0
        if self._cuda:
            for _ in range(steps):
                pair = _pair()
                for event in pair:
                    event.record()  # the driver makes it with its first use
                self._unused.append(pair)

    def begin(self) -> None:
        if self._cuda:
            pair = self._unused.pop() if self._unused else _pair()
            pair[0].record()
            self._events.append(pair)
        else:
            self._began_s = time.perf_counter()

    def end(self) -> None:
        if self._cuda:
            self._events[-1][1].record()
        else:
            self._clock.append((self._began_s, time.perf_counter()))

    def spans(self) -> Sequence[DeviceSpan]:
        """Every step marked so far, in order. Waits for the device."""
        if not self._cuda:
            busy = [(end - begin) * 1e6 for begin, end in self._clock]
            idle = [
                (after[0] - before[1]) * 1e6
                for before, after in zip(self._clock, self._clock[1:], strict=False)
            ]
        else:
            torch.cuda.synchronize()
            busy = [_between_us(begin, end) for begin, end in self._events]
            idle = [
                _between_us(before[1], after[0])
                for before, after in zip(self._events, self._events[1:], strict=False)
            ]
        return [DeviceSpan(busy_us=b, idle_us=i) for b, i in zip(busy, [0.0, *idle], strict=False)]


def event_with_time() -> torch.cuda.Event:
    """An event that `elapsed_time` may be asked of."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return event_with_time(), event_with_time()


def _between_us(first: torch.cuda.Event, second: torch.cuda.Event) -> float:
    return float(first.elapsed_time(second)) * 1e3

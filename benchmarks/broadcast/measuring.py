"""What the broadcast benchmark measures, how much of it, and what rank 0 does meanwhile."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from contenders import AWAKE, now_ns
from payloads import LARGE, PLAN, RAW

if TYPE_CHECKING:
    from contenders import Contender

_LONGEST_WAIT_S = 1.0
# What others may use of the machine in a segment that counts as undisturbed: a share of a core;
# and the kernel accounts in whole ticks, on each core.
FEW_SHARE = 0.1
FEW_TICKS_S = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured.

    Args:
        rounds: segments of every cell; one more, not counted, comes first.
        dropped, counted: messages of a segment by cadence in milliseconds.
        patience_s: how long segments may wait for a quiet machine, all together.
        nice: priority of every rank; negative needs privilege.
    """

    rounds: int
    dropped: dict[int, int]
    counted: dict[int, int]
    patience_s: float
    nice: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What is measured: a contender, a payload, a cadence. jitter_us: of the gaps, Gaussian."""

    contender: str
    payload: str
    cadence_ms: int
    jitter_us: float = 0.0


@dataclass(slots=True)
class Measured:
    """Samples of one cell; one element of the lists per segment."""

    quiet: list[bool] = field(default_factory=list)
    latency_us: list[np.ndarray[Any, Any]] = field(default_factory=list)
    send_us: list[np.ndarray[Any, Any]] = field(default_factory=list)
    process_cpu: list[float] = field(default_factory=list)
    thread_cpu: list[float] = field(default_factory=list)
    wrong: int = 0

    def row(self, cell: Cell, ranks: int) -> dict[str, Any]:
        quiet = sum(self.quiet)
        undisturbed = 2 * quiet >= len(self.quiet)
        kept = [i for i, alone in enumerate(self.quiet) if alone or not undisturbed]
        latency = np.concatenate([self.latency_us[i] for i in kept])
        send = np.concatenate([self.send_us[i] for i in kept])
        return {
            **dataclasses.asdict(cell),
            "ranks": ranks,
            "messages": len(latency),
            "segments": len(self.quiet),
            "quiet_segments": quiet,
            "undisturbed": undisturbed,
            "wrong": self.wrong,
            "p50_us": _quantile(latency, 50),
            "p99_us": _quantile(latency, 99),
            "max_us": round(float(latency.max()), 2),
            "send_p50_us": _quantile(send, 50),
            "send_p99_us": _quantile(send, 99),
            "waiter_cpu": round(float(np.mean([self.process_cpu[i] for i in kept])), 4),
            "waiter_thread_cpu": round(float(np.mean([self.thread_cpu[i] for i in kept])), 4),
            "all_segments_p50_us": [_quantile(part, 50) for part in self.latency_us],
        }


def _quantile(values: np.ndarray[Any, Any], percent: float) -> float:
    return round(float(np.percentile(values, percent)), 2)


def cells(contenders: list[Contender], *, ranks: int, only: str) -> list[Cell]:
    """Every cell that is measured at this number of ranks."""
    chosen = []
    for contender in contenders:
        if not re.search(only, contender.name):
            continue
        if contender.name == AWAKE:
            chosen.append(Cell(contender=AWAKE, payload=PLAN.name, cadence_ms=1))
            continue
        for payload in (RAW.name, PLAN.name):
            if payload in contender.payloads:
                chosen += [
                    Cell(contender=contender.name, payload=payload, cadence_ms=cadence_ms)
                    for cadence_ms in (1, 10)
                ]
        if LARGE.name in contender.payloads and ranks >= 8 and contender.name != "ours, latency":
            chosen.append(Cell(contender=contender.name, payload=LARGE.name, cadence_ms=10))
    if ranks == 2 and any(cell.contender == "ours, balanced" for cell in chosen):
        # A cadence that is not regular: what the prediction costs when it cannot be exact.
        chosen.append(
            Cell(contender="ours, balanced", payload=PLAN.name, cadence_ms=10, jitter_us=300.0)
        )
    return chosen


class Work:
    """Rank 0's own work between two steps: numpy and Python, some microseconds at a time."""

    def __init__(self) -> None:
        self._numbers = np.ones(8192, dtype=np.float32)

    def until(self, end_ns: int) -> None:
        numbers = self._numbers
        while now_ns() < end_ns:
            np.multiply(numbers, np.float32(0.999), out=numbers)
            sum(range(40))


def machine_busy_s() -> float:
    """Seconds that the cores of this machine were not idle, all together, since it started."""
    numbers = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _idle, _waiting, irq, soft_irq = numbers[:7]
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")


class Quiet:
    """Tells whether anything else runs on this machine, while all the peers are blocked.

    Args:
        patience_s: seconds that all calls of `wait` may take together.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s

    def is_now(self) -> bool:
        """Sampled a few times: whoever was just woken is no company yet."""
        for _ in range(3):
            running = Path("/proc/loadavg").read_text().split()[3].split("/")[0]
            if int(running) <= 1:
                return True
            time.sleep(0.001)
        return False

    def wait(self) -> bool:
        """Wait for a quiet moment while there is patience; False if there was none."""
        started_s = time.monotonic()
        end_s = started_s + min(self._patience_s, _LONGEST_WAIT_S)
        alone = self.is_now()
        while not alone and time.monotonic() < end_s:
            time.sleep(0.01)
            alone = self.is_now()
        self._patience_s = max(0.0, self._patience_s - (time.monotonic() - started_s))
        return alone

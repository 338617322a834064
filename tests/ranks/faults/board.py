"""What the processes of one test group share, and how one of them looks at itself.

Loaded by the nursery (see `nursery`) and therefore by every rank: no pytest, no torch.
"""

from __future__ import annotations

import gc
import mmap
import os
import select
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tp_runtime.broadcast import CpuTpBroadcaster

# A wait of the harness itself that lasts longer than this is a fault of the test or the channel.
PATIENCE_S = 6.0
_LOOK_S = 0.0005


class Stuck(Exception):
    """A rank waited in vain for another one to come to a point of the test."""


def now() -> float:
    """Monotonic seconds that no injected clock changes."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class Board:
    """Numbers in shared memory; made before the fork, so that every rank has it."""

    _STRUCK, _OVER, _OFFSET, _RELEASED = range(4)
    _PID, _ARRIVED = 16, 32

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, mmap.PAGESIZE)
        self._cells = memoryview(self._map).cast("d")

    @property
    def struck_s(self) -> float:
        """When the fault struck; 0 = not yet."""
        return self._cells[self._STRUCK]

    def strike(self) -> None:
        self._cells[self._STRUCK] = now()

    @property
    def over(self) -> bool:
        """The fault was harmless and is over: the group may go on to a good end."""
        return 0.0 < self._cells[self._OVER] <= now()

    def end_fault(self, after_s: float = 0.0) -> None:
        self._cells[self._OVER] = now() + after_s

    @property
    def offset_s(self) -> float:
        """How far the clock of the host has jumped."""
        return self._cells[self._OFFSET]

    def jump(self, seconds: float) -> None:
        self._cells[self._OFFSET] += seconds

    @property
    def released(self) -> bool:
        """All survivors have reported; nobody has to stay alive for the others."""
        return self._cells[self._RELEASED] > 0

    def release(self) -> None:
        self._cells[self._RELEASED] = 1.0

    def pid(self, rank: int) -> int:
        return int(self._cells[self._PID + rank])

    def note_pid(self, rank: int) -> None:
        self._cells[self._PID + rank] = os.getpid()

    def arrived(self, rank: int) -> int:
        """The point of the test that a rank has come to."""
        return int(self._cells[self._ARRIVED + rank])

    def arrive(self, rank: int, point: int) -> None:
        self._cells[self._ARRIVED + rank] = point

    def close(self) -> None:
        self._cells.release()
        self._map.close()


class Me:
    """One rank of a test group.

    Args:
        folder: of the group alone, short enough for a socket.
    """

    def __init__(self, *, rank: int, size: int, board: Board, folder: Path) -> None:
        self.rank = rank
        self.size = size
        self.board = board
        self.folder = folder
        self.address = folder / "channel"

    def arrive(self, point: int) -> None:
        self.board.arrive(self.rank, point)

    def all_at(self, point: int, ranks: list[int]) -> bool:
        return all(self.board.arrived(rank) >= point for rank in ranks)

    def until_all_at(self, point: int, ranks: list[int] | None = None) -> None:
        """Wait until these ranks, or all, have arrived at a point."""
        waited_for = list(range(self.size)) if ranks is None else ranks
        self.until(lambda: self.all_at(point, waited_for), f"{waited_for} at {point}")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for another rank; raises Stuck."""
        limit_s = now() + PATIENCE_S
        while not condition():
            if now() > limit_s:
                raise Stuck(f"rank {self.rank} waited {PATIENCE_S:g} s for {what}")
            time.sleep(_LOOK_S)

    def until_struck(self) -> None:
        self.until(lambda: self.board.struck_s > 0, "the fault")

    def until_released(self) -> None:
        self.until(lambda: self.board.released, "the survivors")


def descriptors() -> dict[int, str]:
    """Open descriptors of this process and what they are; only those that stay open."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            # the one that listed the folder
            continue
    return found


def leaked(before: dict[int, str]) -> list[str]:
    """Descriptors that were not open before."""
    return sorted(
        f"{number} -> {what}"
        for number, what in descriptors().items()
        if before.get(number) != what
    )


def sockets_of(pid: int) -> int:
    """How many sockets a process holds."""
    count = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            count += os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:")
        except OSError:
            # closed meanwhile
            continue
    return count


def state_letter(pid: int) -> str:
    """What the kernel says of the main thread of a process, S: it waits."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def child_pids() -> list[int]:
    """Processes that the main thread of this one started, or inherited, and has not reaped."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def memory_bytes() -> int:
    """Resident memory of this process, without what only waits for the collector."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def peak_memory_bytes() -> int:
    """Highest resident memory so far."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def failed(channel: CpuTpBroadcaster, wait_s: float = 0.0) -> bool:
    """Whether the channel shows its failure to a caller that is in no call."""
    return bool(select.select([channel.fileno()], [], [], wait_s)[0])

"""What every rank of a cell of the fault matrix does, and what it reports.

The survivors use the public API only. The faulty rank does the same up to the point at which its
fault strikes, which is in a phase of `phases`; what it does then is in `actions`.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from tests.ranks.faults import actions, joins
from tests.ranks.faults.board import child_pids, descriptors, failed, leaked, now, threads
from tests.ranks.faults.cells import EPOCH, GRACE_S, TIMEOUT_S, Cell
from tests.ranks.faults.phases import PHASES
from tests.ranks.faults.strike import calm, inject_clock
from tp_runtime.broadcast import BroadcasterConfig, BroadcastError, ChannelClosed, CpuTpBroadcaster
from tp_runtime.broadcast.sockets import process_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ranks.faults.board import Me

# After this long without an error a survivor gives up; far more than it may take.
_NO_ERROR_S = TIMEOUT_S + GRACE_S + 0.7
_STEP_S = 0.005
_AFTER = 10


class NothingRaised(Exception):
    """A survivor went on although a rank had failed."""


class Disorder(Exception):
    """A survivor received another message than the one that was sent."""


class Play:
    """One rank of a cell, from its join to its report."""

    def __init__(self, me: Me, cell: Cell) -> None:
        self.me = me
        self.cell = cell
        self.board = me.board
        self.is_victim = me.rank == cell.victim
        self.others = [rank for rank in range(me.size) if rank not in (0, cell.victim)]
        self.config = BroadcasterConfig(
            run_id="faults",
            epoch=EPOCH,
            timeout_s=TIMEOUT_S,
            join_timeout_s=cell.join_s(me.rank),
        )
        self.channel: CpuTpBroadcaster | None = None
        # Children of the faulty rank that live on, and what it found wrong.
        self.children: list[int] = []
        self.problems: list[str] = []
        # Pauses of a slow reader, before each of its next messages.
        self.pauses: list[float] = []
        self.strikes_at = -1
        self.sent = self.received = 0
        self.acted = False
        self.outcome = "nothing"
        self.named: int | None = None
        self.message = ""
        # The deadline of a survivor runs from the fault, or from its own first call after that.
        self.calls_from_s = now()
        self.elapsed_s = 0.0
        self.noticed_s: float | None = None
        self.same = self.readable = True

    # the whole of it -------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        before = descriptors()
        if self.cell.fault == "jump":
            inject_clock(self.board)
        self._play()
        calm()
        for child in self.children:
            os.kill(child, 9)
            os.waitpid(child, 0)
        return {
            "rank": self.me.rank,
            "outcome": self.outcome,
            "named": self.named,
            "message": self.message,
            "elapsed_s": self.elapsed_s,
            "noticed_s": self.noticed_s,
            "same": self.same,
            "readable": self.readable,
            "acted": self.acted,
            "sent": self.sent,
            "received": self.received,
            "problems": self.problems,
            "leaked": leaked(before),
            "threads": _threads_left(),
            "children": len(child_pids()),
        }

    def _play(self) -> None:
        try:
            channel = self._enter()
        except joins.GoneQuietly:
            self.outcome = "quiet"
            return
        except BroadcastError as error:
            self._failed_with(error)
            return
        self.channel = channel
        try:
            PHASES[self.cell.phase](self, channel)
        except BroadcastError as error:
            self._failed_with(error)
            self._check_that_it_stays_so(channel, error)
        finally:
            channel.close()

    def _failed_with(self, error: BroadcastError) -> None:
        self.elapsed_s = now() - max(self.board.struck_s, self.calls_from_s)
        self.outcome = type(error).__name__
        self.named = getattr(error, "rank", None)
        self.message = str(error)

    def _check_that_it_stays_so(self, channel: CpuTpBroadcaster, error: BroadcastError) -> None:
        """Every later call raises the very same error, and a watcher of the descriptor sees it."""
        self.readable = failed(channel) is not isinstance(error, ChannelClosed)
        calls: list[Callable[[], object]] = [channel.receive]
        if channel.rank == 0:
            calls = [lambda: channel.publish("more"), lambda: channel.confirm("more")]
        for call in calls:
            try:
                call()
            except BroadcastError as later:
                self.same &= later is error
            else:
                self.same = False

    # joining ---------------------------------------------------------------------------------

    def join(self, **changes: Any) -> CpuTpBroadcaster:
        """The real join."""
        return CpuTpBroadcaster.join(
            rank=self.me.rank,
            world_size=self.me.size,
            address=self.me.address,
            config=BroadcasterConfig(**{**vars_of(self.config), **changes}),
        )

    def _enter(self) -> CpuTpBroadcaster:
        if self.cell.phase != "joining":
            return self.join()
        if self.is_victim:
            return joins.join(self)
        self._await_my_turn_to_join()
        self.calls_from_s = now()
        return self.join()

    def _await_my_turn_to_join(self) -> None:
        """Keep the group incomplete until the fault has struck."""
        cell, rank = self.cell, self.me.rank
        if cell.side == "root":
            comes_to_an_impostor = cell.fault in ("garbage", "version", "epoch", "uid") or (
                cell.fault in ("closed_data", "closed_control")
                or (cell.fault == "kill" and cell.size == 2)
            )
            if rank == cell.last and not comes_to_an_impostor:
                self.until_struck()
                if cell.fault == "kill":
                    # or it would be the last in the backlog of a process that is about to go
                    root = self.board.pid(0)
                    self.me.until(lambda: process_state(root) == "dead", "the end of rank 0")
            return
        if cell.size == 2:
            if cell.harmless:
                self.until_struck()
            return
        if rank != cell.last:
            return
        if cell.harmless or cell.fault in ("stop", "kill_parent"):
            self.until_struck()
        elif cell.fault in ("kill", "closed_control", "garbage"):
            # when rank 0 has given up nobody listens any more
            self.me.until(lambda: not self._root_listens(), "the end of rank 0's join")

    def until_struck(self) -> None:
        """Wait for the fault; for a jump of the clock until it is over."""
        self.me.until_struck()
        if self.cell.fault == "jump":
            # a clock that jumps between two lines of a call is none of a host that was suspended
            self.me.until(lambda: self.board.over, "the jump")

    def _root_listens(self) -> bool:
        return self.board.struck_s == 0 or self.me.address.exists()

    # what all phases end with ----------------------------------------------------------------

    def strike(self) -> None:
        """The fault. For one that is harmless this returns and the group goes on."""
        actions.strike(self)

    def go_on(self, channel: CpuTpBroadcaster, *, step_s: float = _STEP_S) -> None:
        """Work until the channel fails or, where the fault is harmless, for a few more messages."""
        self.calls_from_s = now()
        if channel.rank:
            self.receive_all(channel)
        else:
            self._publish_all(channel, step_s=step_s)

    def _publish_all(self, channel: CpuTpBroadcaster, *, step_s: float) -> None:
        least = self.sent + _AFTER
        while not (self.board.over and self.sent >= least):
            self.publish(channel)
            if step_s:
                time.sleep(step_s)
            self._check_time()
        self._finish(channel)

    def _finish(self, channel: CpuTpBroadcaster) -> None:
        if not self.cell.leaves:
            self.acted = channel.confirm("plan").committed
        channel.close()
        self.outcome = "ok"

    def publish(self, channel: CpuTpBroadcaster, body_bytes: int = 0) -> None:
        channel.publish({"n": self.sent, "body": b"x" * body_bytes})
        self.sent += 1

    def receive_all(self, channel: CpuTpBroadcaster) -> None:
        while True:
            if self.received == self.strikes_at:
                self.strikes_at = -1
                self.strike()
            if self.pauses:
                time.sleep(self.pauses.pop())
            message = channel.receive()
            if message == "plan":
                self.acknowledge(channel)
            else:
                self.count(message)
            self._check_time()

    def receive(self, channel: CpuTpBroadcaster, count: int) -> None:
        for _ in range(count):
            self.count(channel.receive())

    def count(self, message: Any) -> None:
        if not isinstance(message, dict) or message.get("n") != self.received:
            raise Disorder(f"expected message {self.received}, got {str(message)[:200]}")
        self.received += 1
        self.me.arrive(self.received)

    def acknowledge(self, channel: CpuTpBroadcaster, detail: str = "") -> None:
        self.acted |= channel.acknowledge(True, detail)

    def _check_time(self) -> None:
        struck_s = self.board.struck_s
        if not self.cell.goes_on and struck_s and now() > struck_s + _NO_ERROR_S:
            raise NothingRaised(f"rank {self.me.rank}: nothing for {_NO_ERROR_S:g} s")


def _threads_left() -> int:
    """The kernel still counts a thread for a moment after it was joined."""
    limit_s = now() + 1.0
    while threads() > 1 and now() < limit_s:
        time.sleep(0.001)
    return threads()


def vars_of(config: BroadcasterConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def run_cell(me: Me, *, fault: str, phase: str, side: str, size: int) -> dict[str, Any]:
    """The program of the nursery."""
    return Play(me, Cell(fault=fault, phase=phase, side=side, size=size)).run()

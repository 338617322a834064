"""What every rank of a cell of the fault matrix does, and what it reports.

The survivors use the public API only. The faulty rank does the same up to the point at which its
fault strikes; what it does then is in `fault_actions`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING, Any

from tests.ranks import fault_actions
from tests.ranks.fault_board import children, descriptors, failed, leaked, now, threads
from tests.ranks.fault_cells import GRACE_S, TIMEOUT_S, Cell
from tests.ranks.fault_strike import after_send, calm, inject_clock, inside
from tp_runtime.broadcast import BroadcasterConfig, BroadcastError, ChannelClosed, CpuTpBroadcaster
from tp_runtime.broadcast.codec import encode
from tp_runtime.broadcast.sockets import PacketSocket, process_state
from tp_runtime.broadcast.wire import Kind, pack_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ranks.fault_board import Me

EPOCH = 3
# After this long without an error a survivor gives up; far more than it may take.
_NO_ERROR_S = TIMEOUT_S + GRACE_S + 0.7
_SETTLE_S = 0.02
_STEP_S = 0.005
_BEFORE = 3
_AFTER = 10
_FLOOD_BYTES = 60_000
# What a wait is silent for, where the fault is to outlast the deadline of the waits.
LONG_S = TIMEOUT_S + 0.05


class NothingRaised(Exception):
    """A survivor went on although a rank had failed."""


class Disorder(Exception):
    """A survivor received another message than the one that was sent."""


class GoneQuietly(Exception):
    """The faulty rank never had a channel and has nothing to report."""


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
            "children": children(),
        }

    def _play(self) -> None:
        try:
            channel = self._enter()
        except GoneQuietly:
            self.outcome = "quiet"
            return
        except BroadcastError as error:
            self._failed_with(error)
            return
        self.channel = channel
        try:
            getattr(self, f"_{self.cell.phase}")(channel)
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
            return fault_actions.join(self)
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
                self._until_struck()
                if cell.fault == "kill":
                    # or it would be the last in the backlog of a process that is about to go
                    root = self.board.pid(0)
                    self.me.until(lambda: process_state(root) == "dead", "the end of rank 0")
            return
        if cell.size == 2:
            if cell.harmless:
                self._until_struck()
            return
        if rank != cell.last:
            return
        if cell.harmless or cell.fault in ("stop", "kill_parent"):
            self._until_struck()
        elif cell.fault in ("kill", "closed_control", "garbage"):
            # when rank 0 has given up nobody listens any more
            self.me.until(lambda: not self._root_listens(), "the end of rank 0's join")

    def _until_struck(self) -> None:
        self.me.until_struck()
        if self.cell.fault == "jump":
            # a clock that jumps between two lines of a call is none of a host that was suspended
            self.me.until(lambda: self.board.over, "the jump")

    def _root_listens(self) -> bool:
        return self.board.struck_s == 0 or self.me.address.exists()

    def _joining(self, channel: CpuTpBroadcaster) -> None:
        self._go_on(channel)

    # what all phases end with ----------------------------------------------------------------

    def strike(self) -> None:
        """The fault. For one that is harmless this returns and the group goes on."""
        fault_actions.strike(self)

    def _go_on(self, channel: CpuTpBroadcaster, *, step_s: float = _STEP_S) -> None:
        """Work until the channel fails or, where the fault is harmless, for a few more messages."""
        self.calls_from_s = now()
        if channel.rank:
            self._receive_all(channel)
        else:
            self._publish_all(channel, step_s=step_s)

    def _publish_all(self, channel: CpuTpBroadcaster, *, step_s: float) -> None:
        least = self.sent + _AFTER
        while not (self.board.over and self.sent >= least):
            self._publish(channel)
            if step_s:
                time.sleep(step_s)
            self._check_time()
        self._finish(channel)

    def _finish(self, channel: CpuTpBroadcaster) -> None:
        if not self.cell.leaves:
            self.acted = channel.confirm("plan").committed
        channel.close()
        self.outcome = "ok"

    def _publish(self, channel: CpuTpBroadcaster, body_bytes: int = 0) -> None:
        channel.publish({"n": self.sent, "body": b"x" * body_bytes})
        self.sent += 1

    def _receive_all(self, channel: CpuTpBroadcaster) -> None:
        while True:
            if self.received == self.strikes_at:
                self.strikes_at = -1
                self.strike()
            if self.pauses:
                time.sleep(self.pauses.pop())
            message = channel.receive()
            if message == "plan":
                self._acknowledge(channel)
            else:
                self._count(message)
            self._check_time()

    def _receive(self, channel: CpuTpBroadcaster, count: int) -> None:
        for _ in range(count):
            self._count(channel.receive())

    def _count(self, message: Any) -> None:
        if not isinstance(message, dict) or message.get("n") != self.received:
            raise Disorder(f"expected message {self.received}, got {str(message)[:200]}")
        self.received += 1
        self.me.arrive(self.received)

    def _acknowledge(self, channel: CpuTpBroadcaster, detail: str = "") -> None:
        self.acted |= channel.acknowledge(True, detail)

    def _check_time(self) -> None:
        struck_s = self.board.struck_s
        if not self.cell.goes_on and struck_s and now() > struck_s + _NO_ERROR_S:
            raise NothingRaised(f"rank {self.me.rank}: nothing for {_NO_ERROR_S:g} s")

    # the phases ------------------------------------------------------------------------------

    def _idle(self, channel: CpuTpBroadcaster) -> None:
        """Nobody is in a call when the fault strikes."""
        self.me.arrive(1)
        if self.is_victim:
            self.me.until(lambda: self.me.all_at(1, list(range(self.me.size))), "all to be idle")
            time.sleep(_SETTLE_S)
            self.strike()
        else:
            self.me.until_struck()
            self._look_out(channel)
        self._go_on(channel)

    def _look_out(self, channel: CpuTpBroadcaster) -> None:
        """See a failure without a call; a silent fault needs one to be seen."""
        silent = self.cell.harmless or self.cell.fault in ("stop", "closed_data")
        if not silent and failed(channel, TIMEOUT_S + GRACE_S):
            self.noticed_s = now() - self.board.struck_s

    def _in_publish(self, channel: CpuTpBroadcaster) -> None:
        """Rank 0 is inside publish, the peers take what comes."""
        floods = self.cell.side == "peer" and self.cell.fault in ("slow", "full", "jump")
        if channel.rank:
            if self.is_victim:
                self.strikes_at = _BEFORE
            self._receive_all(channel)
        for _ in range(_BEFORE):
            self._publish(channel)
        if self.is_victim:
            # between two peers if there are two
            after_send(1, self.strike)
            self._publish(channel)
        self.calls_from_s = now()
        if floods:
            self._flood(channel)
        while not self.board.struck_s:
            self._publish(channel)
        self._go_on(channel, step_s=0.002)

    def _flood(self, channel: CpuTpBroadcaster) -> None:
        """More than a buffer takes."""
        for _ in range(packets_that_fit() + 20):
            self._publish(channel, _FLOOD_BYTES)

    def _in_receive(self, channel: CpuTpBroadcaster) -> None:
        """The peers are inside receive and rank 0 has nothing to publish."""
        if channel.rank == 0:
            for _ in range(_BEFORE):
                self._publish(channel)
            if self.is_victim:
                self.me.until(lambda: self.me.all_at(_BEFORE, self.others), "all to receive")
                time.sleep(_SETTLE_S)
                self.strike()
            self.me.until_struck()
            if self.cell.fault in ("eintr", "jump"):
                time.sleep(LONG_S)
        else:
            self._receive(channel, _BEFORE)
            if self.is_victim:
                inside("receive", self.strike, after_s=_SETTLE_S, ready=lambda: True)
        self._go_on(channel)

    def _in_confirm(self, channel: CpuTpBroadcaster) -> None:
        """Rank 0 waits for answers, and not all have answered."""
        full = self.cell.fault == "full"
        if channel.rank == 0:
            if full and self.is_victim:
                self.strike()
            if full:
                for _ in range(packets_that_fit()):
                    self._publish(channel, _FLOOD_BYTES)
            if self.is_victim:
                # all have the question, and all but the last have answered
                inside(
                    "confirm",
                    self.strike,
                    after_s=_SETTLE_S,
                    ready=lambda: self.me.all_at(1, list(range(1, self.me.size))),
                )
            self.calls_from_s = now()
            self.acted = channel.confirm("plan").committed
        elif full and self.is_victim:
            self.strike()
        elif full and self.cell.side == "root":
            self._answer_one_that_does_not_listen(channel)
        else:
            self._answer_in_confirm(channel)
        self._go_on(channel)

    def _answer_in_confirm(self, channel: CpuTpBroadcaster) -> None:
        while (message := channel.receive()) != "plan":
            self._count(message)
        self.me.arrive(1)
        if self.is_victim:
            self.me.until(lambda: self.me.all_at(2, self.others), "the others to answer")
            time.sleep(_SETTLE_S)
            self.strike()
        elif self.cell.side == "root" and self.me.rank == self.cell.last:
            self.me.until_struck()
        self.calls_from_s = now()
        self.me.arrive(2)
        self._acknowledge(channel)

    def _answer_one_that_does_not_listen(self, channel: CpuTpBroadcaster) -> None:
        while True:
            channel.receive()
            self.calls_from_s = now()
            self._acknowledge(channel, "x" * 100_000)

    def _in_close(self, channel: CpuTpBroadcaster) -> None:
        """The faulty rank is inside close."""
        full = self.cell.fault == "full"
        if channel.rank == 0:
            if full:
                self.me.until_struck()
                for _ in range(packets_that_fit()):
                    self._publish(channel, _FLOOD_BYTES)
                self.calls_from_s = now()
                channel.close()
                self.elapsed_s = now() - self.calls_from_s
                self.outcome = "ok"
                return
            for _ in range(_BEFORE):
                self._publish(channel)
            if self.is_victim:
                self._close_and_strike(channel)
                return
            self.me.until_struck()
        elif self.is_victim and full:
            self.strike()
        elif self.is_victim:
            self._receive(channel, _BEFORE)
            self._close_and_strike(channel)
            return
        self._go_on(channel)

    def _close_and_strike(self, channel: CpuTpBroadcaster) -> None:
        after_send(1, self.strike)
        channel.close()
        if self.board.struck_s == 0:
            self.problems.append("close sent nothing, so the fault did not strike")
        self.outcome = "ok"


def _threads_left() -> int:
    """The kernel still counts a thread for a moment after it was joined."""
    limit_s = now() + 1.0
    while threads() > 1 and now() < limit_s:
        time.sleep(0.001)
    return threads()


def vars_of(config: BroadcasterConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def packets_that_fit() -> int:
    """How many messages of a flood a connection takes before its buffer is full."""
    frame = pack_frame(
        Kind.MESSAGE, encode({"n": 10, "body": b"x" * _FLOOD_BYTES}), sequence=1, epoch=EPOCH
    )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        packets = PacketSocket(ours)
        count = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                packets.send(frame)
                count += 1
    return count


def run_cell(me: Me, *, fault: str, phase: str, side: str, size: int) -> dict[str, Any]:
    """The program of the nursery."""
    return Play(me, Cell(fault=fault, phase=phase, side=side, size=size)).run()

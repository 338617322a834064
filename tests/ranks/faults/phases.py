"""The phases of a channel in which a fault can strike, each as one function for all ranks."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING

from tests.ranks.faults.board import failed, now
from tests.ranks.faults.cells import EPOCH, GRACE_S, LONG_S, TIMEOUT_S
from tests.ranks.faults.strike import after_send, inside
from tp_runtime.broadcast.codec import encode
from tp_runtime.broadcast.sockets import PacketSocket
from tp_runtime.broadcast.wire import Kind, pack_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ranks.faults.play import Play
    from tp_runtime.broadcast import CpuTpBroadcaster

_SETTLE_S = 0.02
_BEFORE = 3
_FLOOD_BYTES = 60_000


def joining(play: Play, channel: CpuTpBroadcaster) -> None:
    """The fault has struck when this begins."""
    play.go_on(channel)


def idle(play: Play, channel: CpuTpBroadcaster) -> None:
    """Nobody is in a call when the fault strikes."""
    play.me.arrive(1)
    if play.is_victim:
        play.me.until_all_at(1)
        time.sleep(_SETTLE_S)
        play.strike()
    else:
        play.until_struck()
        _look_out(play, channel)
    play.go_on(channel)


def _look_out(play: Play, channel: CpuTpBroadcaster) -> None:
    """See a failure without a call; a silent fault needs one to be seen."""
    silent = play.cell.harmless or play.cell.fault in ("stop", "closed_data")
    if not silent and failed(channel, TIMEOUT_S + GRACE_S):
        play.noticed_s = now() - play.board.struck_s


def in_publish(play: Play, channel: CpuTpBroadcaster) -> None:
    """Rank 0 is inside publish, the peers take what comes."""
    floods = play.cell.side == "peer" and play.cell.fault in ("slow", "full", "jump")
    if channel.rank:
        if play.is_victim:
            play.strikes_at = _BEFORE
        play.receive_all(channel)
    for _ in range(_BEFORE):
        play.publish(channel)
    if play.is_victim:
        play.me.until_all_at(_BEFORE, play.others)
        time.sleep(_SETTLE_S)
        # between two peers if there are two
        after_send(1, play.strike)
        play.publish(channel)
    play.calls_from_s = now()
    if floods:
        _flood(play, channel)
    while not play.board.struck_s:
        play.publish(channel)
    play.go_on(channel, step_s=0.002)


def _flood(play: Play, channel: CpuTpBroadcaster) -> None:
    """More than a buffer takes."""
    for _ in range(packets_that_fit() + 20):
        play.publish(channel, _FLOOD_BYTES)


def in_receive(play: Play, channel: CpuTpBroadcaster) -> None:
    """The peers are inside receive and rank 0 has nothing to publish."""
    if channel.rank == 0:
        for _ in range(_BEFORE):
            play.publish(channel)
        if play.is_victim:
            play.me.until_all_at(_BEFORE, play.others)
            time.sleep(_SETTLE_S)
            play.strike()
        play.until_struck()
        if play.cell.fault in ("eintr", "jump"):
            time.sleep(LONG_S)
    else:
        play.receive(channel, _BEFORE)
        if play.is_victim:
            inside("receive", play.strike, after_s=_SETTLE_S, ready=lambda: True)
    play.go_on(channel)


def in_confirm(play: Play, channel: CpuTpBroadcaster) -> None:
    """Rank 0 waits for answers, and not all have answered."""
    full = play.cell.fault == "full"
    if channel.rank == 0:
        if full and play.is_victim:
            play.strike()
        if full:
            for _ in range(packets_that_fit()):
                play.publish(channel, _FLOOD_BYTES)
        if play.is_victim:
            # all have the question, and all but the last have answered
            inside(
                "confirm",
                play.strike,
                after_s=_SETTLE_S,
                ready=lambda: play.me.all_at(1, list(range(1, play.me.size))),
            )
        play.calls_from_s = now()
        play.acted = channel.confirm("plan").committed
    elif full and play.is_victim:
        play.strike()
    elif full and play.cell.side == "root":
        _answer_one_that_does_not_listen(play, channel)
    else:
        _answer_in_confirm(play, channel)
    play.go_on(channel)


def _answer_in_confirm(play: Play, channel: CpuTpBroadcaster) -> None:
    while (message := channel.receive()) != "plan":
        play.count(message)
    play.me.arrive(1)
    if play.is_victim:
        play.me.until_all_at(2, play.others)
        time.sleep(_SETTLE_S)
        play.strike()
    elif play.cell.side == "root" and play.me.rank == play.cell.last:
        play.until_struck()
    play.calls_from_s = now()
    play.me.arrive(2)
    play.acknowledge(channel)


def _answer_one_that_does_not_listen(play: Play, channel: CpuTpBroadcaster) -> None:
    while True:
        channel.receive()
        play.calls_from_s = now()
        play.acknowledge(channel, "x" * 100_000)


def in_close(play: Play, channel: CpuTpBroadcaster) -> None:
    """The faulty rank is inside close."""
    full = play.cell.fault == "full"
    if channel.rank == 0:
        if full:
            play.until_struck()
            for _ in range(packets_that_fit()):
                play.publish(channel, _FLOOD_BYTES)
            play.calls_from_s = now()
            channel.close()
            play.elapsed_s = now() - play.calls_from_s
            play.outcome = "ok"
            return
        for _ in range(_BEFORE):
            play.publish(channel)
        if play.is_victim:
            _close_and_strike(play, channel)
            return
        play.until_struck()
    elif play.is_victim and full:
        play.strike()
    elif play.is_victim:
        play.receive(channel, _BEFORE)
        _close_and_strike(play, channel)
        return
    play.go_on(channel)


def _close_and_strike(play: Play, channel: CpuTpBroadcaster) -> None:
    play.me.until_all_at(_BEFORE, play.others)
    time.sleep(_SETTLE_S)  # they are inside their next receive
    after_send(1, play.strike)
    channel.close()
    if play.board.struck_s == 0:
        play.problems.append("close sent nothing, so the fault did not strike")
    play.outcome = "ok"


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


PHASES: dict[str, Callable[[Play, CpuTpBroadcaster], None]] = {
    "joining": joining,
    "idle": idle,
    "in_publish": in_publish,
    "in_receive": in_receive,
    "in_confirm": in_confirm,
    "in_close": in_close,
}

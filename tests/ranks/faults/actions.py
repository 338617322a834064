"""What the faulty rank of a cell does when its fault strikes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from typing import TYPE_CHECKING, NoReturn

from tests.ranks.faults.board import sockets_of, state_letter
from tests.ranks.faults.cells import EPOCH, LONG_S, TIMEOUT_S
from tests.ranks.faults.strike import (
    Sockets,
    fork_and,
    freeze_and,
    own_sockets,
    pause_all,
    storm_of_signals,
)
from tp_runtime.broadcast import CpuTpBroadcaster, ProtocolError
from tp_runtime.broadcast.codec import encode
from tp_runtime.broadcast.wire import Kind, pack_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ranks.faults.play import Play

# Well below the deadline, well above anything that is noticed by chance.
SLOW_S = 0.12
_JUMP_S = 10.0
_SLOW_READS = [0.1] * 6
_SETTLE_S = 0.02


def strike(play: Play) -> None:
    """Do the harm; returns if the rank is to go on."""
    _ACTIONS[play.cell.fault](play)
    if play.cell.harmless and play.cell.fault != "jump":
        play.board.end_fault(LONG_S if play.cell.fault == "eintr" else 0.0)


def _kill(play: Play) -> None:
    play.board.strike()
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_parent(play: Play) -> None:
    held = own_sockets()

    def hold() -> NoReturn:
        assert held.control or play.cell.phase == "joining"
        _sleep_until_killed()

    fork_and(hold)
    _kill(play)


def _sleep_until_killed() -> NoReturn:
    while True:
        signal.pause()


def _stop(play: Play) -> None:
    play.board.strike()
    os.kill(os.getpid(), signal.SIGSTOP)


def _slow(play: Play) -> None:
    if play.cell.side == "root":
        pause_all(SLOW_S, play.board)
        return
    play.board.strike()
    if play.cell.phase == "in_publish":
        play.pauses = list(_SLOW_READS)
    else:
        time.sleep(SLOW_S)


def _closed_data(play: Play) -> None:
    _harm(play, lambda sockets: sockets.shutdown("data"))


def _closed_control(play: Play) -> None:
    _harm(play, lambda sockets: sockets.shutdown("control"))


def _harm(play: Play, harm: Callable[[Sockets], None]) -> None:
    if play.cell.side == "root":
        freeze_and(harm, play.board)
        return
    sockets = own_sockets()
    play.board.strike()
    harm(sockets)
    sockets.close()


def _write(play: Play) -> None:
    """Write what the protocol does not allow, then say nothing more until the others are done."""
    packet = bad_packet(play)
    # Rank 0 reads nothing but control; a peer that is in no call does the same.
    on = "control" if play.cell.side == "peer" or play.cell.phase == "idle" else "data"
    _harm(play, lambda sockets: sockets.send(on, packet))
    if play.cell.side == "peer":
        play.me.until_released()


def bad_packet(play: Play) -> bytes:
    """What the protocol does not allow, in the form of the cell."""
    if play.cell.fault == "garbage":
        return random.Random(play.cell.id).randbytes(64)
    kinds = {"peer": Kind.PING, "root": Kind.MESSAGE}
    kind = kinds[play.cell.side]
    body = b"\xc0"
    if play.cell.side == "root" and play.cell.phase == "idle":
        kind, body = Kind.HEARTBEAT, b""
    if play.cell.side == "root" and play.cell.phase == "in_confirm":
        kind, body = Kind.DECISION, encode({"sequence": 1, "committed": True})
    epoch = EPOCH - (play.cell.fault == "epoch")
    frame = bytearray(pack_frame(kind, body, sequence=1, epoch=epoch))
    if play.cell.fault == "version":
        frame[2] += 1
    return bytes(frame)


def _full(play: Play) -> None:
    if play.cell.side == "root":
        # Asks, decides, and takes no answer. All answers but the last few have room.
        freeze_and(_ask_often, play.board)
        return
    play.board.strike()
    play.me.until_released()


def _ask_often(sockets: Sockets) -> None:
    for sequence in range(1, 80, 2):
        question = pack_frame(
            Kind.CONFIRM,
            encode("plan"),
            sequence=sequence,
            epoch=EPOCH,
            interval_us=int(TIMEOUT_S * 1e6),
        )
        decision = pack_frame(
            Kind.DECISION,
            encode({"sequence": sequence, "committed": True}),
            sequence=sequence + 1,
            epoch=EPOCH,
        )
        sockets.send("data", question)
        sockets.send("data", decision)


def _exec(play: Play) -> None:
    child = subprocess.Popen(["sleep", "60"], close_fds=False, stdin=subprocess.DEVNULL)
    play.children.append(child.pid)
    child.returncode = 0  # reaped with the other children
    held = sockets_of(child.pid)
    if held:
        play.problems.append(f"the program that was started holds {held} sockets")
    play.board.strike()  # now, or the time of the start itself would be taken for a fault


def _fork(play: Play) -> None:
    channel = play.channel
    reader, writer = os.pipe()

    def touch_and_live_on() -> None:
        os.close(reader)
        os.write(writer, _touch(channel).encode())
        os.close(writer)
        _sleep_until_killed()

    play.children.append(fork_and(touch_and_live_on))
    os.close(writer)
    said = os.read(reader, 10_000).decode()
    os.close(reader)
    if said != "refused":
        play.problems.append(f"a forked child that used the channel: {said}")
    play.board.strike()


def _touch(channel: CpuTpBroadcaster | None) -> str:
    """What a forked child finds out."""
    if channel is None:
        return "refused"
    for call in ("receive", "abort", "publish"):
        try:
            getattr(channel, call)(*([] if call == "receive" else ["stolen"]))
        except ProtocolError:
            continue
        return f"{call} went well"
    channel.close()
    held = sockets_of(os.getpid())
    return f"it holds {held} sockets" if held else "refused"


def _eintr(play: Play) -> None:
    play.board.strike()
    storm_of_signals()


def _jump(play: Play) -> None:
    phase, side = play.cell.phase, play.cell.side
    if phase == "joining" or (phase, side) in (("in_receive", "peer"), ("in_confirm", "root")):
        # this rank is inside a call: while it waits there, as a host is suspended
        play.children.append(fork_and(lambda: _jump_while_it_waits(play)))
        return
    play.board.strike()
    if (phase, side) == ("in_publish", "peer"):
        time.sleep(SLOW_S / 2)  # rank 0 waits for room by now
        play.board.jump(_JUMP_S)
        time.sleep(SLOW_S / 2)
    else:
        play.board.jump(_JUMP_S)
    play.board.end_fault()


def _jump_while_it_waits(play: Play) -> None:
    """In a child of the rank."""
    time.sleep(_SETTLE_S)
    waiting = 0
    while waiting < 2:  # once may be the moment before a wait
        waiting = waiting + 1 if state_letter(os.getppid()) == "S" else 0
        time.sleep(0)
    play.board.strike()
    play.board.jump(_JUMP_S)
    play.board.end_fault()


_ACTIONS: dict[str, Callable[[Play], None]] = {
    "kill": _kill,
    "kill_parent": _kill_parent,
    "stop": _stop,
    "closed_data": _closed_data,
    "closed_control": _closed_control,
    "garbage": _write,
    "version": _write,
    "epoch": _write,
    "full": _full,
    "slow": _slow,
    "exec": _exec,
    "fork": _fork,
    "eintr": _eintr,
    "jump": _jump,
}

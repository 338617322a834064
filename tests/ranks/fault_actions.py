"""What the faulty rank of a cell does when its fault strikes."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, NoReturn

from tests.ranks import fault_play
from tests.ranks.fault_board import now, sockets_of
from tests.ranks.fault_strike import (
    Sockets,
    after_send,
    fork_and,
    freeze_and,
    inside,
    own_sockets,
    pause_all,
    storm_of_signals,
)
from tp_runtime.broadcast import CpuTpBroadcaster, HandshakeRefused, ProtocolError
from tp_runtime.broadcast.codec import encode
from tp_runtime.broadcast.handshake import Identity
from tp_runtime.broadcast.rendezvous import Listener
from tp_runtime.broadcast.wire import HEADER_BYTES, Kind, pack_frame

if TYPE_CHECKING:
    from tests.ranks.fault_play import Play

NOBODY = 65534
# Well below the deadline, well above anything that is noticed by chance.
SLOW_S = 0.12
_JUMP_S = 10.0
_SLOW_READS = [0.1] * 6
_SETTLE_S = 0.02
_PATIENCE_S = 4.0


def strike(play: Play) -> None:
    """Do the harm; returns if the rank is to go on."""
    _ACTIONS[play.cell.fault](play)
    if play.cell.harmless:
        play.board.end_fault(fault_play.LONG_S if play.cell.fault == "eintr" else 0.0)


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


def _harm(play: Play, harm: _Harm) -> None:
    if play.cell.side == "root":
        freeze_and(harm, play.board)
        return
    sockets = own_sockets()
    play.board.strike()
    harm(sockets)
    sockets.close()


def _write(play: Play) -> None:
    """Write what the protocol does not allow, then say nothing more until the others are done."""
    packet = _bad_packet(play)
    # Rank 0 reads nothing but control; a peer that is in no call does the same.
    on = "control" if play.cell.side == "peer" or play.cell.phase == "idle" else "data"
    _harm(play, lambda sockets: sockets.send(on, packet))
    if play.cell.side == "peer":
        play.me.until_released()


def _bad_packet(play: Play) -> bytes:
    if play.cell.fault == "garbage":
        return random.Random(play.cell.id).randbytes(64)
    kinds = {"peer": Kind.PING, "root": Kind.MESSAGE}
    kind = kinds[play.cell.side]
    body = b"\xc0"
    if play.cell.side == "root" and play.cell.phase == "idle":
        kind, body = Kind.HEARTBEAT, b""
    if play.cell.side == "root" and play.cell.phase == "in_confirm":
        kind, body = Kind.DECISION, encode({"sequence": 1, "committed": True})
    epoch = fault_play.EPOCH - (play.cell.fault == "epoch")
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
            epoch=fault_play.EPOCH,
            interval_us=int(fault_play.TIMEOUT_S * 1e6),
        )
        decision = pack_frame(
            Kind.DECISION,
            encode({"sequence": sequence, "committed": True}),
            sequence=sequence + 1,
            epoch=fault_play.EPOCH,
        )
        sockets.send("data", question)
        sockets.send("data", decision)


def _exec(play: Play) -> None:
    play.board.strike()
    child = subprocess.Popen(["sleep", "60"], close_fds=False, stdin=subprocess.DEVNULL)
    play.children.append(child.pid)
    child.returncode = 0  # reaped with the other children
    held = sockets_of(child.pid)
    if held:
        play.problems.append(f"the program that was started holds {held} sockets")


def _fork(play: Play) -> None:
    channel = play.channel
    reader, writer = os.pipe()
    play.board.strike()

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
    play.board.strike()
    if play.cell.phase == "in_publish" and play.cell.side == "peer":
        time.sleep(SLOW_S / 2)  # rank 0 waits for room by now
        play.board.jump(_JUMP_S)
        time.sleep(SLOW_S / 2)
    else:
        play.board.jump(_JUMP_S)


# joining ------------------------------------------------------------------------------------


def join(play: Play) -> CpuTpBroadcaster:
    """The join of the faulty rank; raises GoneQuietly where it never had a channel."""
    if play.cell.side == "root":
        return _join_as_root(play)
    return _join_as_peer(play)


def _all_but_the_last_have_joined(play: Play) -> bool:
    """A peer that was welcomed holds two sockets."""
    others = [rank for rank in play.others if rank != play.cell.last]
    return all(play.board.pid(rank) and sockets_of(play.board.pid(rank)) >= 2 for rank in others)


def _join_as_root(play: Play) -> CpuTpBroadcaster:
    fault = play.cell.fault
    if fault in ("garbage", "version"):
        _listen(play, lambda connection: connection.send(_bad_welcome(play)))
        raise fault_play.GoneQuietly
    if fault == "closed_control":
        _listen(play, lambda connection: None)
        raise fault_play.GoneQuietly
    if fault == "kill" and play.cell.size == 2:
        _listen(play, lambda connection: _kill(play))
    if fault == "closed_data":
        # the last WELCOME is on its way: all data connections exist, no rank has one to use yet
        after_send(play.me.size - 1, lambda: _shutdown_own_data(play))
        play.join()
        os.kill(os.getpid(), signal.SIGSTOP)
        raise fault_play.GoneQuietly
    if fault == "epoch":
        play.board.strike()
        return play.join(epoch=fault_play.EPOCH + 1)
    if fault == "uid":
        os.chown(play.me.folder, NOBODY, NOBODY)
        _become_nobody()
        play.board.strike()
        return play.join()
    inside(
        "join",
        lambda: strike(play),
        after_s=_SETTLE_S,
        ready=lambda: play.me.address.exists() and _all_but_the_last_have_joined(play),
    )
    return play.join()


def _shutdown_own_data(play: Play) -> None:
    sockets = own_sockets()
    play.board.strike()
    sockets.shutdown("data")
    sockets.close()


def _bad_welcome(play: Play) -> bytes:
    if play.cell.fault == "garbage":
        return random.Random(play.cell.id).randbytes(64)
    frame = bytearray(pack_frame(Kind.WELCOME, b"\x80", sequence=1, epoch=fault_play.EPOCH))
    frame[2] += 1
    return bytes(frame)


def _listen(play: Play, answer: _Answer) -> None:
    """Take the HELLO of every peer, answer each, and close."""
    listener = Listener(play.me.address, backlog=play.me.size)
    connections: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        while len(connections) < play.me.size - 1:
            _wait_for(listener.sock)
            connection = stack.enter_context(listener.sock.accept()[0])
            _wait_for(connection)
            connection.recv(4096)
            connections.append(connection)
        play.board.strike()
        for connection in connections:
            answer(connection)
        if play.cell.fault != "closed_control":
            play.me.until_released()


def _wait_for(sock: socket.socket) -> None:
    if not select.select([sock], [], [], _PATIENCE_S)[0]:
        raise TimeoutError("a peer did not come to the impostor")


def _join_as_peer(play: Play) -> CpuTpBroadcaster:
    fault, size = play.cell.fault, play.cell.size
    if fault in ("version", "epoch", "uid") or (fault == "garbage" and size == 2):
        play.board.strike()
        play.problems += _come_as_a_stranger(play)
        play.board.end_fault()
        return play.join()
    if play.cell.harmless:
        inside(
            "join",
            lambda: strike(play),
            after_s=_SETTLE_S,
            ready=lambda: size == 2 or _all_but_the_last_have_joined(play),
        )
        return play.join()
    with _connected(play) as connection:
        # Of two ranks the other would complete the group; where that is not wanted, say nothing.
        if size > 2 or fault in ("kill_parent", "closed_data"):
            _be_welcomed(play, connection)
        elif fault == "stop":
            time.sleep(_SETTLE_S)
        play.board.strike()
        if fault == "garbage":
            connection.send(_bad_packet(play))
        elif fault == "closed_control":
            connection.shutdown(socket.SHUT_RDWR)
        elif fault != "closed_data":
            _ACTIONS[fault](play)
        play.me.until_released()
    raise fault_play.GoneQuietly


def _connected(play: Play) -> socket.socket:
    """A connection to rank 0, which may not listen yet."""
    limit_s = now() + _PATIENCE_S
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(os.fspath(play.me.address))
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            if now() > limit_s:
                raise
            time.sleep(0.001)
        else:
            sock.settimeout(_PATIENCE_S)
            return sock


def _be_welcomed(play: Play, connection: socket.socket) -> None:
    """Come as far as a rank that waits for the others."""
    connection.send(_hello(play))
    frame, descriptors, _, _ = socket.recv_fds(connection, 4096, 16)
    if frame[3] != Kind.WELCOME:
        raise ConnectionError(f"expected WELCOME, got {frame[HEADER_BYTES:]!r}")
    if play.cell.fault == "closed_data":
        data = socket.socket(fileno=os.dup(descriptors[0]))
        data.shutdown(socket.SHUT_RDWR)
        data.close()
    else:
        play.me.until(lambda: _all_but_the_last_have_joined(play), "the others to be welcomed")


def _hello(play: Play) -> bytes:
    identity = Identity.of(play.config, rank=play.me.rank, world_size=play.me.size)
    return pack_frame(Kind.HELLO, encode(identity.body()), sequence=1, epoch=fault_play.EPOCH)


def _come_as_a_stranger(play: Play) -> list[str]:
    """Be refused; returns what was wrong with the refusal."""
    fault = play.cell.fault
    if fault == "epoch":
        return _refused(play, "field epoch", epoch=fault_play.EPOCH - 1)
    if fault == "uid":
        return _come_as_nobody(play)
    hello = bytearray(_hello(play))
    if fault == "version":
        hello[2] += 1
    else:
        hello = bytearray(_bad_packet(play))
    word = b"protocol version" if fault == "version" else b"magic"
    return _refused_by_rank_0(play, hello, word)


def _refused_by_rank_0(play: Play, hello: bytes | bytearray, word: bytes) -> list[str]:
    with _connected(play) as connection:
        # rank 0 may have answered and closed before it was asked
        with contextlib.suppress(BrokenPipeError):
            connection.send(hello)
        try:
            answer = connection.recv(4096)
        except ConnectionResetError:
            # our HELLO was not read, which is reported once, before what was said to us
            answer = connection.recv(4096)
    if answer[3] != Kind.REFUSED or word not in answer:
        return [f"instead of a refusal because of {word!r} the answer was {answer!r}"]
    return []


def _refused(play: Play, word: str, **changes: object) -> list[str]:
    try:
        play.join(**changes)
    except HandshakeRefused as error:
        return [] if word in str(error) else [f"refused, but not because of {word}: {error}"]
    return [f"not refused: {word}"]


def _come_as_nobody(play: Play) -> list[str]:
    """Another user is kept out by the mode of the file, and if not by that, by rank 0."""
    play.me.until(play.me.address.exists, "rank 0 to listen")
    problems = _ask_nobody(play, "Permission denied")
    os.chmod(play.me.address, 0o666)
    problems += _ask_nobody(play, "uid: the listener")
    return problems + _ask_nobody(play, "")


def _ask_nobody(play: Play, word: str) -> list[str]:
    """Come as another user, by the public join where a word of its error is given."""
    reader, writer = os.pipe()

    def ask() -> None:
        _become_nobody()
        problems = _refused(play, word) if word else _refused_by_rank_0(play, _hello(play), b"uid")
        os.write(writer, "\n".join(problems).encode())

    child = fork_and(ask)
    os.close(writer)
    said = os.read(reader, 10_000).decode()
    os.close(reader)
    _, status = os.waitpid(child, 0)
    return [*said.splitlines(), *([f"nobody ended with {status}"] if status else [])]


def _become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


if TYPE_CHECKING:
    from collections.abc import Callable

    _Harm = Callable[[Sockets], None]
    _Answer = Callable[[socket.socket], object]

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

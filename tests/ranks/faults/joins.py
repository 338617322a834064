"""How the faulty rank of a cell joins, where the fault is one of the join."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import time
from typing import TYPE_CHECKING

from tests.ranks.faults.actions import bad_packet, strike
from tests.ranks.faults.board import sockets_of
from tests.ranks.faults.cells import EPOCH
from tests.ranks.faults.strike import after_send, connected, fork_and, inside, own_sockets
from tp_runtime.broadcast import CpuTpBroadcaster, HandshakeRefused
from tp_runtime.broadcast.codec import encode
from tp_runtime.broadcast.handshake import Identity
from tp_runtime.broadcast.rendezvous import Listener
from tp_runtime.broadcast.wire import HEADER_BYTES, Kind, pack_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ranks.faults.play import Play

NOBODY = 65534
_SETTLE_S = 0.02
_PATIENCE_S = 4.0


class GoneQuietly(Exception):
    """The faulty rank never had a channel and has nothing to report."""


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
        raise GoneQuietly
    if fault == "closed_control":
        _listen(play, lambda connection: None)
        raise GoneQuietly
    if fault == "kill" and play.cell.size == 2:
        _listen(play, lambda connection: strike(play))
    if fault == "closed_data":
        # the last WELCOME is on its way: all data connections exist, no rank has one to use yet
        after_send(play.me.size - 1, lambda: _shutdown_own_data(play))
        play.join()
        os.kill(os.getpid(), signal.SIGSTOP)
        raise GoneQuietly
    if fault == "epoch":
        play.board.strike()
        return play.join(epoch=EPOCH + 1)
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
    frame = bytearray(pack_frame(Kind.WELCOME, b"\x80", sequence=1, epoch=EPOCH))
    frame[2] += 1
    return bytes(frame)


def _listen(play: Play, answer: Callable[[socket.socket], object]) -> None:
    """Take the HELLO of every peer, answer each, and close."""
    listener = Listener(play.me.address, backlog=play.me.size, timeout_s=10)
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
    with connected(play.me) as connection:
        # Of two ranks the other would complete the group; where that is not wanted, say nothing.
        if size > 2 or fault in ("kill_parent", "closed_data"):
            _be_welcomed(play, connection)
        elif fault == "stop":
            time.sleep(_SETTLE_S)
        play.board.strike()
        if fault == "garbage":
            connection.send(bad_packet(play))
        elif fault == "closed_control":
            connection.shutdown(socket.SHUT_RDWR)
        elif fault != "closed_data":
            strike(play)
        play.me.until_released()
    raise GoneQuietly


def _be_welcomed(play: Play, connection: socket.socket) -> None:
    """Come as far as a rank that waits for the others."""
    connection.send(_hello(play))
    frame, descriptors, _, _ = socket.recv_fds(connection, 4096, 16)
    if frame[3] != Kind.WELCOME:
        raise ConnectionError(f"expected WELCOME, got {frame[HEADER_BYTES:]!r}")
    # one that is gone before rank 0 has its pidfd never was a member
    time.sleep(_SETTLE_S)
    if play.cell.fault == "closed_data":
        data = socket.socket(fileno=os.dup(descriptors[0]))
        data.shutdown(socket.SHUT_RDWR)
        data.close()
    else:
        play.me.until(lambda: _all_but_the_last_have_joined(play), "the others to be welcomed")


def _hello(play: Play) -> bytes:
    identity = Identity.of(play.config, rank=play.me.rank, world_size=play.me.size)
    return pack_frame(Kind.HELLO, encode(identity.body()), sequence=1, epoch=EPOCH)


def _come_as_a_stranger(play: Play) -> list[str]:
    """Be refused; returns what was wrong with the refusal."""
    fault = play.cell.fault
    if fault == "epoch":
        return _refused(play, "field epoch", epoch=EPOCH - 1)
    if fault == "uid":
        return _come_as_nobody(play)
    hello = bytearray(_hello(play))
    if fault == "version":
        hello[2] += 1
    else:
        hello = bytearray(bad_packet(play))
    word = b"protocol version" if fault == "version" else b"magic"
    return _refused_by_rank_0(play, hello, word)


def _refused_by_rank_0(play: Play, hello: bytes | bytearray, word: bytes) -> list[str]:
    with connected(play.me) as connection:
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

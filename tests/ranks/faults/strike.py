"""How a fault strikes at a chosen point, and how a process does harm through its sockets.

No private part of the channel is used here: a call is struck from inside by a signal or by a
profile function, and the sockets are those that the process has.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.ranks.faults.board import PATIENCE_S, descriptors, now
from tp_runtime.broadcast.sockets import process_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from tests.ranks.faults.board import Board, Me

_TICK_S = 0.003
# Names under which C functions send bytes.
SENDS = frozenset({"send", "sendmsg", "sendto", "write", "writev"})


def inside(
    call: str, strike: Callable[[], None], *, after_s: float, ready: Callable[[], bool]
) -> None:
    """Strike while the main thread is inside a method of this name, also if it is blocked there.

    Args:
        after_s: not earlier than this.
        ready: looked at every few milliseconds from then on; the strike comes one look later,
            when the thread is done with what made it ready and waits again.
    """
    was_ready = has_struck = False

    def is_call(frame: FrameType) -> bool:
        module = frame.f_globals.get("__name__", "")
        return frame.f_code.co_name == call and module.startswith("tp_runtime.broadcast")

    def tick(signum: int, frame: FrameType | None) -> None:
        nonlocal was_ready, has_struck
        if has_struck:
            return  # a signal that came while the one before was handled
        while frame is not None and not is_call(frame):
            frame = frame.f_back
        if frame is not None and was_ready:
            has_struck = True
            signal.setitimer(signal.ITIMER_REAL, 0)
            strike()
        was_ready = frame is not None and ready()

    signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, after_s, _TICK_S)


def after_send(count: int, strike: Callable[[], None]) -> None:
    """Strike when the main thread has sent this many packets from now on."""
    left = count

    def look(frame: FrameType, event: str, function: Any) -> None:
        nonlocal left
        if event == "c_return" and getattr(function, "__name__", "") in SENDS:
            left -= 1
            if left == 0:
                sys.setprofile(None)
                strike()

    sys.setprofile(look)


def storm_of_signals() -> None:
    """Interrupt the system calls of the main thread some thousand times a second from now on."""
    signal.signal(signal.SIGALRM, lambda signum, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)


def calm() -> None:
    """End whatever was started above."""
    sys.setprofile(None)
    signal.setitimer(signal.ITIMER_REAL, 0)


class Sockets(NamedTuple):
    """Duplicates of the sockets of this process, which also outlive a fork of the channel.

    Data connections come from a socketpair and have no name; those of control have one.
    """

    data: list[socket.socket]
    control: list[socket.socket]

    def send(self, on: str, packet: bytes) -> None:
        for sock in self.data if on == "data" else self.control:
            sock.send(packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def shutdown(self, on: str) -> None:
        for sock in self.data if on == "data" else self.control:
            sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in (*self.data, *self.control):
            sock.close()


def fork_and(work: Callable[[], object]) -> int:
    """Do something in a forked child, which ends with 0 if that went well; returns its pid."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - must not go on in the code of its parent
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def connected(me: Me) -> socket.socket:
    """A raw connection to rank 0, which may not listen yet."""
    limit_s = now() + PATIENCE_S
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(os.fspath(me.address))
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            if now() > limit_s:
                raise
            time.sleep(0.001)
        else:
            sock.settimeout(PATIENCE_S)
            return sock


def own_sockets() -> Sockets:
    found = Sockets([], [])
    # the list is complete before the first duplicate takes a number
    for number in [number for number, what in descriptors().items() if what.startswith("socket:")]:
        sock = socket.socket(fileno=os.dup(number))
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            sock.close()
        elif sock.getsockname() or sock.getpeername():
            found.control.append(sock)
        else:
            found.data.append(sock)
    return found


def freeze_and(harm: Callable[[Sockets], None], board: Board) -> None:
    """Stop this process, then let a child of it do the harm: nothing but the harm speaks.

    Without that, the channel of this process would notice what its peers do about the harm and
    tell all of them, and who is blamed would be a race. Returns when somebody continues it.
    """
    sockets = own_sockets()

    def strike() -> None:
        _await_stop_of_parent()
        board.strike()
        harm(sockets)

    child = fork_and(strike)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(child, 0)
    sockets.close()


def pause_all(seconds: float, board: Board) -> None:
    """Stop every thread of this process for a while."""

    def wake_up() -> None:
        _await_stop_of_parent()
        board.strike()
        time.sleep(seconds)
        os.kill(os.getppid(), signal.SIGCONT)

    child = fork_and(wake_up)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(child, 0)


def _await_stop_of_parent() -> None:
    while process_state(os.getppid()) != "stopped":
        time.sleep(0.0005)


def inject_clock(board: Board) -> None:
    """Let the channel read a clock that jumps for all ranks of the group when the board says so.

    Everything in the package that refers to the monotonic clock is pointed to another one: names
    of modules and keyword defaults alike. Kernel timers go on as before.
    """
    real, real_ns = time.monotonic, time.monotonic_ns

    def jumping() -> float:
        return real() + board.offset_s

    def jumping_ns() -> int:
        return real_ns() + int(board.offset_s * 1e9)

    substitutes: dict[Any, Any] = {real: jumping, real_ns: jumping_ns}
    time.monotonic, time.monotonic_ns = jumping, jumping_ns
    for name, module in list(sys.modules.items()):
        if name.startswith("tp_runtime.broadcast"):
            _substitute(vars(module), substitutes)


def _substitute(names: dict[str, Any], substitutes: dict[Any, Any]) -> None:
    for name, value in list(names.items()):
        if callable(value) and value in substitutes:
            names[name] = substitutes[value]
        for function in vars(value).values() if isinstance(value, type) else [value]:
            defaults = getattr(function, "__kwdefaults__", None) or {}
            for key, default in defaults.items():
                if callable(default) and default in substitutes:
                    defaults[key] = substitutes[default]

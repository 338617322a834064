"""A process that forks groups of ranks on request: `python -m tests.ranks.faults.nursery PARENT`.

It has imported the channel and nothing heavy, has one thread and no channel of its own, so its
forks are safe, and a group of ranks costs milliseconds instead of an interpreter start for each.

Requests and answers are JSON, one a line, on standard input and output. A group never outlives
its request: whatever happened, all its processes are killed and reaped before the answer.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tests.ranks.faults.board import Board, Me, child_pids, now, threads
from tp_runtime.broadcast.rendezvous import Listener
from tp_runtime.orphans import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable

_PR_SET_CHILD_SUBREAPER = 36
# After the survivors have reported, the faulty rank has this long to report, too.
_LAST_WORDS_S = 2.0
_STACKS_S = 0.3
# Imported once here and not in every rank.
_IMPORTED_BY_JOIN = ("join_peer", "join_root", "peer", "root")


@dataclass(slots=True)
class _Rank:
    rank: int
    pid: int
    pipe: int
    said: bytes = b""
    report: dict[str, Any] | None = None
    ended: int | None = None
    open: bool = field(default=True)


class _Group:
    """The processes of one request."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self._limit_s = float(request["limit_s"])
        # Not in the folder of pytest: a rank of another uid must be able to come here.
        self._folder = Path(tempfile.mkdtemp(prefix="tp-fault-"))
        self._folder.chmod(request["folder_mode"])
        self._board = Board()
        self._stderr = os.memfd_create("stderr", os.MFD_CLOEXEC)
        self._ranks: list[_Rank] = []
        self._strays = 0

    def run(self) -> dict[str, Any]:
        started_s = now()
        timed_out = False
        try:
            for rank in range(self._request["size"]):
                self._start(rank)
            awaited = [one for one in self._ranks if one.rank in self._request["awaited"]]
            timed_out = not self._hear(awaited, started_s + self._limit_s)
            if timed_out:
                self._ask_for_stacks()
            self._board.release()
            # a stopped rank is continued, to see that it does not go on as if nothing had happened
            self._signal(signal.SIGCONT)
            if not self._hear(self._ranks, now() + _LAST_WORDS_S):
                self._ask_for_stacks()
            self._await_exits()
        finally:
            self._end()
        return {
            "wall_s": now() - started_s,
            "timed_out": timed_out,
            "reports": {str(one.rank): one.report for one in self._ranks},
            "exits": {str(one.rank): one.ended for one in self._ranks},
            "strays": self._strays,
            **self._rest(),
        }

    def _start(self, rank: int) -> None:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            for other in self._ranks:
                os.close(other.pipe)
            self._live(rank, writer)
        os.close(writer)
        self._join_group(pid)
        self._ranks.append(_Rank(rank, pid, reader))

    def _join_group(self, pid: int) -> None:
        try:
            os.setpgid(pid, self._ranks[0].pid if self._ranks else pid)
        except (PermissionError, ProcessLookupError):
            # it did so itself and has gone on already
            return

    def _live(self, rank: int, writer: int) -> NoReturn:
        """The life of a rank; never returns."""
        try:
            os.setpgid(0, self._ranks[0].pid if self._ranks else 0)
            end_with_parent(os.getppid())
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 0)
            os.dup2(self._stderr, 1)
            os.dup2(self._stderr, 2)
            os.close(nothing)
            faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            size = self._request["size"]
            me = Me(rank=rank, size=size, board=self._board, folder=self._folder)
            self._board.note_pid(rank)
            report = _program(self._request["program"])(me, **self._request["args"])
        except BaseException:  # noqa: BLE001 - told to the test, which fails by it
            report = {"crash": traceback.format_exc()}
        line = json.dumps(report).encode() + b"\n"
        while line:
            line = line[os.write(writer, line) :]
        # The end of a process is a failure to the others: not before they have seen theirs.
        while not self._board.released:
            time.sleep(0.002)
        os._exit(0)

    def _hear(self, ranks: list[_Rank], limit_s: float) -> bool:
        """Read reports until each of these ranks gave one or died; False: too late.

        A death is learnt by waiting for it: a child of the rank may keep the pipe open.
        """
        poll = select.poll()
        by_pipe = {one.pipe: one for one in self._ranks if one.open}
        for pipe in by_pipe:
            poll.register(pipe, select.POLLIN)
        while any(one.report is None and one.open and one.ended is None for one in ranks):
            if now() > limit_s:
                return False
            self._reap(os.WNOHANG)
            for pipe, _ in poll.poll(20):
                one = by_pipe[pipe]
                data = os.read(pipe, 1 << 20)
                one.said += data
                if not data:
                    one.open = False
                    poll.unregister(pipe)
                elif one.said.endswith(b"\n"):
                    one.report = json.loads(one.said)
        return True

    def _ask_for_stacks(self) -> None:
        for one in self._ranks:
            if one.report is None and one.ended is None:
                os.kill(one.pid, signal.SIGUSR2)
        time.sleep(_STACKS_S)

    def _await_exits(self) -> None:
        """Let those who reported go by themselves; what they leave behind is a stray."""
        limit_s = now() + 1.0
        while now() < limit_s and any(
            one.report is not None and one.ended is None for one in self._ranks
        ):
            self._reap(os.WNOHANG)
            time.sleep(0.001)

    def _signal(self, number: signal.Signals) -> None:
        if self._ranks:
            try:
                os.killpg(self._ranks[0].pid, number)
            except ProcessLookupError:
                return

    def _reap(self, flags: int) -> bool:
        """Reap one process; False if none is there (to be reaped)."""
        try:
            pid, status = os.waitpid(-1, flags)
        except ChildProcessError:
            return False
        if pid == 0:
            return False
        known = next((one for one in self._ranks if one.pid == pid), None)
        if known is None:
            self._strays += 1
        else:
            known.ended = os.waitstatus_to_exitcode(status)
        return True

    def _end(self) -> None:
        # Orphans of the ranks became children of this process, which has no others.
        while left := child_pids():
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            for _ in left:
                self._reap(0)
        for one in self._ranks:
            os.close(one.pipe)
        self._board.close()

    def _rest(self) -> dict[str, Any]:
        """What the group left behind; a socket file of a killed rank 0 must be removable."""
        left = sorted(os.listdir(self._folder))
        address = self._folder / "channel"
        if address.is_socket():
            Listener(address, backlog=1, timeout_s=10).close()
        after = sorted(os.listdir(self._folder))
        shutil.rmtree(self._folder)
        size = os.lseek(self._stderr, 0, os.SEEK_END)
        said = os.pread(self._stderr, 100_000, max(0, size - 100_000)).decode(errors="replace")
        os.close(self._stderr)
        return {"left": left, "left_by_next_run": after, "stderr": said}


def _program(name: str) -> Callable[..., dict[str, Any]]:
    module, _, function = name.partition(":")
    program: Callable[..., dict[str, Any]] = getattr(importlib.import_module(module), function)
    return program


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    for name in _IMPORTED_BY_JOIN:
        importlib.import_module(f"tp_runtime.broadcast.{name}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        _program(request["program"])  # imported here once, not in every rank
        if threads() != 1:
            raise RuntimeError(f"the nursery has {threads()} threads and may not fork")
        gc.freeze()
        answers.write(json.dumps(_Group(request).run()) + "\n")


if __name__ == "__main__":
    main()

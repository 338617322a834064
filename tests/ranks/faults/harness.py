"""The side of pytest of `nursery`: ask for a group of ranks, get what each reported."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

_REPOSITORY = Path(__file__).parents[3]
# Beyond the limit of the group: its stacks, the last words, the end of all its processes.
_GRACE_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """What became of a group of ranks.

    Args:
        wall_s: from the first fork until the last process was reaped.
        timed_out: an awaited rank said nothing in time; stacks of all are in `stderr`.
        reports: by rank; None: it said nothing.
        exits: exit code by rank, negative for a signal.
        strays: processes that the ranks started and left behind.
        left: names in the folder of the address afterwards.
        left_by_next_run: the same after another rank 0 listened there for a moment.
    """

    wall_s: float
    timed_out: bool
    reports: dict[int, dict[str, Any] | None]
    exits: dict[int, int | None]
    strays: int
    left: list[str]
    left_by_next_run: list[str]
    stderr: str

    def checked(self) -> list[dict[str, Any]]:
        """The reports, where every rank was to end well and to leave nothing."""
        said = [report for report in self.reports.values() if report is not None]
        crashes = [report["crash"] for report in said if "crash" in report]
        assert not crashes, "\n".join(crashes)
        assert not self.timed_out, f"a rank was silent; reports {self.reports}\n{self.stderr}"
        assert "Traceback" not in self.stderr, self.stderr
        assert len(said) == len(self.reports), self.exits
        assert set(self.exits.values()) == {0}, self.exits
        assert self.left == []
        assert self.strays == 0
        return said


class Nursery:
    """Starts the process at the first request, and again when it had to be killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""

    def run(
        self,
        program: str,
        size: int,
        *,
        args: dict[str, Any],
        limit_s: float = 8.0,
        awaited: Sequence[int] | None = None,
        folder_mode: int = 0o700,
    ) -> GroupResult:
        """Run `program` ("module:function") on `size` ranks.

        Args:
            args: keywords for the program, JSON values.
            limit_s: the group is killed after this long.
            awaited: ranks that have to report; all by default.
        """
        request = {
            "program": program,
            "size": size,
            "args": args,
            "limit_s": limit_s,
            "awaited": list(range(size) if awaited is None else awaited),
            "folder_mode": folder_mode,
        }
        answer: dict[str, Any] = json.loads(
            self._ask(json.dumps(request).encode() + b"\n", limit_s + _GRACE_S)
        )
        for by_rank in ("reports", "exits"):
            answer[by_rank] = {int(rank): value for rank, value in answer[by_rank].items()}
        return GroupResult(**answer)

    def _ask(self, line: bytes, limit_s: float) -> bytes:
        if self._process is None:
            self._process = self._start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()
        said = b""
        while not said.endswith(b"\n"):
            if not select.select([self._process.stdout], [], [], limit_s)[0]:
                self.close()
                raise AssertionError(f"the nursery did not answer within {limit_s:g} s")
            data = os.read(self._process.stdout.fileno(), 1 << 20)
            if not data:
                code = self._process.wait()
                self.close()
                raise AssertionError(f"the nursery ended with {code}")
            said += data
        return said

    def _start(self) -> subprocess.Popen[bytes]:
        # One thread: no pool of OpenBLAS.
        env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "tests.ranks.faults.nursery", str(os.getpid())],
            cwd=_REPOSITORY,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def close(self) -> None:
        """End the process and, through it, everything it has started."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

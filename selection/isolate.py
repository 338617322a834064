"""Runs the measuring child and outlives it.

The child says which candidate it is about to run. If it then dies, or says nothing for the time
limit, that candidate is refused by name and a new child goes on at the same cell without it.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from tp_runtime.errors import SelectionError

if TYPE_CHECKING:
    from collections.abc import Callable

    Progress = Callable[[str, int, int], None]

log = logging.getLogger(__name__)

BUILD, MEASURE = "build", "selection"
"""The stages that are told as progress."""

_START_LIMIT_S = 120.0  # importing torch on a busy machine
_BUILD_LIMIT_S = 900.0  # compiling kernels that were never compiled before
_SIGN_OF_LIFE_S = 1.0
_TAIL_BYTES = 400


@dataclass(slots=True, kw_only=True)
class _State:
    """What is known across children.

    Args:
        deadline: of the monotonic clock; compiling kernels moves it.
        told: the last progress, repeated while nothing new happens.
    """

    deadline: float
    cells: int
    time_limit_s: float
    progress: Progress | None
    told: tuple[str, int, int] = (MEASURE, 0, 0)
    events: list[dict[str, Any]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    next_cell: int = 0
    running: str | None = None
    started: bool = False
    building: bool = False
    done: bool = False
    build_began: float = 0.0

    @property
    def patience_s(self) -> float:
        """How long the child may be silent."""
        if self.building:
            return _BUILD_LIMIT_S
        # a candidate may use up its limit before the child itself notices: leave it a margin
        return 2.0 * self.time_limit_s + 1.0 if self.started else _START_LIMIT_S

    def tell(self) -> None:
        if self.progress is not None:
            self.progress(*self.told)

    def take(self, event: dict[str, Any]) -> None:
        """Learn from what the child says."""
        self.started = True
        match event["event"]:
            case "building":
                self.building, self.build_began = True, time.monotonic()
                self.told = BUILD, 0, len(event["backends"])
                log.info("building the kernels of %s", ", ".join(event["backends"]))
            case "built":
                self.told = BUILD, self.told[1] + 1, self.told[2]
            case "ready":
                self.building = False
                self.deadline += time.monotonic() - self.build_began
                self.told = MEASURE, self.next_cell, self.cells
            case "running":
                self.running = event["backend"]
                return
            case "samples":
                self.next_cell = event["cell"] + 1
                self.told = MEASURE, self.next_cell, self.cells
                self.events.append(event)
            case "refused":
                self.refused.append(event["backend"])
                self.events.append(event)
                return
            case "done":
                self.done = True
                return
        self.tell()


def run_isolated(
    request: dict[str, Any],
    *,
    cells: int,
    time_limit_s: float,
    timeout_s: float,
    progress: Progress | None = None,
) -> tuple[list[dict[str, Any]], bool]:
    """Run children until all cells are measured or the time is over.

    Args:
        progress: called with (stage, done, in all) when something is done, and at least once a
            second with what was last told; what it raises ends the children and is raised here.

    Returns: the events, and whether they are complete.
    Raises: SelectionError: the child cannot run at all; carries the end of its output.
    """
    state = _State(
        deadline=time.monotonic() + timeout_s,
        cells=cells,
        time_limit_s=time_limit_s,
        progress=progress,
        told=(MEASURE, 0, cells),
    )
    names = list(request["candidates"] or request["factories"])
    while time.monotonic() < state.deadline:
        left = [name for name in names if name not in state.refused]
        if not left:
            return state.events, True
        # a refused one must not be raced because none is named: leave it out of the factories too
        factories = {n: t for n, t in request["factories"].items() if n not in state.refused}
        again = {
            **request,
            "candidates": left if request["candidates"] else [],
            "factories": factories,
            "first_cell": state.next_cell,
        }
        reason = _run_child(again, state)
        if state.done:
            return state.events, True
        if reason is None:
            break
        if state.running is None:
            raise SelectionError(f"the measuring child process failed: {reason}")
        log.warning("decode backend %s is refused: %s", state.running, reason)
        state.events.append({"event": "refused", "backend": state.running, "reason": reason})
        state.refused.append(state.running)
        state.running = None
    log.warning("measuring stopped after %g s at cell %d of %d", timeout_s, state.next_cell, cells)
    return state.events, False


def _run_child(request: dict[str, Any], state: _State) -> str | None:
    """Why the child ended early; None if it was done or the deadline passed."""
    state.started = state.building = False
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "tp_runtime.selection.child", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C reaches the parent, which ends the child
        )
        try:
            reason = _follow(child, request, state)
        finally:
            _end(child)
        if reason == "ended":
            return f"{_ending(child.returncode)}{_tail(errors)}"
        return reason


def _follow(child: subprocess.Popen[bytes], request: dict[str, Any], state: _State) -> str | None:
    if child.stdin is None or child.stdout is None:
        raise SelectionError("the measuring child process has no pipes")
    try:
        child.stdin.write(json.dumps(request).encode("ascii"))
        child.stdin.close()
    except BrokenPipeError:
        return _ended(child)
    pending = b""
    heard = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while True:
            now = time.monotonic()
            left_s = heard + state.patience_s - now
            if left_s <= 0.0:
                return f"gave no sign for {state.patience_s:g} s and was ended"
            if not state.building:  # what building takes is given back afterwards
                if now >= state.deadline:
                    return None
                left_s = min(left_s, state.deadline - now)
            if not selector.select(min(left_s, _SIGN_OF_LIFE_S)):
                state.tell()
                continue
            data = child.stdout.read1(65536)  # type: ignore[attr-defined]
            if not data:
                return None if state.done else _ended(child)
            heard = time.monotonic()
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                event = json.loads(line)
                if event["event"] == "failed":
                    state.running = None
                    return str(event["reason"])
                state.take(event)


def _end(child: subprocess.Popen[bytes]) -> None:
    """With everything that it started, such as a compiler."""
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()


def _ended(child: subprocess.Popen[bytes]) -> str:
    # not reaped yet, so that its number is still that of its group
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    return "ended"


def _ending(code: int) -> str:
    if code < 0:
        return f"the process died of {signal.Signals(-code).name}"
    return f"the process ended with code {code}"


def _tail(errors: IO[bytes]) -> str:
    errors.seek(0)
    text = errors.read().decode("utf-8", "replace").strip()
    return f": {text[-_TAIL_BYTES:]}" if text else ""

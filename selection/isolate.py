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

log = logging.getLogger(__name__)

_START_LIMIT_S = 120.0  # importing torch on a busy machine
_BUILD_LIMIT_S = 900.0  # compiling kernels that were never compiled before
_TAIL_BYTES = 400


@dataclass(slots=True)
class _Progress:
    """What is known across children.

    Args:
        deadline: of the monotonic clock; compiling kernels moves it.
    """

    deadline: float
    events: list[dict[str, Any]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    next_cell: int = 0
    running: str | None = None
    started: bool = False
    building: bool = False
    done: bool = False

    @property
    def patience_s(self) -> float | None:
        """How long the child may be silent while it is not measuring."""
        if self.building:
            return _BUILD_LIMIT_S
        return None if self.started else _START_LIMIT_S


def run_isolated(
    request: dict[str, Any],
    *,
    cells: int,
    time_limit_s: float,
    timeout_s: float,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[dict[str, Any]], bool]:
    """Run children until all cells are measured or the time is over.

    Returns: the events, and whether they are complete.
    Raises: SelectionError: the child cannot run at all; carries the end of its output.
    """
    state = _Progress(deadline=time.monotonic() + timeout_s)
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
        reason = _run_child(again, state, time_limit_s, cells, progress)
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


def _run_child(
    request: dict[str, Any],
    state: _Progress,
    time_limit_s: float,
    cells: int,
    progress: Callable[[int, int], None] | None,
) -> str | None:
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
            reason = _follow(child, request, state, time_limit_s, cells, progress)
        finally:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
        if reason == "ended":
            return f"{_ending(child.returncode)}{_tail(errors)}"
        return reason


def _follow(
    child: subprocess.Popen[bytes],
    request: dict[str, Any],
    state: _Progress,
    time_limit_s: float,
    cells: int,
    progress: Callable[[int, int], None] | None,
) -> str | None:
    if child.stdin is None or child.stdout is None:
        raise SelectionError("the measuring child process has no pipes")
    try:
        child.stdin.write(json.dumps(request).encode("ascii"))
        child.stdin.close()
    except BrokenPipeError:
        return _ended(child)
    pending = b""
    began = 0.0
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while True:
            # a candidate may use up its limit before the child itself notices: leave it a margin
            patience_s = state.patience_s or 2.0 * time_limit_s + 1.0
            left_s = state.deadline - time.monotonic()
            if state.building:
                left_s = patience_s  # what building takes is given back afterwards
            if left_s <= 0.0:
                return None
            if not selector.select(min(left_s, patience_s)):
                if time.monotonic() >= state.deadline and not state.building:
                    return None
                return f"gave no sign for {patience_s:g} s and was ended"
            data = child.stdout.read1(65536)  # type: ignore[attr-defined]
            if not data:
                return None if state.done else _ended(child)
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                event = json.loads(line)
                kind = event["event"]
                if kind == "failed":
                    state.running = None
                    return str(event["reason"])
                state.started = True
                if kind == "building":
                    state.building, began = True, time.monotonic()
                    log.info("building the kernels of %s", ", ".join(event["backends"]))
                    continue
                if kind == "ready":
                    state.building = False
                    state.deadline += time.monotonic() - began
                    continue
                if kind == "running":
                    state.running = event["backend"]
                    continue
                if kind == "samples":
                    state.next_cell = event["cell"] + 1
                    if progress is not None:
                        progress(state.next_cell, cells)
                elif kind == "refused":
                    state.refused.append(event["backend"])
                elif kind == "done":
                    state.done = True
                state.events.append(event)


def _ended(child: subprocess.Popen[bytes]) -> str:
    child.wait()
    return "ended"


def _ending(code: int) -> str:
    if code < 0:
        return f"the process died of {signal.Signals(-code).name}"
    return f"the process ended with code {code}"


def _tail(errors: IO[bytes]) -> str:
    errors.seek(0)
    text = errors.read().decode("utf-8", "replace").strip()
    return f": {text[-_TAIL_BYTES:]}" if text else ""

"""Runs a function on N real ranks: for tests of code that needs a tensor-parallel group.

Every rank is a process of its own, started afresh and not forked (a fork of a process with
threads, such as a pytest-xdist worker, may inherit a held lock). It gets the variables that
torchrun would set and a private run folder, so that any number of such runs go on at once.

Example, as a test file::

    import torch
    from tp_runtime.group import TpGroup
    from tp_runtime.ranks import RankInfo
    from tp_runtime.testing import run_ranks

    def add_up(start: int) -> list[float]:              # runs on every rank
        info = RankInfo.from_env()
        group = TpGroup.create(info, device=torch.device("cpu"), timeout_s=20)
        total = group.all_reduce(torch.full((3,), float(start + info.tp_rank)))
        group.close()
        return total.tolist()

    def test_ranks_agree() -> None:
        assert run_ranks(add_up, 2, timeout_s=60, args=(1,)) == [[3.0, 3.0, 3.0]] * 2

A rank that dies is part of some tests: ``run_ranks(fn, 2, 30, expect_exit={1: -9})`` wants
rank 1 to be killed by signal 9 and rank 0 to return in good order; the result of rank 1 is None.

This module imports no torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import inspect
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tp_runtime.errors import ConfigError, TpRuntimeError
from tp_runtime.orphans import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import ModuleType

__all__ = ["RankExit", "RanksFailed", "run_ranks"]

_RUN_DIRECTORY = "TP_RUNTIME_TEST_RUN_DIR"
_PARENT = "TP_RUNTIME_TEST_PARENT"
_TAIL_BYTES = 4000
_STACKS_BEFORE_KILL_S = 1.0
_SURVIVORS_AFTER_FAILURE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """How one rank ended.

    Attributes:
        rank: global rank.
        exit_code: as subprocess gives it, -9 for a kill; None: still running at the end.
        expected: the exit code that was asked for.
        output: the end of its standard output and error together, 4 kB at most.
    """

    rank: int
    exit_code: int | None
    expected: int
    output: str

    @property
    def as_expected(self) -> bool:
        return self.exit_code == self.expected

    def __str__(self) -> str:
        if self.exit_code is None:
            ending = "still running, killed"
        elif self.exit_code < 0:
            ending = f"ended by signal {-self.exit_code}"
        else:
            ending = f"exit code {self.exit_code}"
        verdict = "" if self.as_expected else f" (expected {self.expected})"
        tail = self.output.rstrip() or "(no output)"
        return f"---- rank {self.rank}: {ending}{verdict}\n{tail}"


class RanksFailed(TpRuntimeError):
    """A rank did not end as expected. Prints how every rank ended and what it wrote last.

    Attributes:
        exits: one entry per rank, in rank order.
    """

    def __init__(self, summary: str, exits: Sequence[RankExit]) -> None:
        self.exits = tuple(exits)
        super().__init__("\n".join([summary, *map(str, self.exits)]))


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    timeout_s: float,
    *,
    args: Sequence[Any] = (),
    env: Mapping[str, str] | None = None,
    expect_exit: Mapping[int, int] | None = None,
) -> list[Any]:
    """Runs ``fn(*args)`` in ``world_size`` processes and returns what each of them returned.

    Args:
        fn: a function at the top level of a module; the module's file is loaded in every rank.
        world_size: number of processes, all on this host.
        timeout_s: all processes are killed after this long; their stacks are in the error.
        args: positional arguments, JSON values (tuples arrive as lists).
        env: further environment variables, for every rank.
        expect_exit: exit code by rank where it is not 0; -9 is a kill by signal 9.

    Returns:
        One value per rank, in rank order, as JSON gives it back. None for a rank that was
        expected to die.

    Raises:
        RanksFailed: a rank raised, ended in another way than expected, or was late.
        ConfigError: ``fn`` cannot be found from another process, or ``args`` are not JSON values.
    """
    expected = dict.fromkeys(range(world_size), 0) | dict(expect_exit or {})
    if world_size < 1 or len(expected) != world_size:
        raise ConfigError(f"world_size={world_size}, expect_exit={expect_exit}: no such ranks")
    specification = _specification(fn, args, timeout_s)
    # Short, since socket paths are; not pytest's tmp_path, which is long and is kept.
    folder = Path(tempfile.mkdtemp(prefix="tp_ranks-"))
    try:
        (folder / "call.json").write_text(specification)
        with _reserved_port() as port:
            exits = _run(folder, world_size, port, timeout_s, dict(env or {}), expected)
        silent = [
            one.rank
            for one in exits
            if one.expected == one.exit_code == 0 and not _result_path(folder, one.rank).exists()
        ]
        if silent:
            raise RanksFailed(
                f"{fn.__qualname__} on {world_size} ranks: ranks {silent} ended with 0 before the "
                "function returned",
                exits,
            )
        wrong = [one for one in exits if not one.as_expected]
        if wrong:
            names = ", ".join(str(one.rank) for one in wrong)
            raise RanksFailed(
                f"{fn.__qualname__} on {world_size} ranks: not as expected on "
                f"{'rank' if len(wrong) == 1 else 'ranks'} {names} (deadline {timeout_s:g} s)",
                exits,
            )
        return [_result(folder, one) for one in exits]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _specification(fn: Callable[..., Any], args: Sequence[Any], timeout_s: float) -> str:
    name = getattr(fn, "__qualname__", repr(fn))
    path = inspect.getsourcefile(fn) if inspect.isfunction(fn) else None
    if path is None or "<" in name:
        raise ConfigError(
            f"{name}: expected a function at the top level of a module file, since the ranks are "
            f"other processes and have to find it by its name"
        )
    try:
        return json.dumps(
            {
                "file": os.path.abspath(path),
                "module": fn.__module__,
                "function": name,
                "args": list(args),
                "path": sys.path,
                "dump_after_s": max(timeout_s - _STACKS_BEFORE_KILL_S, timeout_s / 2),
            }
        )
    except TypeError as error:
        raise ConfigError(f"{name}: args must be JSON values: {error}") from error


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that nobody else is given while this runs, but that rank 0 can listen on.

    The socket is bound and does not listen: the kernel hands the port out to no one who asks for
    any free port, yet a second socket that sets SO_REUSEADDR, as the store does, may bind it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("127.0.0.1", 0))
        yield int(reservation.getsockname()[1])


def _run(
    folder: Path,
    world_size: int,
    port: int,
    timeout_s: float,
    env: Mapping[str, str],
    expected: Mapping[int, int],
) -> list[RankExit]:
    run_id = uuid.uuid4().hex
    deadline = time.monotonic() + timeout_s
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            variables = _without_launcher(os.environ) | {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": run_id,
                "TORCHELASTIC_RESTART_COUNT": "0",
                "XDG_RUNTIME_DIR": str(folder),
                "PYTHONUNBUFFERED": "1",
                **env,
                _RUN_DIRECTORY: str(folder),
                _PARENT: str(os.getpid()),
            }
            with (folder / f"rank-{rank}.log").open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tp_runtime.testing"],
                        env=variables,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        # a group of its own, so that what a rank starts is killed with it
                        start_new_session=True,
                    )
                )
        codes = _wait(processes, deadline, expected)
    finally:
        for process in processes:
            _kill(process)
    return [
        RankExit(
            rank=rank,
            exit_code=codes[rank],
            expected=expected[rank],
            output=_tail(folder / f"rank-{rank}.log"),
        )
        for rank in range(world_size)
    ]


def _without_launcher(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without what an outer torchrun or a single-rank run would say."""
    dropped = ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")
    variables = {
        name: value
        for name, value in env.items()
        if not name.startswith("TORCHELASTIC_") and name not in dropped
    }
    # The package may be used from a source tree that is not installed.
    roots = [str(Path(__file__).resolve().parent.parent), env.get("PYTHONPATH", "")]
    return variables | {"PYTHONPATH": os.pathsep.join(root for root in roots if root)}


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], deadline: float, expected: Mapping[int, int]
) -> list[int | None]:
    """Waits for all; once one ended wrongly the others get a short while to say why."""
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes or time.monotonic() >= deadline:
            return codes
        if any(code is not None and code != expected[rank] for rank, code in enumerate(codes)):
            deadline = min(deadline, time.monotonic() + _SURVIVORS_AFTER_FAILURE_S)
        time.sleep(0.01)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # the group is gone already
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(path: Path) -> str:
    with path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - _TAIL_BYTES))
        return log.read().decode(errors="replace")


def _result_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _result(folder: Path, ended: RankExit) -> Any:
    path = _result_path(folder, ended.rank)
    if not path.exists():
        return None
    return json.loads(path.read_text())


# ---- in the rank's own process -----------------------------------------------------------


def _load_module(name: str, path: str) -> ModuleType:
    """The module that holds the function: by name where that is the same file, else by file."""
    if name != "__main__":
        with contextlib.suppress(ModuleNotFoundError, ValueError):
            found = importlib.util.find_spec(name)
            if found and found.origin and os.path.samefile(found.origin, path):
                return importlib.import_module(name)
    # Not under the name __main__, which would run the script again.
    name = f"_rank_main_{Path(path).stem}" if name == "__main__" else name
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        raise ConfigError(f"{path}: cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


def _main() -> None:
    end_with_parent(int(os.environ[_PARENT]))
    folder = Path(os.environ[_RUN_DIRECTORY])
    call = json.loads((folder / "call.json").read_text())
    faulthandler.enable()
    faulthandler.dump_traceback_later(call["dump_after_s"], exit=False)
    sys.path[:] = call["path"]
    value: Any = _load_module(call["module"], call["file"])
    for part in call["function"].split("."):
        value = getattr(value, part)
    result = value(*call["args"])
    # Complete or not there: the rank may be killed at any time.
    path = _result_path(folder, int(os.environ["RANK"]))
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(result))
    unfinished.replace(path)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    _main()

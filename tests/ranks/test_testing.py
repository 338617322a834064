"""run_ranks itself: results, failures that show their output, and an end in any case."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tp_runtime.errors import ConfigError
from tp_runtime.ranks import RankInfo
from tp_runtime.testing import RanksFailed, run_ranks


def describe(*values: object) -> list[object]:
    info = RankInfo.from_env()
    return [info.rank, info.world_size, info.tp_size, os.environ.get("COLOUR"), list(values)]


def port_and_folder() -> list[str]:
    port = int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "0":  # what a store does: the reservation must not be in the way
        with socket.create_server(("", port)):
            return [str(port), os.environ["XDG_RUNTIME_DIR"]]
    return [str(port), os.environ["XDG_RUNTIME_DIR"]]


def one_raises() -> None:
    print("rank", os.environ["RANK"], "was here")
    if os.environ["RANK"] == "1":
        raise ValueError("seven is not even")


def one_is_killed() -> str:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return "fine"


def one_exits_with_3() -> str:
    if os.environ["RANK"] == "0":
        sys.exit(3)
    return "fine"


def one_hangs_with_a_child(pid_file: str) -> None:
    if os.environ["RANK"] == "1":
        child = subprocess.Popen(["sleep", "600"])
        Path(pid_file).write_text(str(child.pid))
        child.wait()


def say_who_and_wait(folder: str) -> None:
    unfinished = Path(folder) / f"{os.environ['RANK']}.tmp"
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(unfinished.with_suffix(".pid"))
    time.sleep(600)


def not_json() -> object:
    return {1, 2}


class Holder:
    @staticmethod
    def inside() -> int:
        return 7


def test_every_rank_returns_its_value() -> None:
    results = run_ranks(describe, 3, 60, args=(1, "two", None), env={"COLOUR": "red"})
    assert results == [[rank, 3, 3, "red", [1, "two", None]] for rank in range(3)]


def test_a_function_inside_a_class_is_found() -> None:
    assert run_ranks(Holder.inside, 1, 60) == [7]


def test_runs_at_the_same_time_are_apart_and_leave_nothing() -> None:
    with ThreadPoolExecutor(3) as pool:
        runs = list(pool.map(lambda _: run_ranks(port_and_folder, 2, 60), range(3)))
    assert all(first == second for first, second in runs)
    assert len({port for (port, _), _ in runs}) == 3
    folders = {folder for (_, folder), _ in runs}
    assert len(folders) == 3
    assert not any(Path(folder).exists() for folder in folders)


def test_a_rank_that_raises_shows_the_output_of_all() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(one_raises, 2, 60)
    assert [one.exit_code for one in caught.value.exits] == [0, 1]
    text = str(caught.value)
    assert "one_raises on 2 ranks: not as expected on rank 1" in text
    assert "rank 0 was here" in text
    assert "ValueError: seven is not even" in text


def test_a_rank_may_be_expected_to_die() -> None:
    assert run_ranks(one_is_killed, 2, 60, expect_exit={1: -9}) == ["fine", None]
    assert run_ranks(one_exits_with_3, 2, 60, expect_exit={0: 3}) == [None, "fine"]


def test_another_end_than_expected_is_a_failure() -> None:
    with pytest.raises(RanksFailed, match=r"rank 1: ended by signal 9 \(expected 0\)"):
        run_ranks(one_is_killed, 2, 60)
    with pytest.raises(RanksFailed, match=r"rank 1: exit code 0 \(expected -9\)"):
        run_ranks(one_exits_with_3, 2, 60, expect_exit={0: 3, 1: -9})


def test_the_deadline_kills_all_and_shows_where_they_were(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    started = time.monotonic()
    with pytest.raises(RanksFailed, match=r"rank 1: still running, killed") as caught:
        run_ranks(one_hangs_with_a_child, 2, 4, args=(str(pid_file),))
    assert time.monotonic() - started < 20
    assert "in one_hangs_with_a_child" in caught.value.exits[1].output
    # The child of the rank went with it, or is a zombie that nobody has waited for yet.
    assert not is_running(int(pid_file.read_text()))


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_testing import say_who_and_wait\n"
        "from tp_runtime.testing import run_ranks\n"
        f"run_ranks(say_who_and_wait, 2, 300, args=({str(tmp_path)!r},))\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": root, "TMPDIR": str(tmp_path)},
    ) as starter:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("*.pid"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        starter.kill()
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_result_must_be_json() -> None:
    with pytest.raises(RanksFailed, match="set is not JSON serializable"):
        run_ranks(not_json, 1, 60)


def test_what_cannot_be_called_elsewhere_is_refused() -> None:
    def local() -> None: ...

    with pytest.raises(ConfigError, match="top level of a module"):
        run_ranks(local, 1, 60)
    with pytest.raises(ConfigError, match="top level of a module"):
        run_ranks(lambda: None, 1, 60)
    with pytest.raises(ConfigError, match="JSON values"):
        run_ranks(describe, 1, 60, args=(object(),))
    with pytest.raises(ConfigError, match="no such ranks"):
        run_ranks(describe, 1, 60, expect_exit={1: 1})


def ends_without_a_word() -> None:
    raise SystemExit(0)


def test_a_rank_that_ends_before_it_returned_is_no_success() -> None:
    with pytest.raises(RanksFailed, match="ended with 0 before the function returned"):
        run_ranks(ends_without_a_word, 2, timeout_s=30)

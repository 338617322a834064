"""The selection in an engine of real ranks: kept plans, lost peers, and nothing if it is off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from tp_runtime.errors import PeerLost
from tp_runtime.testing import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

TIMEOUT_S = 90.0
HEAVY = ("flashinfer", "triton", "cudnn", "matplotlib")
SMALL: dict[str, Any] = {
    "model": "random:tiny", "device": "cpu", "max_batch_size": 2, "max_seq_len": 128,
}  # fmt: skip


class _Hook:
    """An import hook that finds nothing and notes who was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] in HEAVY:
            self.asked.append(name)


def refuse_processes(*words: object, **named: object) -> None:
    raise AssertionError("a process was started")


def start_twice(dynamic: bool) -> list[dict[str, Any]]:
    """Two engines one after the other; the second may start no process on any rank, and if the
    selection is off, neither may the first."""
    from tp_runtime import Engine, RuntimeConfig, SamplingParams, planning

    # other tests on this machine may disturb it, which is not what this is about
    vars(planning)["disturbed"] = lambda plan: False
    hook = _Hook()
    sys.meta_path.insert(0, hook)
    held = []
    for start in range(2):
        if start or not dynamic:
            subprocess.Popen.__init__ = refuse_processes  # type: ignore[method-assign]
        stages: list[str] = []
        config = RuntimeConfig(**SMALL, enable_dynamic_decode_backend=dynamic)
        engine = Engine(config)
        engine.start(progress=lambda stage, done, total, seen=stages: seen.append(stage))  # type: ignore[misc]
        if engine.rank == 0:
            (*_, last) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
            assert last.finished
        else:
            engine.serve_peer()
        held.append(
            {
                "source": engine.plan_source,
                "digest": engine.plan_digest,
                "told": "selection" in stages,
                "heavy": list(hook.asked),
                "report": engine.selection_report is not None,
            }
        )
        engine.close()
    return held


def test_the_second_start_takes_the_kept_plan_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root, peer = run_ranks(start_twice, 2, TIMEOUT_S, args=(True,))
    assert [one["source"] for one in root] == ["measured", "cached"]
    assert [one["source"] for one in peer] == ["from rank 0"] * 2
    assert {one["digest"] for one in (*root, *peer)} == {root[0]["digest"]} != {None}
    # peers hear how far rank 0 is while it measures, and then there is nothing to hear of
    assert [one["told"] for one in peer] == [True, False]
    assert [one["report"] for one in root] == [True, True]
    assert all(one["heavy"] == [] for one in (*root, *peer))
    assert len(list((tmp_path / "tp_runtime" / "plans").iterdir())) == 1


def test_off_means_nothing_imported_measured_or_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (held,) = run_ranks(start_twice, 1, TIMEOUT_S, args=(False,))
    for one in held:
        assert one == {
            "source": "fixed priority", "digest": None, "told": False, "heavy": [], "report": False
        }  # fmt: skip
    assert not (tmp_path / "tp_runtime" / "plans").exists()


def start_from_files(whole: str, damaged: str) -> dict[str, Any]:
    """An engine of a saved plan, then one of a damaged file. No rank above 0 can read them."""
    from tp_runtime import Engine, RuntimeConfig, SamplingParams
    from tp_runtime.errors import TpRuntimeError

    subprocess.Popen.__init__ = refuse_processes  # type: ignore[method-assign]
    here = os.environ["RANK"] == "0"
    engine = Engine(RuntimeConfig(**SMALL, decode_plan=whole if here else "/absent/plan.json"))
    with engine:
        if engine.rank == 0:
            (*_, last) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
            assert last.finished
        else:
            engine.serve_peer()
        held: dict[str, Any] = {"source": engine.plan_source, "digest": engine.plan_digest}
        held["buckets"] = list(engine.plan.buckets)
    engine = Engine(RuntimeConfig(**SMALL, decode_plan=damaged if here else None))
    try:
        engine.start()
    except TpRuntimeError as error:
        held |= {"error": type(error).__name__, "said": str(error)}
    held["captured"] = engine.capture_report is not None
    engine.close()
    return held


def test_a_saved_plan_is_taken_on_all_ranks_and_a_damaged_one_refused_on_all(
    tmp_path: Path,
) -> None:
    from tp_runtime.config import RuntimeConfig
    from tp_runtime.launch.problem import problem_of
    from tp_runtime.selection import PRIORITY_VERSION, Sample, select

    problem = problem_of(RuntimeConfig(**SMALL), SMALL["model"], tp_size=2)
    plan = select(
        [
            Sample(backend="cpu_rowwise", bucket=b, total_kv=b * n, max_kv=n, median_us=float(n))
            for b in (1, 2, 4)
            for n in (32, 64, 128)
        ],
        priority=["cpu_rowwise", "cpu_padded"],
        priority_version=PRIORITY_VERSION,
        shape=problem.shape,
        device=problem.info.name,
    )
    whole, damaged = tmp_path / "plan.json", tmp_path / "damaged.json"
    plan.save(whole)
    damaged.write_bytes(whole.read_bytes()[:-100])
    root, peer = run_ranks(start_from_files, 2, TIMEOUT_S, args=(str(whole), str(damaged)))
    assert (root["source"], peer["source"]) == ("from file", "from rank 0")
    assert root["digest"] == peer["digest"] is not None
    assert root["buckets"] == peer["buckets"] == [1, 2]  # the part that the run needs
    assert (root["error"], peer["error"]) == ("ConfigError", "PeerLost")
    for rank in (root, peer):
        assert f"decode_plan={str(damaged)!r}: {damaged}: truncated" in rank["said"]
        assert not rank["captured"]


def die_while_rank_0_measures() -> dict[str, Any]:
    import psutil

    from tp_runtime import Engine, RuntimeConfig

    last = time.monotonic()

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal last
        if stage == "selection" and done < total:
            last = time.monotonic()
            if engine.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    config = RuntimeConfig(**{**SMALL, "max_batch_size": 64}, enable_dynamic_decode_backend=True)
    engine = Engine(config)
    try:
        engine.start(progress=progress)
    except PeerLost as error:
        return {
            "lost": error.rank,
            "seconds": time.monotonic() - last,
            "children": [child.cmdline() for child in psutil.Process().children()],
        }
    finally:
        engine.close()
    return {}


def test_a_peer_that_dies_while_rank_0_measures_ends_the_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen, _ = run_ranks(die_while_rank_0_measures, 2, TIMEOUT_S, expect_exit={1: -signal.SIGKILL})
    assert seen["lost"] == 1
    assert seen["seconds"] < 10.0  # far below the 30 s that a wait may last
    assert seen["children"] == []
    assert not (tmp_path / "tp_runtime" / "plans").exists()

"""The measuring child: a backend that takes its process down is refused, the others go on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tp_runtime.errors import PeerLost, SelectionError
from tp_runtime.selection import BenchRequest, DecodeShape, measure_in_child
from tp_runtime.selection.bench import cells_of
from tp_runtime.selection.registry import FACTORIES

SHAPE = DecodeShape(
    q_heads=6, kv_heads=2, head_dim=16, dtype="float32", page_size=16, table_width=8
)
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIMEOUT_S = 150.0


@pytest.fixture(autouse=True)
def _child_finds_the_faulty_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{HERE}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def request_with(extra: dict[str, str], **changes: object) -> BenchRequest:
    factories = {**{n: f"faulty_backends:{kind}" for n, kind in extra.items()}, **FACTORIES}
    settings: dict[str, object] = {
        "shape": SHAPE, "buckets": (1, 3), "kv_lens": (20, 60), "repeats": 2,
        "time_limit_s": 1.0, "factories": factories, **changes,
    }  # fmt: skip
    return BenchRequest(**settings)  # type: ignore[arg-type]


def test_hang_crash_and_exit_are_refused_by_name() -> None:
    request = request_with({"hangs": "Hangs", "crashes": "Crashes", "exits": "Exits"})
    seen: list[tuple[str, int, int]] = []

    def progress(stage: str, done: int, of: int) -> None:
        seen.append((stage, done, of))

    report = measure_in_child(request, TIMEOUT_S, progress=progress)
    assert "gave no sign" in report.refusals["hangs"]
    assert "SIGSEGV" in report.refusals["crashes"]
    assert "code 7" in report.refusals["exits"]
    assert set(report.refusals) == {"hangs", "crashes", "exits"}
    assert report.complete
    cells = cells_of(request)
    # told again while nothing new happens
    told = list(dict.fromkeys(seen))
    assert told[-len(cells) :] == [("selection", i + 1, len(cells)) for i in range(len(cells))]
    assert set(told) <= {("selection", i, len(cells)) for i in range(len(cells) + 1)}
    names = {"cpu_grouped", "cpu_rowwise", "cpu_padded"}
    found = {(s.backend, s.bucket, s.total_kv, s.max_kv) for s in report.samples}
    assert len(found) == len(report.samples)  # a cell begun twice is reported once
    assert found == {
        (name, cell.bucket, sum(cell.kv_lens), max(cell.kv_lens))
        for name in names
        for cell in cells
    }


def test_when_every_backend_fails_nothing_was_measured() -> None:
    request = request_with({"crashes": "Crashes"}, candidates=("crashes",))
    report = measure_in_child(request, TIMEOUT_S)
    assert report.samples == ()
    assert list(report.refusals) == ["crashes"]


def test_what_progress_raises_ends_the_measuring_while_nothing_happens() -> None:
    request = request_with({"hangs": "Hangs"}, time_limit_s=600.0, candidates=("hangs",))
    calls = 0

    def progress(stage: str, done: int, of: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise PeerLost("rank 1 is gone", rank=1, reason="killed")

    with pytest.raises(PeerLost, match="rank 1 is gone"):
        measure_in_child(request, TIMEOUT_S, progress=progress)


@pytest.mark.long
def test_the_time_limit_ends_the_child() -> None:
    request = request_with({"hangs": "Hangs"}, time_limit_s=600.0, candidates=("hangs",))
    report = measure_in_child(request, 6.0)
    assert not report.complete
    assert report.seconds < 60.0


def test_a_request_that_makes_no_sense_is_an_error() -> None:
    request = request_with({}, candidates=("xqa",))
    with pytest.raises(SelectionError, match="unknown candidates"):
        measure_in_child(request, TIMEOUT_S)


def test_deciding_needs_no_torch() -> None:
    code = "import sys, tp_runtime.selection; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, cwd=ROOT)
    assert done.returncode == 0

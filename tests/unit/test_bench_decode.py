"""`bench decode` on a CPU: the same loop, cells and table as on a GPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tp_runtime.device_times import DeviceTimes
from tp_runtime.launch.__main__ import main
from tp_runtime.launch.bench_decode import _worst_peer
from tp_runtime.launch.bench_report import as_text, floor_us

if TYPE_CHECKING:
    from pathlib import Path

COMMON = ["bench", "decode", "--model", "random:tiny", "--device", "cpu", "--log-level", "error"]


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tp_runtime.launch.bench_decode._COPY_BYTES", 1 << 24)


def test_cells_say_where_the_time_of_a_step_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, trace = tmp_path / "bench.json", tmp_path / "trace.json"
    sizes = ["--batch", "1", "--batch", "3", "--context", "40", "--steps", "12"]
    sampling = ["--sampling", "random", "--sampling", "greedy"]
    assert main([*COMMON, *sizes, *sampling, "--json", str(file), "--trace", str(trace)]) == 0
    result = json.loads(file.read_text())
    cells = [(c["batch"], c["sampling"], c["loop"]) for c in result["cells"]]
    assert cells == [
        (batch, *case)
        for batch in (1, 3)
        for case in (("random", "async"), ("greedy", "async"), ("random", "sync"))
    ]
    assert result["versions"]["torch"]
    assert result["settings"]["model"] == {"value": "random:tiny", "source": "flag"}
    assert result["settings"]["decode_buckets"] == {"value": [1, 3], "source": "flag --batch"}
    for cell in result["cells"]:
        assert cell["device_us"] > 0
        assert 0 < cell["step_us"] <= cell["step_p99_us"]
        assert 0 <= cell["idle_share"] < 1
        assert cell["device_us"] <= cell["device_step_us"] <= cell["device_step_p99_us"]
        assert cell["idle_p50_us"] <= cell["idle_p99_us"]
        assert cell["host_us"]["plan"] > 0
        assert cell["message_us"] is None  # there is nobody to send one to
    # 3 layers of 64 wide, 8 + 2 * 4 heads of 16, 96 columns inside, and a head of 512 ids
    layer = 64 * (16 * (2 * 8 + 2 * 4) + 3 * 96)
    assert result["weight_bytes"] == 4 * (3 * layer + 512 * 64)
    assert result["kv_bytes_per_request"] == 4 * 2 * 3 * 4 * 16 * 40
    assert floor_us(result, 3) > floor_us(result, 1) > 0
    table = as_text(result)
    assert table in capsys.readouterr().out
    assert len(table.splitlines()) == 4 + 1 + 1 + len(cells)
    assert [entry["bucket"] for entry in result["plan"]["buckets"]] == [1, 3]
    for entry in result["plan"]["buckets"]:
        assert f"batch {entry['bucket']} {entry['backends'][0]}" in table
    assert json.loads(trace.read_text())["traceEvents"]


def test_what_an_older_step_left_is_not_a_time_of_this_one() -> None:
    ring = np.arange(16, dtype=np.float64).reshape(2, 8)
    assert _worst_peer(ring, (9, 12), 12) == {"p50": 10.0, "p99": pytest.approx(10.98)}
    assert _worst_peer(ring, (3, 12), 12) is None
    assert _worst_peer(ring[:1], (9, 12), 12) is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch", "0"], "flag --batch='0': expected a whole number of at least 1"),
        (["--steps", "x"], "flag --steps='x': expected a whole number of at least 1"),
        (
            [],
            "flags --context=1024 and --steps=200: expected 2 * context + steps of at most 1024, "
            "the positions of random:tiny, got 2248; lower one of them",
        ),
        (
            ["--context", "90", "--steps", "20", "--max-seq-len", "100"],
            "expected a sum of at most max_seq_len=100, got 110; lower one of them or raise",
        ),
        (
            ["--context", "40", "--steps", "12", "--compare-all-reduce"],
            "flag --compare-all-reduce: expected at least 2 ranks on GPUs, got 1 on cpu, where",
        ),
        (["--context", "30", "--steps", "40"], "flag --context=30: expected more than 40"),
        (["--loop", "slow"], "invalid choice: 'slow'"),
        (["--sampling", "beam"], "invalid choice: 'beam'"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMON, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_device_times_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    moments = iter([1.0, 3.0, 3.5, 5.0])
    monkeypatch.setattr("tp_runtime.device_times.time.perf_counter", lambda: next(moments))
    times: Any = DeviceTimes(torch.device("cpu"))
    for _ in range(2):
        times.begin()
        times.end()
    spans = [(span.busy_us, span.idle_us) for span in times.spans()]
    assert spans == [(2e6, 0.0), (1.5e6, 5e5)]

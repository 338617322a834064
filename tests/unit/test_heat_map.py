"""The picture of a selection, and the measurements of a file that it is drawn from."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tp_runtime.errors import ConfigError
from tp_runtime.launch.__main__ import main
from tp_runtime.launch.plan import describe
from tp_runtime.launch.recorded import read_recorded
from tp_runtime.selection import DecodeShape, Sample, select
from tp_runtime.selection.heat_map import HeatMap, _columns, _fields, _letters

if TYPE_CHECKING:
    from tp_runtime.selection.heat_map import Batches

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SHAPE = DecodeShape(
    q_heads=6, kv_heads=2, head_dim=64, dtype="float32", page_size=64, table_width=8
)
NAMES = ("flashinfer_xqa", "cudnn", "flashinfer_cuda_core")


def heat_map() -> HeatMap:
    samples = tuple(
        Sample(
            backend=name,
            bucket=bucket,
            total_kv=n * bucket,
            max_kv=longest * n,
            median_us=10 + n * bucket / slope + longest,
        )
        for bucket in (2, 8)
        for n in (64, 250)
        for longest in (1, 2)
        for name, slope in zip(NAMES, (40, 60, 50), strict=True)
    )
    return HeatMap(title="a GPU", samples=samples, plan=select(samples, priority=NAMES))


def document() -> dict[str, Any]:
    drawn = heat_map()
    return {
        "device": "a GPU",
        "shape": dataclasses.asdict(SHAPE),
        "samples": [dataclasses.asdict(s) for s in drawn.samples],
        "plan": describe(drawn.plan),
    }


def test_without_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    picture = tmp_path / "map.png"
    # before anything is measured, and before the model is looked at
    assert main(["select", "--model", "no such model", "--png", str(picture)]) == 2
    said = capsys.readouterr().err
    assert "needs matplotlib" in said
    assert "pip install 'tp-runtime[report]'" in said
    assert not picture.exists()


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    recorded = tmp_path / "select.json"
    recorded.write_text(json.dumps(document()))
    for source in (recorded, RESULTS / "selection_regret.json"):
        picture = tmp_path / "map.png"
        assert main(["select", "--png", str(picture), "--recorded", str(source)]) == 0
        assert picture.read_bytes().startswith(b"\x89PNG\r\n")
        picture.unlink()
    nowhere = str(tmp_path / "no" / "map.png")
    assert main(["select", "--png", nowhere, "--recorded", str(recorded)]) == 2
    assert "cannot be written" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="nothing was measured"):
        dataclasses.replace(heat_map(), samples=()).save(tmp_path / "map.png")


def test_what_select_wrote_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "select.json"
    file.write_text(json.dumps(document()))
    again = read_recorded(file)
    assert again.samples == heat_map().samples
    assert again.plan == heat_map().plan
    assert again.title == "a GPU, 6/2 heads"


def test_of_a_regret_file_the_unseen_lengths_are_shown() -> None:
    again = read_recorded(RESULTS / "selection_regret.json")
    assert "lengths that the plan did not see" in again.title
    assert again.plan.mode == "adaptive"
    assert {s.total_kv // s.bucket for s in again.samples if s.bucket == 1} == {
        300, 1200, 5000, 15000
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        "{}",
        '{"shape": {}, "plan": []}',
        '{"shapes": []}',
        '{"shapes": [{"rows": 3}]}',
        '{"plan": {}, "shape": 1}',
    ],
)
def test_another_file_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"recorded measurements .*other\.json"):
        read_recorded(file)


def test_recorded_wants_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["select", "--recorded", "x.json"]) == 2
    assert "expected --png FILE with it" in capsys.readouterr().err


def test_every_backend_has_a_letter_of_its_own() -> None:
    names = ["flashinfer_xqa", "flashinfer_fa2_tc", "cudnn", "flashinfer_cuda_core", "cpu_x"]
    letters = _letters(names)
    assert letters["flashinfer_xqa"] == "X"
    assert len(set(letters.values())) == len(names)
    many = [f"cpu_a{i}" for i in range(20)]
    assert len(set(_letters(many).values())) == 20


def test_ragged_batches_lie_at_the_nearest_length() -> None:
    us = {"cudnn": 1.0}
    times: Batches = {(2, 200, 100): us, (2, 2000, 1000): us, (2, 1500, 900): us, (1, 100, 100): us}
    assert _columns(times) == [100, 1000]
    assert _fields(times, [1, 2], [100, 1000], ragged=True) == {(1, 1): {(2, 1500, 900): us}}
    equal = _fields(times, [1, 2], [100, 1000], ragged=False)
    assert set(equal) == {(0, 0), (1, 0), (1, 1)}

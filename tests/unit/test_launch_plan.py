"""`plan diff`: what a person reads, and what stays in the JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tp_runtime.launch.__main__ import main
from tp_runtime.selection import BackendPlan
from tp_runtime.selection.cost_model import CostModel, Grid
from tp_runtime.selection.plan import BucketPlan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Diff = Callable[[BackendPlan, BackendPlan], tuple[int, list[str]]]

GRID = Grid(
    mean_low=1.0, mean_step=0.3, mean_count=20, ragged_low=0.0, ragged_step=0.3, ragged_count=2
)
MODEL = CostModel(
    fixed_us=5.0, per_token_us=0.01, per_longest_us=0.002, factors=(1.0,) * 40, error=0.1
)


def _entry(bucket: int, **models: CostModel) -> BucketPlan:
    return BucketPlan(
        bucket=bucket, variants=tuple(models), models=tuple(models.values()), grid=GRID
    )


PLAN = BackendPlan(
    priority=("cpu_grouped", "cpu_rowwise", "cpu_padded"),
    entries=(_entry(1, cpu_grouped=MODEL), _entry(8, cpu_padded=MODEL)),
    mode="adaptive",
    device="a machine",
)


@pytest.fixture
def diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Diff:
    """Exit status, and the lines without the digests."""

    def run(first: BackendPlan, second: BackendPlan) -> tuple[int, list[str]]:
        files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
        for plan, file in zip((first, second), files, strict=True):
            plan.save(file)
        status = main(["plan", "diff", *files])
        lines = capsys.readouterr().out.replace(f"{tmp_path}/", "").splitlines()
        return status, [line for line in lines if not line.startswith("digest")]

    return run


def test_equal_plans_are_equal(diff: Diff) -> None:
    assert diff(PLAN, PLAN) == (0, ["equal"])


def test_a_choice_that_differs_comes_first(diff: Diff) -> None:
    both = _entry(8, cpu_padded=MODEL, cpu_grouped=MODEL)
    other = replace(PLAN, entries=(*PLAN.entries[:1], both), device="another", margin=0.05)
    status, lines = diff(PLAN, other)
    assert status == 1
    assert lines[0] == "bucket 8: cpu_padded -> cpu_padded, cpu_grouped"
    assert [line.split("  ")[0] for line in lines[1:]] == ["", "field", "device", "margin"]


def test_buckets_that_only_one_plan_has_are_named_with_its_file(diff: Diff) -> None:
    other = replace(PLAN, entries=(*PLAN.entries[:1], _entry(4, cpu_grouped=MODEL)))
    assert diff(PLAN, other)[1][:2] == [
        "bucket 4: only in b.json, cpu_grouped",
        "bucket 8: only in a.json, cpu_padded",
    ]


def test_fitted_numbers_are_summed_up(diff: Diff) -> None:
    model = replace(
        MODEL, fixed_us=6.0, factors=(0.969,) * 12 + (1.0,) * 28, error=0.25, per_token_us=0.02
    )
    other = replace(PLAN, entries=(_entry(1, cpu_grouped=model), *PLAN.entries[1:]))
    lines = diff(PLAN, other)[1]
    assert [lines[0], *lines[3:]] == [
        "every bucket has the same backends",
        "",
        "bucket 1, cost model of cpu_grouped: fixed 5 -> 6 us, per 1k tokens 10 -> 20 us, "
        "12 of 40 factors differ, at most 3.1 %, error 10.0 -> 25.0 %",
    ]


def test_corrections_for_other_lengths_are_counted(diff: Diff) -> None:
    entry = replace(
        _entry(1, cpu_grouped=replace(MODEL, factors=(1.0,) * 60)),
        grid=replace(GRID, mean_count=30),
    )
    assert diff(PLAN, replace(PLAN, entries=(entry, *PLAN.entries[1:])))[1][-2:] == [
        "bucket 1: the corrections are for other lengths",
        "bucket 1, cost model of cpu_grouped: 40 -> 60 factors",
    ]


def test_a_measured_and_a_fixed_plan_can_be_compared(diff: Diff) -> None:
    fixed = BackendPlan.fixed(PLAN.priority, PLAN.buckets, device="a machine")
    status, lines = diff(PLAN, fixed)
    assert status == 1
    assert lines[0] == "bucket 8: cpu_padded -> cpu_grouped"
    assert not any("cost model" in line for line in lines)


def test_the_json_of_a_difference_has_every_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = replace(MODEL, factors=(1.1,) * 40)
    other = replace(PLAN, entries=(_entry(1, cpu_grouped=model), *PLAN.entries[1:]))
    PLAN.save(tmp_path / "a")
    other.save(tmp_path / "b")
    assert main(["plan", "diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["equal"] is False
    assert [item["field"] for item in document["differences"]] == [
        "digest",
        "entries[1].models[0].factors",
    ]

"""`select` with a selection made by hand: what its JSON says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tp_runtime.launch import select
from tp_runtime.launch.__main__ import main
from tp_runtime.launch.problem import Problem
from tp_runtime.planning import Decision
from tp_runtime.selection import BackendPlan, DecodeShape, DeviceInfo
from tp_runtime.selection.cost_model import CostModel
from tp_runtime.selection.plan import BucketPlan

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPE = DecodeShape(
    q_heads=8, kv_heads=4, head_dim=16, dtype="float32", page_size=64, table_width=2
)


def _selected(error: float) -> select.Selected:
    import torch

    model = CostModel(fixed_us=1.0, per_token_us=0.1, per_longest_us=0.0, error=error)
    plan = BackendPlan(
        priority=("cpu_grouped",),
        entries=(BucketPlan(bucket=1, variants=("cpu_grouped",), models=(model,)),),
        mode="adaptive",
        shape=SHAPE,
    )
    return select.Selected(
        problem=Problem(
            shape=SHAPE,
            device=torch.device("cpu"),
            info=DeviceInfo(type="cpu", name="a machine"),
            buckets=(1,),
            layers=3,
        ),
        decision=Decision(plan=plan, refusals={}, report=None, source="measured"),
    )


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[float], dict[str, Any]]:
    def document(error: float) -> dict[str, Any]:
        monkeypatch.setattr(select, "measure_plan", lambda *a, **k: _selected(error))
        assert main(["select", "--model", "random:tiny", "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return document


@pytest.mark.parametrize(("error", "disturbed"), [(0.1, False), (0.9, True)])
def test_json_says_whether_the_measurements_were_disturbed(
    run: Callable[[float], dict[str, Any]], error: float, disturbed: bool
) -> None:
    assert run(error)["disturbed"] is disturbed


def test_json_says_what_was_selected_for_and_with(run: Callable[[float], dict[str, Any]]) -> None:
    document = run(0.1)
    assert document["model"] == "random:tiny"
    assert document["versions"]["torch"]
    assert document["settings"]["kv_block_size"] == {"value": 64, "source": "default"}
    # it is off by default, and was on here
    assert document["settings"]["enable_dynamic_decode_backend"]["value"] is True

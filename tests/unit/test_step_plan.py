from __future__ import annotations

import numpy as np
import pytest

from tp_runtime.errors import ProtocolError
from tp_runtime.sampling import SamplingParams
from tp_runtime.step_plan import Admit, BlockEntry, Chunk, StepKind, StepPlan

FULL = StepPlan(
    step=12,
    kind=StepKind.MIXED,
    bucket=None,
    variant=0,
    rows=(3, 1),
    num_rows=2,
    admits=(
        Admit(slot=5, sampling=SamplingParams(temperature=0.5, top_k=7, seed=2**62), seed=2**62),
    ),
    blocks=(BlockEntry(slot=5, index=0, block=9), BlockEntry(slot=3, index=4, block=2)),
    chunks=(Chunk(slot=5, start=0, token_ids=np.array([4, 5, 6], dtype=np.int32), samples=True),),
)


def assert_equal(a: StepPlan, b: StepPlan) -> None:
    for name in ("step", "kind", "bucket", "variant", "rows", "num_rows", "blocks"):
        assert getattr(a, name) == getattr(b, name), name
    assert [x.to_message() for x in a.admits] == [x.to_message() for x in b.admits]
    assert [x.to_message() for x in a.chunks] == [x.to_message() for x in b.chunks]


@pytest.mark.parametrize(
    "plan",
    [
        FULL,
        StepPlan(step=0, kind=StepKind.IDLE),
        StepPlan(step=1, kind=StepKind.STOP),
        StepPlan(step=2, kind=StepKind.DECODE, bucket=8, variant=1, rows=None, num_rows=6),
    ],
    ids=lambda plan: plan.kind.name,
)
def test_round_trip(plan: StepPlan) -> None:
    assert_equal(StepPlan.from_message(plan.to_message()), plan)


@pytest.mark.parametrize(
    "message",
    [
        None,
        {"step": 1},
        [],
        [1, 99, -1, 0, 0, None, None, [], []],
        [1, 0, -1, 0, 1, None, np.array([1, 2], dtype=np.int32), [], []],
        [1, 0, -1, 0, 1, None, None, [[1, 2]], []],
        [1, 1, -1, 0, 0, None, None, [], [[0, 0, True, b"abc"]]],
        [1, 1, -1, 0, 0, None, None, [[0, -1.0, 0, 1.0, 0.0, 1]], []],
    ],
)
def test_what_is_no_plan_is_refused(message: object) -> None:
    with pytest.raises(ProtocolError, match="expected a step plan"):
        StepPlan.from_message(message)

from __future__ import annotations

import numpy as np
import pytest
import torch

from tp_runtime.device_state import DeviceState
from tp_runtime.errors import ProtocolError
from tp_runtime.ops.sampling import SamplerMode
from tp_runtime.sampling import SamplingParams
from tp_runtime.step_plan import Admit, Chunk, StepKind, StepPlan


def state() -> DeviceState:
    return DeviceState(slots=4, table_width=6, pages_per_block=2, device=torch.device("cpu"))


def admit(slot: int, **sampling: float) -> Admit:
    return Admit(slot=slot, sampling=SamplingParams(**sampling), seed=11)  # type: ignore[arg-type]


def test_blocks_are_expanded_to_kernel_pages() -> None:
    s = state()
    plan = StepPlan(
        step=0,
        kind=StepKind.IDLE,
        blocks=((1, 0, 5), (3, 2, 1)),
    )
    s.apply(plan)
    assert s.block_table.tolist() == [
        [0] * 6,
        [10, 11, 0, 0, 0, 0],
        [0] * 6,
        [0, 0, 0, 0, 2, 3],
        [0] * 6,
    ]


def test_many_blocks_of_a_step_arrive_as_few_do() -> None:
    blocks = tuple(
        (slot, position, 3 * slot + position + 1) for slot in (0, 2, 3) for position in range(3)
    )
    few, many = state(), state()
    for step, block in enumerate(blocks):
        few.apply(StepPlan(step=step, kind=StepKind.IDLE, blocks=(block,)))
    many.apply(StepPlan(step=0, kind=StepKind.IDLE, blocks=blocks))
    assert many.block_table.tolist() == few.block_table.tolist()
    assert many.block_table[2].tolist() == [14, 15, 16, 17, 18, 19]


def test_a_new_request_finds_nothing_of_the_one_before() -> None:
    s = state()
    s.apply(
        StepPlan(
            step=0,
            kind=StepKind.IDLE,
            admits=(admit(2, temperature=0.7, top_k=3),),
            blocks=((2, 1, 9),),
        )
    )
    s.length[2] = s.last_token[2] = 77
    s.host_length[2] = 77
    assert s.sampler_mode((2,)) is SamplerMode.FILTERED
    s.apply(StepPlan(step=1, kind=StepKind.IDLE, admits=(admit(2),)))
    assert s.length[2] == 0
    assert s.last_token[2] == 0
    assert s.host_length[2] == 0
    assert not s.block_table[2].any()
    assert (float(s.temperature[2]), int(s.top_k[2]), int(s.seed[2])) == (0.0, 0, 11)
    assert s.sampler_mode((2,)) is SamplerMode.GREEDY


def test_the_sampler_is_the_largest_of_the_rows() -> None:
    s = state()
    plan = StepPlan(
        step=0,
        kind=StepKind.IDLE,
        admits=(admit(0), admit(1, temperature=1.0), admit(2, temperature=1.0, top_p=0.9)),
    )
    s.apply(plan)
    assert s.sampler_mode(()) is SamplerMode.GREEDY
    assert s.sampler_mode((0,)) is SamplerMode.GREEDY
    assert s.sampler_mode((0, 1)) is SamplerMode.RANDOM
    assert s.sampler_mode((0, 1, 2)) is SamplerMode.FILTERED


def test_rows_are_those_of_the_decode_step_before_unless_named() -> None:
    s = state()
    assert s.apply(StepPlan(step=0, kind=StepKind.DECODE, rows=(2, 0), num_rows=2)) == (2, 0)
    chunk = Chunk(slot=1, start=0, token_ids=np.array([1], dtype=np.int32), samples=False)
    assert s.apply(StepPlan(step=1, kind=StepKind.PREFILL, chunks=(chunk,))) == ()
    assert s.apply(StepPlan(step=2, kind=StepKind.DECODE, rows=None, num_rows=2)) == (2, 0)
    with pytest.raises(ProtocolError, match="decodes 3 rows, but this rank holds 2"):
        s.apply(StepPlan(step=3, kind=StepKind.DECODE, rows=None, num_rows=3))


@pytest.mark.parametrize("slot", [-1, 4, 5])
def test_a_slot_out_of_range_is_refused_and_nothing_is_applied(slot: int) -> None:
    s = state()
    plan = StepPlan(
        step=7,
        kind=StepKind.DECODE,
        rows=(slot,),
        num_rows=1,
        blocks=((0, 0, 3),),
    )
    with pytest.raises(ProtocolError, match=f"step 7 names slots \\[{slot}\\]"):
        s.apply(plan)
    assert not s.block_table.any()


def test_a_table_entry_out_of_range_is_refused() -> None:
    plan = StepPlan(step=0, kind=StepKind.IDLE, blocks=((0, 3, 1),))
    with pytest.raises(ProtocolError, match="table entries \\[3\\] of 3"):
        state().apply(plan)

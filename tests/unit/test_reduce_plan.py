"""The plan of sums, the layout of the shared device memory, and what the kernel takes."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from tp_runtime.errors import PlanFormatError
from tp_runtime.group import TpGroup
from tp_runtime.ops.peer_reduce import (
    PeerReduce,
    channel_offset,
    workspace_bytes,
)
from tp_runtime.ops.peer_reduce_measure import choose_sums
from tp_runtime.reduce_plan import NO_PEER_REDUCE, PROGRAM_BYTES, REDUCED_BYTES, ReducePlan
from tp_runtime.reduce_tuning import tune_sums


def test_a_size_takes_the_choice_of_the_next() -> None:
    plan = ReducePlan(program_bytes=(2048, 4096, 0, 16384))
    assert [plan.for_bytes(n) for n in (16, 8192, 8208, 16384, 16400, 32768, 65536)] == [
        2048,
        2048,
        4096,
        4096,
        0,
        0,
        16384,
    ]
    assert plan.for_bytes(65537) == 0
    assert NO_PEER_REDUCE.for_bytes(16) == 0


@pytest.mark.parametrize(("ranks", "most"), [(2, 1 << 20), (4, 1 << 18), (8, 1 << 17)])
def test_the_default_bounds_what_a_rank_sends(ranks: int, most: int) -> None:
    plan = ReducePlan.usual(ranks)
    assert plan.for_bytes(8192) in PROGRAM_BYTES
    assert plan.for_bytes(most) in PROGRAM_BYTES
    assert plan.for_bytes(most + 1) == 0


def test_a_plan_survives_its_message_and_is_known_by_its_digest() -> None:
    plan = ReducePlan(program_bytes=(4096, 0))
    assert ReducePlan.from_message(plan.to_message()) == plan
    assert plan.digest != NO_PEER_REDUCE.digest
    assert plan.digest == ReducePlan(program_bytes=(4096, 0)).digest


@pytest.mark.parametrize("message", [None, 7, "2048", [1], [2048.0], [True], [0] * 9, {"a": 1}])
def test_a_malformed_plan_is_refused(message: object) -> None:
    with pytest.raises(PlanFormatError, match="expected"):
        ReducePlan.from_message(message)


def test_the_fastest_way_is_chosen_but_nccl_is_kept_when_as_fast() -> None:
    times = {(size, program): 10.0 for size in REDUCED_BYTES for program in (0, *PROGRAM_BYTES)}
    times[8192, 2048] = 5.0
    times[16384, 8192] = 9.8  # within the margin
    times[1 << 20, 16384] = 4.0
    assert choose_sums(times).program_bytes == (2048, *[0] * 6, 16384)


@pytest.mark.parametrize("ranks", [2, 8])
def test_channels_do_not_overlap_and_hold_the_largest_tensor(ranks: int) -> None:
    ends = 0
    for program_bytes in PROGRAM_BYTES:
        begin = channel_offset(program_bytes, ranks)
        assert begin == ends
        assert begin % 256 == 0
        ends = begin + 2 * ranks * REDUCED_BYTES[-1]
        assert REDUCED_BYTES[-1] % program_bytes == 0
    assert ends == workspace_bytes(ranks)


@pytest.mark.parametrize(
    ("t", "taken"),
    [
        (torch.zeros(1, 8, dtype=torch.bfloat16), True),
        (torch.zeros(1, 7, dtype=torch.bfloat16), False),
        (torch.zeros(3, 4), True),
        (torch.zeros(4, dtype=torch.int64), False),
        (torch.zeros(4, 8)[:, ::2], False),
        (torch.zeros(0), False),
        (torch.zeros(9)[1:], False),
        (torch.zeros(1 << 18), True),
        (torch.zeros((1 << 18) + 4), False),
    ],
)
def test_what_the_kernel_takes(t: torch.Tensor, taken: bool) -> None:
    assert PeerReduce.takes(t) is taken


def test_every_engine_of_a_group_sums_as_its_own_settings_say() -> None:
    group = TpGroup(
        rank=0,
        size=1,
        device=torch.device("cpu"),
        timeout_s=0.0,
        accelerator=cast("Any", object()),
    )
    assert group._on_device is not None
    group._on_device._peer = cast("Any", object())
    channel = cast("Any", None)  # nothing is agreed where nothing is measured
    for wanted in (True, False, True):
        plan = tune_sums(channel, group, peer_memory=wanted, measured=False, timeout_s=1)
        assert plan == group.reduce_plan == (ReducePlan.usual(1) if wanted else NO_PEER_REDUCE)

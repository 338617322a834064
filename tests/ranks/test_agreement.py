"""Agreement of real processes over the real channel."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tp_runtime.broadcast import BroadcasterConfig, CpuTpBroadcaster
from tp_runtime.errors import PeerLost, PlanMismatch, TpRuntimeError
from tp_runtime.ranks import RankInfo
from tp_runtime.rendezvous import channel_address
from tp_runtime.selection import (
    BackendPlan,
    DecodeShape,
    Eligibility,
    Sample,
    agree,
    agree_capture,
    select,
)
from tp_runtime.testing import run_ranks

SHAPE = DecodeShape(
    q_heads=6, kv_heads=2, head_dim=64, dtype="float32", page_size=64, table_width=8
)
NAMES = ("cpu_grouped", "cpu_rowwise", "cpu_padded", "torch_reference")
TIMEOUT_S = 90.0
Outcome = dict[str, object]


def measured_plan() -> BackendPlan:
    samples = [
        Sample(
            backend=name, bucket=bucket, total_kv=bucket * n, max_kv=n, median_us=fixed + slope * n
        )
        for bucket in (1, 4, 16)
        for n in (64, 256, 512)
        for name, fixed, slope in (("cpu_grouped", 1.0, 0.3), ("cpu_rowwise", 30.0, 0.1))
    ]
    return select(samples, priority=NAMES, shape=SHAPE)


def agree_on_rank(disabled: list[list[str]], descriptors: list[int], dying: int) -> Outcome:
    """Agree on the measured plan, then on a capture; what came of it, as JSON values."""
    info = RankInfo.from_env()
    channel = CpuTpBroadcaster.join(
        rank=info.tp_rank,
        world_size=info.tp_size,
        address=channel_address(info),
        config=BroadcasterConfig(join_timeout_s=60.0, timeout_s=30.0),
    )
    eligibility = Eligibility(disabled=frozenset(disabled[info.tp_rank]))

    def check(plan: BackendPlan) -> dict[str, str]:  # by settings alone: the ranks load no torch
        reasons = {name: eligibility.refusal(name) for name in plan.priority}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    root = info.tp_rank == 0
    started = time.monotonic()
    try:
        if info.tp_rank == dying:
            channel.receive()
            os.kill(os.getpid(), signal.SIGKILL)
        plan = agree(channel, measured_plan() if root else None, check=check)
        digest = agree_capture(
            channel, {"plan": plan.digest, "table_width": descriptors[info.tp_rank]}, root=root
        )
    except TpRuntimeError as error:
        return {
            "error": type(error).__name__,
            "text": str(error),
            "seconds": time.monotonic() - started,
        }
    finally:
        channel.close()
    return {"digest": plan.digest, "variants": list(plan[4]), "capture": digest}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_hold_one_plan_and_one_capture(world_size: int) -> None:
    nothing: list[list[str]] = [[]] * world_size
    results = run_ranks(agree_on_rank, world_size, TIMEOUT_S, args=(nothing, [8] * world_size, -1))
    plan = measured_plan()
    assert [r["digest"] for r in results] == [plan.digest] * world_size
    assert len({r["capture"] for r in results}) == 1


def test_a_refused_variant_is_dropped_on_all_ranks() -> None:
    disabled = [[], ["cpu_rowwise"], ["torch_reference"]]
    results = run_ranks(agree_on_rank, 3, TIMEOUT_S, args=(disabled, [8, 8, 8], -1))
    expected = measured_plan().without({"cpu_rowwise", "torch_reference"})
    assert measured_plan()[4] == ("cpu_grouped", "cpu_rowwise")
    assert [r["digest"] for r in results] == [expected.digest] * 3
    assert [r["variants"] for r in results] == [["cpu_grouped"]] * 3


def test_another_capture_is_named_with_rank_and_field() -> None:
    results = run_ranks(agree_on_rank, 2, TIMEOUT_S, args=([[], []], [8, 16], -1))
    assert [r["error"] for r in results] == [PlanMismatch.__name__] * 2
    assert "rank 1: field table_width: expected 8, got 16" in results[0]["text"]


def test_no_backend_in_common_is_an_error_on_every_rank() -> None:
    disabled = [[], list(NAMES[:2]), list(NAMES[2:])]
    results = run_ranks(agree_on_rank, 3, TIMEOUT_S, args=(disabled, [8] * 3, -1))
    assert results[0]["error"] == "BackendUnavailable"
    assert all("every backend of the plan was refused" in r["text"] for r in results)


def test_a_peer_that_dies_ends_the_agreement_at_once() -> None:
    results = run_ranks(
        agree_on_rank, 3, TIMEOUT_S, args=([[]] * 3, [8] * 3, 2), expect_exit={2: -signal.SIGKILL}
    )
    for result in results[:2]:
        assert result["error"] == PeerLost.__name__
        assert "rank 2" in result["text"]
        assert result["seconds"] < 10.0  # far below the 30 s that a wait may last

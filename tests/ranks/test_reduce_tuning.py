"""Two CPU ranks agree on rank 0's plan of sums, or none of them uses it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tp_runtime.broadcast import CpuTpBroadcaster
from tp_runtime.errors import BroadcastError, PlanMismatch, TpGroupError
from tp_runtime.group import TpGroup
from tp_runtime.ranks import RankInfo
from tp_runtime.reduce_plan import NO_PEER_REDUCE, ReducePlan
from tp_runtime.reduce_tuning import agree_reduce_plan, tune_sums
from tp_runtime.testing import run_ranks


def join(folder: str) -> tuple[RankInfo, CpuTpBroadcaster]:
    info = RankInfo.from_env()
    address = Path(folder) / "channel.sock"
    return info, CpuTpBroadcaster.join(rank=info.tp_rank, world_size=2, address=address)


def agree(folder: str) -> list[int]:
    info, channel = join(folder)
    plan = ReducePlan(program_bytes=(2048, 0, 16384)) if info.tp_rank == 0 else None
    agreed = agree_reduce_plan(channel, plan, timeout_s=20)
    channel.close()
    return agreed.to_message()


def disagree(folder: str) -> str:
    """Rank 0 ships a plan that no rank knows."""
    info, channel = join(folder)
    try:
        if info.tp_rank == 0:
            receipt = channel.confirm({"kind": "sums", "plan": [17]}, timeout_s=20)
            assert not receipt.committed
            return receipt.refusals[1]
        with pytest.raises(PlanMismatch, match="cannot sum as rank 0 chose"):
            agree_reduce_plan(channel, None, timeout_s=20)
        return "refused"
    finally:
        channel.close()


def without_peer_memory(folder: str) -> list[object]:
    info, channel = join(folder)
    group = TpGroup.create(info, device=torch.device("cpu"), timeout_s=20)
    plan = tune_sums(channel, group, measured=True, timeout_s=20)
    group.raise_if_failed()
    with pytest.raises(TpGroupError, match="shares no device memory"):
        group.use_reduce_plan(ReducePlan.usual(2))
    refused = isinstance(group.peer_reduce, type(None))
    result: list[object] = [plan == NO_PEER_REDUCE, refused, group.statistics().peer]
    group.barrier()
    group.fail(BroadcastError("told to stop"))
    with pytest.raises(BroadcastError, match="told to stop"):
        group.raise_if_failed()
    group.close()
    channel.close()
    return result


def test_every_rank_has_the_plan_of_rank_0(tmp_path: Path) -> None:
    assert run_ranks(agree, 2, 60, args=(os.fspath(tmp_path),)) == [[2048, 0, 16384]] * 2


def test_a_plan_that_a_rank_cannot_read_is_used_by_none(tmp_path: Path) -> None:
    refusal, other = run_ranks(disagree, 2, 60, args=(os.fspath(tmp_path),))
    assert "expected at most 8 numbers" in refusal
    assert other == "refused"


def test_ranks_without_peer_memory_keep_nccl(tmp_path: Path) -> None:
    got = run_ranks(without_peer_memory, 2, 60, args=(os.fspath(tmp_path),))
    assert got == [[True, True, 0]] * 2

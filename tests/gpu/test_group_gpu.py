"""TpGroup over NCCL, with one GPU for each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tp_runtime.group import TpGroup
from tp_runtime.ranks import RankInfo
from tp_runtime.testing import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def collectives() -> int:
    info = RankInfo.from_env()
    device = torch.device("cuda", info.local_rank)
    torch.cuda.set_device(device)
    count = 0
    for _ in range(2):  # a group may be formed again in the same process
        group = TpGroup.create(info, device=device, timeout_s=60)
        check(group)
        count += group.statistics().device
        group.close()
    return count


def check(group: TpGroup) -> None:
    device, rank, size = group.device, group.rank, group.size
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        mine = torch.full((3, 5), rank + 1, dtype=dtype, device=device)
        assert group.all_reduce(mine) is mine
        assert mine.eq(size * (size + 1) // 2).all()
        gathered = group.all_gather(torch.full((2, 3), rank, dtype=dtype, device=device))
        assert gathered[:, 0, 0].tolist() == list(range(size))
        sent = torch.full((4,), 7 if rank == 0 else 0, dtype=dtype, device=device)
        assert group.broadcast(sent).eq(7).all()
    strided = torch.full((4, 6), float(rank), device=device)[:, ::2]
    assert group.all_reduce(strided).eq(sum(range(size))).all()
    assert group.all_reduce(torch.tensor([rank])).item() == sum(range(size))  # on the CPU
    group.barrier()
    assert group.broadcast_bytes(b"plan" if rank == 0 else None) == b"plan"

    # captured, and replayed on other input
    static = torch.zeros(64, device=device)
    graph = torch.cuda.CUDAGraph()
    make_stream: Any = torch.cuda.Stream  # torch gives it no types
    stream = make_stream(device)
    with torch.cuda.stream(stream):
        group.all_reduce(static)
    stream.synchronize()
    group.barrier()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        group.all_reduce(static)
        static.mul_(2)
    for value in (1.0, 5.0):
        static.fill_(value * (rank + 1))
        graph.replay()
        assert static.eq(value * size * (size + 1)).all()
    torch.cuda.synchronize()
    del graph


def a_hosts_nccl_group() -> list[object]:
    info = RankInfo.from_env()
    torch.cuda.set_device(info.local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", info.local_rank))
    pg = dist.group.WORLD
    assert pg is not None
    group = TpGroup.from_process_group(pg)
    summed = group.all_reduce(torch.ones(3, device=group.device)).tolist()
    sent = group.broadcast_bytes(b"plan" if group.rank == 0 else None).decode()
    group.barrier()
    group.close()
    after = torch.ones(1, device=group.device)
    dist.all_reduce(after)
    result: list[object] = [str(group.device), summed, sent, after.item()]
    dist.destroy_process_group()
    return result


def test_collectives_and_graphs() -> None:
    assert run_ranks(collectives, 2, 180) == [2 * 12] * 2


def test_a_hosts_nccl_group_is_used_and_left_open() -> None:
    assert run_ranks(a_hosts_nccl_group, 2, 180) == [
        [f"cuda:{rank}", [2.0, 2.0, 2.0], "plan", 2.0] for rank in range(2)
    ]

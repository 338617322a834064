"""Sums through peer memory: numbers, replays, and the death of a peer.

On machines with too few GPUs the ranks share one, see `gpu_group`.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.gpu.gpu_group import open_group, too_few_gpus
from tp_runtime.errors import DeadlineExceeded, PeerLost
from tp_runtime.ops.norm import rms_norm
from tp_runtime.ops.peer_reduce_measure import choose_sums, measure_sums
from tp_runtime.reduce_plan import PROGRAM_BYTES, REDUCED_BYTES, ReducePlan
from tp_runtime.testing import run_ranks

if TYPE_CHECKING:
    from tp_runtime.group import TpGroup
    from tp_runtime.ops.peer_reduce import PeerReduce

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

WIDTHS = {torch.bfloat16: (8, 1016, 4096), torch.float16: (4104,), torch.float32: (4, 1004, 4096)}
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-23}


def opened() -> tuple[TpGroup, PeerReduce]:
    group = open_group()
    assert group.peer_reduce is not None
    return group, group.peer_reduce


def inputs(group: TpGroup, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[Any]:
    """The addend of every rank, on every rank."""
    made = []
    for rank in range(group.size):
        generator = torch.Generator(group.device).manual_seed(1000 * seed + rank)
        t = torch.randn(shape, generator=generator, device=group.device)
        made.append(t.to(dtype))
    return made


def same_bits(group: TpGroup, t: torch.Tensor) -> None:
    everyone = group.all_gather(t.view(torch.uint8).cpu())
    assert all(torch.equal(each, everyone[0]) for each in everyone)


def sums_are_those_of_float32() -> int:
    group, reduce = opened()
    count = 0
    for dtype, widths in WIDTHS.items():
        for width in widths:
            for rows in (1, 2, 3, 7, 8, 17, 32):
                addends = inputs(group, (rows, width), dtype, count)
                total = torch.zeros(rows, width, device=group.device)
                for addend in addends:  # in rank order, in float32, rounded once
                    total += addend.float()
                expected = total.to(dtype)
                for program_bytes in PROGRAM_BYTES:
                    for _ in range(3):  # both halves of the memory
                        mine = addends[group.rank].clone()
                        assert reduce.all_reduce(mine, program_bytes=program_bytes) is mine
                        assert torch.equal(mine, expected)
                        count += 1
                same_bits(group, mine)
    # numbers that are no numbers, among them the mark of empty memory
    odd = torch.full((8, 64), -1, dtype=torch.int32, device=group.device).view(torch.bfloat16)
    odd[1] = float("inf")
    odd[2] = -0.0
    reduce.all_reduce(odd, program_bytes=2048)
    assert odd[0].isnan().all()
    assert odd[1].isposinf().all()
    assert odd[2].eq(0).all()
    assert not reduce.gave_up
    group.close()
    return count


def norms_are_those_of_torch() -> float:
    group, reduce = opened()
    worst = 0.0
    for dtype in (torch.bfloat16, torch.float32):
        for width in (512, 1016, 4096):
            weight = inputs(group, (width,), dtype, 5)[0]
            for rows in (1, 3, 8, 32):
                addends = inputs(group, (rows, width), dtype, rows)
                plain = addends[group.rank].clone()
                reduce.all_reduce(plain, program_bytes=4096)
                summed, normed = reduce.all_reduce_norm(addends[group.rank].clone(), weight, 1e-5)
                assert torch.equal(summed, plain)
                expected = rms_norm(plain.double(), weight.double(), 1e-5)
                error = (normed.double() - expected).norm() / expected.norm()
                worst = max(worst, float(error) / ROUNDING[dtype])
                same_bits(group, normed)
    with pytest.raises(ValueError, match="rows of at most"):
        reduce.all_reduce_norm(
            torch.zeros(1, 16384, device=group.device), torch.zeros(16384, device=group.device), 0.0
        )
    group.close()
    return worst


def graphs_replay(replays: int) -> list[int]:
    """64 sums of two sizes in a graph, over inputs that change; eager sums in between."""
    group, _ = opened()
    rank, size, device = group.rank, group.size, group.device
    small = torch.zeros(1, 4096, device=device, dtype=torch.float32)
    large = torch.zeros(32, 4096, device=device, dtype=torch.bfloat16)
    wrong = torch.zeros(1, device=device, dtype=torch.int64)
    turn = torch.zeros(1, device=device)

    def body() -> None:
        turn.add_(1)
        for index in range(32):
            value = (turn + index) % 61
            small.copy_((value + rank).expand_as(small))
            group.all_reduce(small)
            wrong.add_((small != size * value + size * (size - 1) / 2).sum())
            large.copy_((value % 7 + rank).expand_as(large))
            group.all_reduce(large)
            wrong.add_((large != size * (value % 7) + size * (size - 1) / 2).sum())

    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        body()
    stream.synchronize()
    group.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        body()
    with torch.cuda.stream(stream):
        for replay in range(replays):
            graph.replay()
            if replay % 100 == rank:  # the ranks drift apart now and then
                stream.synchronize()
            if replay % 50 == 0:  # an odd number of sums outside the graph
                eager = torch.full((3, 8), float(rank), device=device)
                assert group.all_reduce(eager) is eager
                wrong.add_((eager != size * (size - 1) / 2).sum())
    stream.synchronize()
    group.raise_if_failed()
    result = [int(wrong), int(turn), group.statistics().peer]
    graph.reset()
    group.close()
    return result


def plan_is_measured() -> list[Any]:
    group, _ = opened()
    before = group.reduce_plan
    times = measure_sums(group, repeats=3)
    assert group.reduce_plan == before == ReducePlan.usual(2)
    plan = choose_sums(times)
    assert len(plan.program_bytes) == len(REDUCED_BYTES)
    group.close()
    return [[size, program, round(us, 2)] for (size, program), us in times.items()]


def peer_dies(how: str) -> float:
    """Rank 1 ends, or stops, before a sum that rank 0 waits for in a graph."""
    group, reduce = opened()
    t = torch.ones(1, 4096, device=group.device)
    group.all_reduce(t)
    torch.cuda.synchronize()
    stream: Any = torch.cuda.Stream(group.device)  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(64):
            group.all_reduce(t)
    group.set_timeout(2.0)
    group.barrier()
    if group.rank == 1:
        if how != "kill":
            time.sleep(5.0)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    if how == "told":
        with torch.cuda.stream(stream):
            graph.replay()
        time.sleep(0.2)
        group.fail(PeerLost("TP rank 1 is gone", rank=1, reason="test"))
    else:
        with torch.cuda.stream(stream):
            graph.replay()
    stream.synchronize()
    seconds = time.monotonic() - begin
    assert reduce.gave_up
    expected = {"kill": "its process has ended", "late": "longer than 2 s", "told": "is gone"}
    with pytest.raises((PeerLost, DeadlineExceeded), match=expected[how]):
        group.raise_if_failed()
    with pytest.raises((PeerLost, DeadlineExceeded)):
        group.all_reduce(t)
    graph.reset()
    group.close()
    return seconds


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_those_of_float32_in_rank_order(ranks: int) -> None:
    counts = run_ranks(sums_are_those_of_float32, ranks, 200)
    assert min(counts) == max(counts) > 500


@pytest.mark.parametrize("ranks", [2, 3])
def test_sum_and_norm_in_one_launch(ranks: int) -> None:
    worst = run_ranks(norms_are_those_of_torch, ranks, 200)
    assert max(worst) < 1.5, worst


@pytest.mark.parametrize("ranks", [2, 3])
def test_thousands_of_replays(ranks: int) -> None:
    replays = 100 if too_few_gpus(ranks) else 10_000
    results = run_ranks(graphs_replay, ranks, 200, args=(replays,))
    assert results == [[0, replays + 1, 64 * 2 + replays // 50]] * ranks


def test_measured_choice() -> None:
    for times in run_ranks(plan_is_measured, 2, 120):
        print(times)
        assert all(us > 0 for _, _, us in times)


@pytest.mark.parametrize(("how", "most_s"), [("kill", 4.0), ("late", 4.0), ("told", 1.0)])
def test_a_peer_that_does_not_come(how: str, most_s: float) -> None:
    seconds = run_ranks(peer_dies, 2, 90, args=(how,), expect_exit={1: -9})[0]
    print(how, seconds)
    assert seconds < most_s

"""Microseconds of an all-reduce between the GPUs of one host, inside CUDA graphs.

    torchrun --standalone --nproc-per-node 2 benchmarks/all_reduce.py [--json FILE]

Ways: NCCL, torch's one-shot over symmetric memory, and the runtime's own, alone and with the RMS
norm after it. A graph holds many sums in a row, each after the one before (all but torch's one-shot
over its result), and a number is the time of a replay divided by them; the slowest rank's median
counts. Rows are 4096 bfloat16 numbers, 8 KiB, as in Llama-3-8B.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tp_runtime.group import TpGroup
from tp_runtime.ops.norm import rms_norm
from tp_runtime.ranks import RankInfo
from tp_runtime.reduce_plan import NO_PEER_REDUCE, PROGRAM_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 4096
ROWS = (1, 2, 8, 32, 64, 128)
SUMS = 65  # of a step of Llama-3-8B
REPLAYS = 21
EPS = 1e-5


class Bench:
    """One rank's part; every rank makes the same calls."""

    def __init__(self, group: TpGroup) -> None:
        self.group = group
        self.stream: Any = torch.cuda.Stream(group.device)  # type: ignore[no-untyped-call]

    def us(self, op: Callable[[], object]) -> float:
        """Of one launch of op in a chain, on the slowest rank."""
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                op()
        self.stream.synchronize()
        self.group.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            for _ in range(SUMS):
                op()
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        times = []
        with torch.cuda.stream(self.stream):
            for _ in range(REPLAYS):
                start.record(self.stream)
                graph.replay()
                end.record(self.stream)
                end.synchronize()
                times.append(start.elapsed_time(end) * 1e3 / SUMS)
        graph.reset()
        mine = torch.tensor([statistics.median(times[1:])], dtype=torch.float64)
        return round(float(self.group.all_gather(mine).max()), 2)

    def size(self, rows: int, symmetric: Callable[[int], Callable[[], object]] | str) -> Any:
        group, peer = self.group, self.group.peer_reduce
        t = torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device=group.device)
        weight = torch.ones(WIDTH, dtype=torch.bfloat16, device=group.device)
        usual = group.reduce_plan
        group.use_reduce_plan(NO_PEER_REDUCE)
        result: dict[str, Any] = {"rows": rows, "bytes": t.nbytes}
        result["nccl"] = self.us(lambda: group.all_reduce(t))

        def nccl_norm() -> None:
            group.all_reduce(t)
            rms_norm(t, weight, EPS)

        result["nccl_then_norm"] = self.us(nccl_norm)
        group.use_reduce_plan(usual)
        if not isinstance(symmetric, str):
            result["torch_symmetric_one_shot"] = self.us(symmetric(rows))
        if peer is not None:
            for program_bytes in PROGRAM_BYTES:
                result[f"peer_{program_bytes}"] = self.us(
                    lambda n=program_bytes: peer.all_reduce(t, program_bytes=n)  # type: ignore[misc]
                )
            if rows * WIDTH * 2 <= 1 << 20:
                result["peer_with_norm"] = self.us(lambda: peer.all_reduce_norm(t, weight, EPS))

            def peer_norm() -> None:
                group.all_reduce(t)
                rms_norm(t, weight, EPS)

            result["peer_then_norm"] = self.us(peer_norm)
        return result


def symmetric_one_shot(group: TpGroup) -> Callable[[int], Callable[[], object]] | str:
    """torch's own, from the symmetric buffer to another; its barriers keep a chain in order."""
    try:
        import torch.distributed._symmetric_memory as symm_mem

        dist.init_process_group("nccl", device_id=group.device)
        world: Any = dist.group.WORLD
        shared = symm_mem.empty(ROWS[-1] * WIDTH, dtype=torch.bfloat16, device=group.device)
        symm_mem.rendezvous(shared, world.group_name)
        shared.zero_()
    except (ImportError, RuntimeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    ops: Any = torch.ops.symm_mem

    def of(rows: int) -> Callable[[], object]:
        t = shared[: rows * WIDTH]
        out = torch.empty_like(t)
        return lambda: ops.one_shot_all_reduce_out(t, "sum", world.group_name, out)

    return of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    info = RankInfo.from_env()
    device = torch.device("cuda", info.local_rank)
    torch.cuda.set_device(device)
    group = TpGroup.create(info, device=device, timeout_s=60, peer_memory=True)
    symmetric = symmetric_one_shot(group)
    if isinstance(symmetric, str) and group.rank == 0:
        print("torch symmetric memory:", symmetric)
    bench = Bench(group)
    rows = []
    for count in ROWS:
        rows.append(bench.size(count, symmetric))
        if group.rank == 0:
            print(rows[-1], flush=True)
    group.raise_if_failed()
    if group.rank == 0:
        import triton

        nccl: Any = torch.cuda.nccl
        report = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "gpu": torch.cuda.get_device_name(device),
            "ranks": group.size,
            "versions": {
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "nccl": ".".join(map(str, nccl.version())),
                "triton": triton.__version__,
            },
            "environment": {
                name: os.environ[name]
                for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST")
                if name in os.environ
            },
            "unit": "microseconds of one sum in a graph of 65 in a row, slowest rank's median",
            "sizes": rows,
        }
        text = json.dumps(report, indent=1)
        if args.json is not None:
            args.json.write_text(text + "\n")
        print(text)
    group.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

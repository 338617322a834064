"""Microseconds of the ops around a decode step, fused and in plain torch, inside CUDA graphs.

    python benchmarks/step_ops.py [--rows 1,8,32] [--json FILE]

Shapes are those of Llama-3-8B on one GPU. A graph holds many launches of one op in a row, so that
a number is what one more of them adds to a step; the inputs stay in the L2 cache, as they would
after the matrix product that wrote them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tp_runtime.device_state import DeviceState
from tp_runtime.ops import sampling, sampling_gpu
from tp_runtime.ops.gather import gather_rows, gather_rows_reference
from tp_runtime.ops.rope import RopeTable
from tp_runtime.ops.rope_append import rope_append, rope_append_reference
from tp_runtime.ops.step_state import (
    begin_step,
    begin_step_reference,
    end_step,
    end_step_reference,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

Q_HEADS, KV_HEADS, HEAD_DIM, VOCAB = 32, 8, 128, 128_256
PAGE, TABLE_WIDTH, SLOTS = 64, 512, 256
TARGET_US = 1500.0  # of one replay
REPLAYS = 15


def graph_us(op: Callable[[], Any]) -> float:
    """Median time that one launch of op takes in a long chain of them."""
    for _ in range(2):
        op()
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    launches, taken = 4, 0.0
    for _ in range(2):  # a short chain first, to learn how long the chain has to be
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(launches):
                op()
        times = []
        for _ in range(REPLAYS):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * start.elapsed_time(end) / launches)
        taken = statistics.median(times)
        launches = max(4, min(200, int(TARGET_US / taken)))
    return taken


def filled_state() -> DeviceState:
    device = torch.device("cuda")
    s = DeviceState(slots=SLOTS, table_width=TABLE_WIDTH, pages_per_block=1, device=device)
    s.length[:SLOTS] = torch.randint(0, 8000, (SLOTS,), device=device)
    s.block_table[:SLOTS] = torch.randint(
        1, 900, (SLOTS, TABLE_WIDTH), dtype=torch.int32, device=device
    )
    s.seed[:SLOTS] = torch.arange(SLOTS, device=device)
    return s


def step_ops(rows: int) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Fused and plain form of the ops on slots and heads."""
    device = torch.device("cuda")
    make: Any = {"dtype": torch.bfloat16, "device": device}
    s, slots = filled_state(), torch.arange(rows, device=device) * 3
    table = RopeTable(HEAD_DIM, theta=5e5, max_positions=32_768, **make)
    where: Any = {"kv_heads": KV_HEADS, "page_size": PAGE}
    row = begin_step_reference(slots, s, **where)
    cos, sin = table.at(row.positions)
    embedding = torch.randn(VOCAB, Q_HEADS * HEAD_DIM, **make)
    qkv = torch.randn(rows, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, **make)
    k, v = torch.zeros(2, 1024, KV_HEADS, PAGE, HEAD_DIM, **make).unbind(0)
    norms = dict(zip(("q_norm", "k_norm"), torch.rand(2, HEAD_DIM, **make), strict=True))
    heads: Any = (qkv, cos, sin, row.cache_rows, k, v)
    tokens = torch.arange(rows, device=device)
    return {
        "rope_append": (
            lambda: rope_append(*heads),
            lambda: rope_append_reference(*heads),
        ),
        "rope_append_qk_norm": (
            lambda: rope_append(*heads, eps=1e-6, **norms),
            lambda: rope_append_reference(*heads, eps=1e-6, **norms),
        ),
        "begin_step": (
            lambda: begin_step(slots, s, **where),
            lambda: begin_step_reference(slots, s, **where),
        ),
        "embedding": (
            lambda: gather_rows(tokens, embedding),
            lambda: gather_rows_reference(tokens, embedding),
        ),
        "end_step": (
            lambda: end_step(slots, tokens, s),
            lambda: end_step_reference(slots, tokens, s),
        ),
    }


def sampling_ops(
    rows: int, dtype: torch.dtype
) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    device = torch.device("cuda")
    logits = (torch.randn(rows, VOCAB, device=device) * 3).to(dtype)
    heat = torch.full((rows,), 0.8, device=device)
    seed = torch.arange(rows, device=device)
    position = seed + 100
    none = torch.zeros(rows, dtype=torch.int64, device=device)

    def decoded(best: tuple[Tensor, Tensor]) -> Tensor:
        return sampling._decode(sampling._encode(*best))

    def filters(k: int, p: float, m: float) -> tuple[Callable[[], Any], Callable[[], Any]]:
        values = (heat, none + k, heat * 0 + p, heat * 0 + m, seed, position)
        return (
            lambda: sampling_gpu.filtered(logits, *values),
            lambda: sampling.filtered(logits.float(), *values),
        )

    return {
        "greedy": (
            lambda: sampling_gpu.best_tokens(logits),
            lambda: decoded(sampling.greedy(logits.float(), 0)),
        ),
        "random": (
            lambda: sampling_gpu.best_tokens(logits, heat, seed, position),
            lambda: decoded(sampling.random(logits.float(), 0, heat, seed, position)),
        ),
        "filtered_top_p_0.9": filters(0, 0.9, 0.0),
        "filtered_top_k_50": filters(50, 1.0, 0.0),
        "filtered_top_k_50_top_p_0.9": filters(50, 0.9, 0.0),
        "filtered_min_p_0.05": filters(0, 1.0, 0.05),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/step_ops.json"))
    args = parser.parse_args()
    import triton

    cells = []
    print(f"{'op':32} {'logits':>9} {'rows':>5} {'fused us':>9} {'torch us':>9}")
    with torch.inference_mode():
        for rows in map(int, args.rows.split(",")):
            ops = [(name, "", forms) for name, forms in step_ops(rows).items()]
            for dtype in (torch.bfloat16, torch.float32):
                short = str(dtype).removeprefix("torch.")
                ops += [(n, short, forms) for n, forms in sampling_ops(rows, dtype).items()]
            for name, logits, (fused, plain) in ops:
                cell = {
                    "op": name, "logits": logits, "rows": rows,
                    "fused_us": round(graph_us(fused), 2), "torch_us": round(graph_us(plain), 2),
                }  # fmt: skip
                cells.append(cell)
                print(
                    f"{name:32} {logits:>9} {rows:5d} {cell['fused_us']:9.2f} "
                    f"{cell['torch_us']:9.2f}",
                    flush=True,
                )
    report = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "shape": {
            "q_heads": Q_HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab": VOCAB,
            "page_size": PAGE, "table_width": TABLE_WIDTH,
        },
        "cells": cells,
    }  # fmt: skip
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

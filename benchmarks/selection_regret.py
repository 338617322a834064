"""How far the selection is from the best backend, on a GPU.

    python benchmarks/selection_regret.py [--heads 32/8,4/1] [--repeats 5] [--json FILE]

For each head shape the usual profiles are measured and make the plans; other KV lengths and other
ragged batches, measured interleaved with them in the same child process, judge the plans. Regret is
the time of a choice over the time of the fastest backend in the same cell.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tp_runtime.selection import (
    BackendPlan,
    BenchRequest,
    DecodeShape,
    DeviceInfo,
    available_backends,
    measure_in_child,
    select,
)
from tp_runtime.selection.bench import BenchReport, cells_of
from tp_runtime.selection.registry import PRIORITY
from tp_runtime.selection.regret import Regret, RegretCell, regret_of_one, regret_of_plan

HEADS = ("32/8", "16/4", "8/2", "4/1", "28/4")
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
TRAINED_KV = (128, 512, 2048, 8192, 24576)
HELD_OUT_KV = (300, 1200, 5000, 15000)
HELD_OUT_SIGMAS = (0.5, 0.8, 1.1)
PAGE_SIZE, TABLE_TOKENS = 64, 32768
MOST_TOKENS = 1 << 20  # of a cell
OURS = "triton_splitkv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One head shape: what was measured, and how the rules do on the held-out cells."""

    heads: str
    seconds: float
    refusals: dict[str, str]
    equal: dict[str, Regret]
    ragged: dict[str, Regret]
    rows: list[dict[str, Any]]


def shape_of(heads: str) -> DecodeShape:
    q_heads, kv_heads = (int(n) for n in heads.split("/"))
    return DecodeShape(
        q_heads=q_heads, kv_heads=kv_heads, head_dim=128, dtype="bfloat16",
        page_size=PAGE_SIZE, table_width=TABLE_TOKENS // PAGE_SIZE,
    )  # fmt: skip


def held_out_batches() -> tuple[tuple[int, ...], ...]:
    """Equal and ragged batches at lengths and seeds that no plan learns from."""
    rng = np.random.default_rng(20261129)
    batches: list[tuple[int, ...]] = []
    for bucket in BUCKETS:
        for mean in HELD_OUT_KV:
            if bucket * mean > MOST_TOKENS:
                continue
            batches.append((mean,) * bucket)
            for sigma in HELD_OUT_SIGMAS if bucket > 1 else ():
                drawn = mean * rng.lognormal(-0.5 * sigma**2, sigma, bucket)
                ragged = np.clip(np.rint(drawn), 1, TABLE_TOKENS).astype(int)
                if int(ragged.sum()) <= 2 * MOST_TOKENS:
                    batches.append(tuple(int(n) for n in ragged))
    return tuple(batches)


def request_for(heads: str, repeats: int) -> BenchRequest:
    return BenchRequest(
        shape=shape_of(heads), device="cuda", buckets=BUCKETS, kv_lens=TRAINED_KV,
        batches=held_out_batches(), max_total_kv=MOST_TOKENS, repeats=repeats,
    )  # fmt: skip


def cells_from(request: BenchRequest, report: BenchReport) -> list[tuple[RegretCell, bool]]:
    """(cell, whether it is held out), for the cells that every raced backend was measured in."""
    times: dict[tuple[int, int, int], dict[str, float]] = {}
    for s in report.samples:
        times.setdefault((s.bucket, s.total_kv, s.max_kv), {})[s.backend] = s.median_us
    raced = {s.backend for s in report.samples}
    held_out = set(request.batches)
    cells = []
    for cell in cells_of(request):
        us = times.get((cell.bucket, sum(cell.kv_lens), max(cell.kv_lens)), {})
        if us.keys() == raced:
            ordered = {name: us[name] for name in PRIORITY if name in us}
            cells.append(
                (RegretCell(kv_lens=cell.kv_lens, times_us=ordered), cell.kv_lens in held_out)
            )
    return cells


def plans_of(cells: list[RegretCell]) -> dict[str, BackendPlan]:
    samples = [s for cell in cells for s in cell.samples()]
    names = list(cells[0].times_us)
    return {
        "adaptive": select(samples, priority=names),
        "adaptive, 3 variants": select(samples, priority=names, max_variants=3),
        "stable": select(samples, priority=names, mode="stable"),
        "fixed priority": BackendPlan.fixed(tuple(names), BUCKETS),
    }


def judge(heads: str, repeats: int) -> Judged:
    request = request_for(heads, repeats)
    started = time.monotonic()
    report = measure_in_child(request, 900.0, progress=progress(heads))
    seconds = time.monotonic() - started
    marked = cells_from(request, report)
    plans = plans_of([cell for cell, held_out in marked if not held_out])
    columns: list[dict[str, Regret]] = []
    for ragged in (False, True):
        cells = [cell for cell, held_out in marked if held_out and cell.ragged == ragged]
        column = {rule: regret_of_plan(cells, plan) for rule, plan in plans.items()}
        for name in cells[0].times_us:
            column[f"always {name}"] = regret_of_one(cells, name)
        columns.append(column)
    rows = [
        {
            "batch_size": cell.batch_size,
            "total_kv": sum(cell.kv_lens),
            "max_kv": max(cell.kv_lens),
            "ragged": cell.ragged,
            "held_out": held_out,
            "median_us": {name: round(us, 3) for name, us in cell.times_us.items()},
        }
        for cell, held_out in marked
    ]
    return Judged(
        heads=heads, seconds=round(seconds, 1), refusals=dict(report.refusals),
        equal=columns[0], ragged=columns[1], rows=rows,
    )  # fmt: skip


def together(judged: list[Judged]) -> dict[str, Regret]:
    """All shapes and both kinds of batch in one: what the targets are about."""
    ratios: dict[str, list[float]] = {}
    for one in judged:
        trained = [row for row in one.rows if not row["held_out"]]
        tested = [row for row in one.rows if row["held_out"]]
        plans = plans_of([_cell(row) for row in trained])
        for row in tested:
            us, best = row["median_us"], min(row["median_us"].values())
            for rule, plan in plans.items():
                choice = plan.choose(
                    batch_size=row["batch_size"], total_kv=row["total_kv"], max_kv=row["max_kv"]
                )
                ratios.setdefault(rule, []).append(us[choice.backend] / best)
            for name in us:
                ratios.setdefault(f"always {name}", []).append(us[name] / best)
    return {rule: Regret.of(found) for rule, found in ratios.items()}


def ours_against_the_rest(judged: list[Judged]) -> dict[str, float]:
    """Geometric mean of our kernel's time over the best other backend's, on held-out cells."""
    found: dict[str, float] = {}
    for kind in (False, True):
        logs = []
        for one in judged:
            for row in one.rows:
                us = row["median_us"]
                if row["held_out"] and row["ragged"] is kind and OURS in us and len(us) > 1:
                    logs.append(math.log(us[OURS] / min(t for n, t in us.items() if n != OURS)))
        if logs:
            found["ragged" if kind else "equal"] = round(math.exp(sum(logs) / len(logs)), 4)
    return found


def selection_seconds(heads: str) -> dict[str, float | int]:
    """The selection as a start-up would run it: the usual cells of 8 buckets, built kernels."""
    request = BenchRequest(shape=shape_of(heads), device="cuda", buckets=BUCKETS)
    started = time.monotonic()
    report = measure_in_child(request, 300.0)
    raced = {s.backend for s in report.samples}
    plan = select(report.samples, priority=[n for n in PRIORITY if n in raced])
    measured = time.monotonic() - started
    text = plan.to_bytes()
    started = time.monotonic()
    again = BackendPlan.from_bytes(text)
    cached = time.monotonic() - started
    assert again.digest == plan.digest
    return {
        "measured_s": round(measured, 2),
        "cached_s": round(cached, 4),
        "samples": len(report.samples),
    }


def attention_layers(judged: Judged, *, layers: int = 32, batch_size: int = 32) -> dict[str, Any]:
    """A graph of 32 attention layers, ragged with mean 4096: adaptive against fixed priority."""
    import torch

    from tp_runtime.selection.base import DecodeStep
    from tp_runtime.selection.bench_cuda import GraphCell, KvPool
    from tp_runtime.selection.registry import BackendSet

    plans = plans_of([_cell(row) for row in judged.rows if not row["held_out"]])
    rng = np.random.default_rng(7)
    drawn = 4096 * rng.lognormal(-0.32, 0.8, batch_size)
    lengths = np.clip(np.rint(drawn), 1, TABLE_TOKENS).astype(np.int32)
    step = DecodeStep(batch_size=batch_size, bucket=batch_size, kv_lens=lengths)
    shape, device = shape_of(judged.heads), torch.device("cuda", 0)
    pages = int((-(-lengths // PAGE_SIZE)).sum()) + 1
    result: dict[str, Any] = {"total_kv": step.total_kv, "max_kv": step.max_kv}
    backends = BackendSet(shape, device)
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream), torch.inference_mode():
        pool = KvPool(shape, device, pages=pages, budget_bytes=16 << 30, seed=3)
        cell = GraphCell(shape, step, pool, device, launches=layers)
        for rule in ("fixed priority", "adaptive"):
            name = (
                plans[rule]
                .choose(batch_size=batch_size, total_kv=step.total_kv, max_kv=step.max_kv)
                .backend
            )
            graph = cell.capture(backends[name])
            times = [cell.replay(backends[name], graph)[1] for _ in range(11)]
            us = round(layers * float(np.median(times)), 1)
            result[rule] = {"backend": name, "us": us}
    result["gain"] = round(result["fixed priority"]["us"] / result["adaptive"]["us"], 3)
    return result


def progress(heads: str) -> Any:
    shown: set[tuple[str, int]] = set()

    def show(stage: str, done: int, of: int) -> None:
        if (stage, done) not in shown and (done % 40 == 0 or done == of):
            shown.add((stage, done))
            print(f"  {heads}: {stage} {done} of {of}", file=sys.stderr, flush=True)

    return show


def print_table(title: str, columns: list[tuple[str, dict[str, Regret]]]) -> None:
    print(f"\n{title}: geometric mean / 95th percentile / maximum")
    print(f"{'':32}" + "".join(f"{head:>22}" for head, _ in columns))
    for rule in columns[0][1]:
        cells = "".join(f"{column.get(rule)!s:>22}" for _, column in columns)
        print(f"{rule:32}{cells}")


def _cell(row: dict[str, Any]) -> RegretCell:
    """A row as a cell with the same sum and maximum, which is all that a plan looks at."""
    rows, total, longest = row["batch_size"], row["total_kv"], row["max_kv"]
    if rows == 1:
        return RegretCell(kv_lens=(total,), times_us=row["median_us"])
    rest, more = divmod(total - longest, rows - 1)
    lengths = (longest, *(rest + (i < more) for i in range(rows - 1)))
    return RegretCell(kv_lens=lengths, times_us=row["median_us"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", default=",".join(HEADS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    import torch

    device = DeviceInfo.of(torch.device("cuda", 0))
    shapes = arguments.heads.split(",")
    for name, reason in available_backends(shape_of(shapes[0]), device):
        if reason is not None and not name.startswith("cpu_"):
            print(f"{name}: {reason}")
    judged = []
    for heads in shapes:
        judged.append(judge(heads, arguments.repeats))
        one = judged[-1]
        print_table(
            f"{heads} heads, {len(one.rows)} cells, {one.seconds:g} s",
            [("equal", one.equal), ("ragged", one.ragged)],
        )
        for name, reason in one.refusals.items():
            print(f"  refused: {name}: {reason}")
    everything = together(judged)
    print_table("all shapes, held-out cells", [("all", everything)])
    ours = ours_against_the_rest(judged)
    print(f"{OURS} over the best other backend: {ours}")
    layers = attention_layers(judged[0])
    print(f"32 attention layers: {layers}")
    seconds = selection_seconds(shapes[0])
    print(f"selection: {seconds}")
    if arguments.json is not None:
        result = {
            "what": "decode attention, microseconds per launch inside CUDA graphs; see the script",
            "device": device.name,
            "software": versions(),
            "page_size": PAGE_SIZE,
            "table_tokens": TABLE_TOKENS,
            "regret": {rule: asdict(regret) for rule, regret in everything.items()},
            "triton_splitkv_over_best_other": ours,
            "attention_layers": layers,
            "selection": seconds,
            "shapes": [asdict(one) for one in judged],
        }
        arguments.json.write_text(json.dumps(result, separators=(",", ":")) + "\n")
    return 0


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "triton", "flashinfer-python", "nvidia-cudnn-frontend"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


if __name__ == "__main__":
    sys.exit(main())

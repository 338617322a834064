"""What `bench decode` says: the table for a person, from the JSON document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tp_runtime.launch.output import table

if TYPE_CHECKING:
    from collections.abc import Mapping


def floor_us(result: Mapping[str, Any], batch: int) -> float:
    """The time that reading weights and cache once takes at the measured copy bandwidth."""
    read = result["weight_bytes"] + batch * result["kv_bytes_per_request"]
    return float(read / result["copy_bytes_per_s"] * 1e6)


def _of_ranks(cell: Mapping[str, Any]) -> tuple[str, str, str]:
    """What a cell has only with several ranks: microseconds of messages, and the way of summing."""
    message = cell["message_us"]
    times = ("-", "-") if message is None else (f"{message['p50']:.0f}", f"{message['p99']:.0f}")
    return (*times, cell["all_reduce"])


def as_text(result: Mapping[str, Any]) -> str:
    """The table for a person; host times in microseconds."""
    phases = ("plan", "publish", "prepare", "model", "harvest")
    rows = []
    for cell in result["cells"]:
        floor = floor_us(result, cell["batch"])
        host = cell["host_us"]
        rows.append(
            (
                str(cell["batch"]),
                cell["sampling"],
                cell["loop"],
                f"{floor / 1e3:.2f}",
                f"{cell['step_us'] / 1e3:.2f}",
                f"{100 * floor / cell['step_us']:.0f} %",
                f"{cell['step_p99_us'] / cell['step_us']:.2f}",
                f"{cell['device_step_p99_us'] / cell['device_step_us']:.2f}",
                f"{100 * cell['idle_share']:.1f} %",
                *("-" if host[phase] is None else f"{host[phase]:.0f}" for phase in phases),
                *(_of_ranks(cell) if result["tp_size"] > 1 else ()),
            )
        )
    header = (
        "batch", "sampling", "loop", "floor ms", "step ms", "share", "p99/p50", "device", "idle",
        "plan us", "publish", "prepare", "launch", "harvest",
        *(("message", "p99", "all-reduce") if result["tp_size"] > 1 else ()),
    )  # fmt: skip
    facts = [
        ("model", f"{result['model']}, {result['dtype']}, TP {result['tp_size']}"),
        ("device", f"{result['device']}, copies {result['copy_bytes_per_s'] / 1e12:.3f} TB/s"),
        ("context", f"{result['context_tokens']} tokens, medians of {result['steps']} steps"),
    ]
    plan = result["plan"]
    backends = "; ".join(
        f"batch {entry['bucket']} {' or '.join(entry['backends'])}" for entry in plan["buckets"]
    )
    facts.append(("plan", f"{plan['source']}: {backends}"))
    if result["capture_s"] is not None and result["capture_bytes"]:
        facts.append(
            (
                "capture",
                f"{result['graphs']} graphs in {result['capture_s']:.1f} s, "
                f"{result['capture_bytes'] / 2**20:.0f} MiB",
            )
        )
    return f"{table(facts)}\n\n{table(rows, header=header)}"

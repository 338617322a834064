"""`select`: measure the decode backends for a model's shape, without loading its weights."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tp_runtime.config import RuntimeConfig
from tp_runtime.errors import ConfigError
from tp_runtime.launch import exits
from tp_runtime.launch.options import add_common, add_settings, json_target, parse_number
from tp_runtime.launch.output import say, table
from tp_runtime.launch.plan import describe
from tp_runtime.launch.progress import Progress
from tp_runtime.planning import Decision, decide, decode_shape
from tp_runtime.ranks import TORCHRUN_VARIABLES, RankInfo
from tp_runtime.selection import BackendPlan, DecodeShape, DeviceInfo
from tp_runtime.selection.report import refusal_lines, selection_report

if TYPE_CHECKING:
    import argparse

    from tp_runtime.launch.interrupts import Interrupts

HELP = "measure the decode backends for a model's shape on this device, and print the plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """What a selection came to, and for what."""

    shape: DecodeShape
    device: DeviceInfo
    decision: Decision


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--save", metavar="FILE", help="write the plan to FILE, for `plan`")
    parser.add_argument(
        "--time-limit-s", metavar="X", help="stop measuring after X seconds (default 120)"
    )
    add_common(parser)
    add_settings(parser)


def run(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """Run the verb. Under torchrun rank 0 does it, and the TP size is that of the run."""
    config = RuntimeConfig.resolve(args).config
    if config.model is None:
        raise ConfigError("no model: expected --model smollm2, a path, or random:<named config>")
    time_limit_s = float(parse_number(float, args.time_limit_s or "120", flag="--time-limit-s"))
    tp_size = config.tp_size or 1
    if any(name in os.environ for name in TORCHRUN_VARIABLES):
        info = RankInfo.from_env(tp_size=config.tp_size)
        tp_size = info.tp_size
        if info.rank > 0:
            return exits.OK
    target = json_target(args)
    with Progress() as progress:
        selected = measure_plan(
            config, config.model, tp_size=tp_size, time_limit_s=time_limit_s, progress=progress
        )
    if args.save is not None:
        _save(selected.decision.plan, Path(args.save))
    target.write(as_document(selected))
    if not target.on_stdout:
        say(as_text(selected))
    return exits.OK


def measure_plan(
    config: RuntimeConfig, model: str, *, tp_size: int, time_limit_s: float, progress: Progress
) -> Selected:
    """Measure what the settings leave, and decide as the engine does.

    Raises:
        ModelError: the model cannot be read, or not be divided over `tp_size` ranks.
        BackendUnavailable: no backend may serve it here.
    """
    import torch

    from tp_runtime.cpu_threads import cpu_threads_per_rank
    from tp_runtime.launch.model_shape import model_config, model_shape
    from tp_runtime.sizing import resolve_sizes
    from tp_runtime.startup import resolve_device

    device = resolve_device(config, 0)
    dtype = config.dtype_on(device.type)
    part = model_shape(model_config(model), tp_size=tp_size, dtype=getattr(torch, dtype))
    sizes = resolve_sizes(config, part, device=device, ranks_on_host=tp_size)
    shape = decode_shape(part, sizes)
    decision = decide(
        dataclasses.replace(config, enable_dynamic_decode_backend=True),
        shape,
        device,
        buckets=sizes.buckets,
        threads=cpu_threads_per_rank(tp_size) if device.type == "cpu" else 0,
        time_limit_s=time_limit_s,
        progress=lambda done, total: progress("selection", done, total),
    )
    return Selected(shape=shape, device=DeviceInfo.of(device), decision=decision)


def as_text(selected: Selected) -> str:
    """Shape, table of the plan, refusals."""
    shape = selected.shape
    facts = [
        ("device", selected.device.name),
        ("heads", f"{shape.q_heads} query, {shape.kv_heads} key-value, head_dim {shape.head_dim}"),
        ("cache", f"{shape.dtype}, pages of {shape.page_size}, {shape.table_width} to a sequence"),
    ]
    decision = selected.decision
    # the report's own refusals are among all of them
    report = None if decision.report is None else dataclasses.replace(decision.report, refusals={})
    parts = [table(facts), selection_report(decision.plan, report)]
    if decision.refusals:
        parts.append("refused:\n" + refusal_lines(decision.refusals))
    return "\n\n".join(parts)


def as_document(selected: Selected) -> dict[str, Any]:
    """The same for --json."""
    decision = selected.decision
    report = decision.report
    return {
        "shape": dataclasses.asdict(selected.shape),
        "device": selected.device.name,
        "refusals": dict(decision.refusals),
        "samples": [] if report is None else [dataclasses.asdict(s) for s in report.samples],
        "seconds": None if report is None else report.seconds,
        "complete": None if report is None else report.complete,
        "plan": describe(decision.plan),
    }


def _save(plan: BackendPlan, path: Path) -> None:
    try:
        plan.save(path)
    except OSError as error:
        raise ConfigError(
            f"flag --save: {path} cannot be written: {error.strerror or error}"
        ) from error

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
from tp_runtime.launch.problem import Problem, problem_of
from tp_runtime.launch.progress import Progress
from tp_runtime.launch.provenance import provenance
from tp_runtime.launch.recorded import read_recorded
from tp_runtime.planning import Decision, decide
from tp_runtime.ranks import TORCHRUN_VARIABLES, RankInfo
from tp_runtime.selection.heat_map import HeatMap, require_matplotlib
from tp_runtime.selection.report import disturbed, refusal_lines, selection_report

if TYPE_CHECKING:
    import argparse

    from tp_runtime.launch.interrupts import Interrupts
    from tp_runtime.selection import BackendPlan

HELP = "measure the decode backends for a model's shape on this device, and print the plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """What a selection came to, and for what."""

    problem: Problem
    decision: Decision


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--save", metavar="FILE", help="write the plan to FILE, for `plan`")
    parser.add_argument(
        "--png",
        metavar="FILE",
        help="draw who is fastest and what the choices lose (needs matplotlib)",
    )
    parser.add_argument(
        "--recorded",
        metavar="FILE",
        help="measure nothing: draw --png from the JSON of an earlier select, or of "
        "benchmarks/selection_regret.py",
    )
    parser.add_argument(
        "--time-limit-s", metavar="X", help="stop measuring after X seconds (default 120)"
    )
    add_common(parser)
    add_settings(parser)


def run(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """Run the verb. Under torchrun rank 0 does it, and the TP size is that of the run."""
    if args.png is not None:
        require_matplotlib()
    if args.recorded is not None:
        if args.png is None:
            raise exits.UsageError("flag --recorded: expected --png FILE with it")
        read_recorded(args.recorded).save(Path(args.png))
        return exits.OK
    # off is for engines: who asks for a selection gets one; a saved plan it may be about to replace
    resolved = RuntimeConfig.resolve(args).changed(
        "select", enable_dynamic_decode_backend=True, decode_plan=None
    )
    config = resolved.config
    if config.model is None:
        raise ConfigError("no model: expected --model smollm2, a path, or random:<named config>")
    time_limit_s = float(
        parse_number(float, args.time_limit_s or "120", flag="--time-limit-s", above=0)
    )
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
    if args.png is not None:
        heat_map_of(selected).save(Path(args.png))
    target.write({**as_document(selected), **provenance(resolved)})
    if not target.on_stdout:
        say(as_text(selected))
    return exits.OK


def measure_plan(
    config: RuntimeConfig, model: str, *, tp_size: int, time_limit_s: float, progress: Progress
) -> Selected:
    """Measure what the settings leave, and decide as the engine does with the selection on.

    Raises:
        ModelError: the model cannot be read, or not be divided over `tp_size` ranks.
        BackendUnavailable: no backend may serve it here.
    """
    from tp_runtime.cpu_threads import cpu_threads_per_rank

    problem = problem_of(config, model, tp_size=tp_size)
    decision = decide(
        config,
        problem.shape,
        problem.device,
        buckets=problem.buckets,
        layers=problem.layers,
        threads=cpu_threads_per_rank(tp_size) if problem.device.type == "cpu" else 0,
        time_limit_s=time_limit_s,
        progress=progress,
    )
    return Selected(problem=problem, decision=decision)


def heat_map_of(selected: Selected) -> HeatMap:
    """What --png draws."""
    report, shape = selected.decision.report, selected.problem.shape
    return HeatMap(
        title=f"{selected.problem.info.name}, {shape.q_heads}/{shape.kv_heads} heads",
        samples=() if report is None else report.samples,
        plan=selected.decision.plan,
    )


def as_text(selected: Selected) -> str:
    """Shape, table of the plan, refusals."""
    shape = selected.problem.shape
    decision = selected.decision
    facts = [
        ("device", selected.problem.info.name),
        ("heads", f"{shape.q_heads} query, {shape.kv_heads} key-value, head_dim {shape.head_dim}"),
        ("cache", f"{shape.dtype}, pages of {shape.page_size}, {shape.table_width} to a sequence"),
        ("plan", f"{decision.source}, decided in {decision.seconds:.3g} s"),
    ]
    # the report's own refusals are among all of them
    report = None if decision.report is None else dataclasses.replace(decision.report, refusals={})
    parts = [table(facts), selection_report(decision.plan, report)]
    if decision.refusals:
        parts.append("refused:\n" + refusal_lines(decision.refusals))
    return "\n\n".join(parts)


def as_document(selected: Selected) -> dict[str, Any]:
    """The same for --json. `seconds` is what measuring took, then; `selection_s` deciding, now."""
    decision = selected.decision
    report = decision.report
    return {
        "shape": dataclasses.asdict(selected.problem.shape),
        "device": selected.problem.info.name,
        "source": decision.source,
        "selection_s": decision.seconds,
        "refusals": dict(decision.refusals),
        "samples": [] if report is None else [dataclasses.asdict(s) for s in report.samples],
        "seconds": None if report is None else report.seconds,
        "complete": None if report is None else report.complete,
        "disturbed": disturbed(decision.plan),
        "plan": describe(decision.plan),
    }


def _save(plan: BackendPlan, path: Path) -> None:
    try:
        plan.save(path)
    except OSError as error:
        raise ConfigError(
            f"flag --save: {path} cannot be written: {error.strerror or error}"
        ) from error

"""`plan`: look at saved plans of decode backends: show one, verify one, compare two."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tp_runtime.config import RuntimeConfig
from tp_runtime.launch import exits, plan_difference
from tp_runtime.launch.options import Parser, add_common, add_settings, json_target
from tp_runtime.launch.output import say, table
from tp_runtime.launch.problem import problem_of
from tp_runtime.planning import eligibility_of
from tp_runtime.saved_plan import fitted, read_plan

if TYPE_CHECKING:
    from tp_runtime.launch.interrupts import Interrupts
    from tp_runtime.selection import BackendPlan

HELP = "show, verify or compare saved plans (made by `select --save FILE`)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", parser_class=Parser)
    for name, about, files in (
        ("show", "print a plan: its shape, its order of priority, and each bucket's backends", 1),
        (
            "verify",
            "check that a file is a whole plan and print its digest; with --model, also whether "
            "that model on this machine would take it; exit status 1 if not",
            1,
        ),
        ("diff", "say where two plans differ; exit status 1 if they do", 2),
    ):
        action = actions.add_parser(name, help=about, description=about)
        action.add_argument("files", nargs=files, metavar="FILE")
        add_common(action)
        if name == "verify":
            add_settings(action)
        else:
            # a plan says itself what it is for; taken so that every verb knows the same words
            action.add_argument("--tp-size", help=argparse.SUPPRESS)
            action.add_argument("--device", help=argparse.SUPPRESS)


def run(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """Run the verb. Returns 1 for plans that differ; a damaged file raises PlanFormatError."""
    if args.action is None:
        raise exits.UsageError("expected an action: plan show|verify FILE, or plan diff FILE FILE")
    target = json_target(args)
    plans = [read_plan(Path(name)) for name in args.files]
    status = exits.OK
    result: dict[str, Any]
    if args.action == "diff":
        differences = compare(*map(describe, plans))
        result = {"equal": not differences, "differences": differences}
        status = exits.FAILED if differences else exits.OK
        first, second = plans
        names = (args.files[0], args.files[1])
        text = plan_difference.as_text(first, second, differences, names=names)
    elif args.action == "verify":
        config = RuntimeConfig.resolve(args).config
        problems = [] if config.model is None else misfits(plans[0], config, config.model)
        result = {"digest": plans[0].digest, "checked_here": config.model is not None}
        result["problems"] = problems
        status = exits.FAILED if problems else exits.OK
        text = "\n".join([f"{'no' if problems else 'ok'} {plans[0].digest}", *problems])
    else:
        result = describe(plans[0])
        text = as_text(plans[0])
    target.write(result)
    if not target.on_stdout:
        say(text)
    return status


def misfits(plan: BackendPlan, config: RuntimeConfig, model: str) -> list[str]:
    """Why a model with these settings would not run this plan here; empty if it would.

    Raises: ConfigError, ModelError: as an engine with these settings would.
    """
    problem = problem_of(config, model, tp_size=config.tp_size or 1)
    _, problems = fitted(
        plan,
        shape=problem.shape,
        device=problem.info,
        buckets=problem.buckets,
        named=config.decode_buckets is not None,
        eligibility=eligibility_of(config),
    )
    return problems


def describe(plan: BackendPlan) -> dict[str, Any]:
    """A plan as plain values: what it was saved from, with its digest."""
    document: dict[str, Any] = json.loads(plan.to_bytes())
    return {"digest": plan.digest, **document}


def as_text(plan: BackendPlan) -> str:
    """The same for a person; of the fitted numbers those that can be read."""
    facts = [
        ("digest", plan.digest),
        ("mode", plan.mode if plan.measured else "fixed: nothing was measured"),
        ("priority", ", ".join(plan.priority)),
        ("device", plan.device or "-"),
    ]
    if plan.shape is not None:
        shape = dataclasses.asdict(plan.shape)
        facts += [(name, "-" if value is None else str(value)) for name, value in shape.items()]
    buckets = [(str(bucket), ", ".join(plan.variants(bucket))) for bucket in plan.buckets]
    parts = [table(facts), table(buckets, header=("bucket", "backends"))]
    models = _model_rows(plan)
    if models:
        parts.append(
            "microseconds of one layer, as fitted:\n" + table(models, header=_MODEL_HEADER)
        )
    return "\n\n".join(parts)


_MODEL_HEADER = (
    "bucket", "backend", "fixed", "per 1k tokens", "per 1k of the longest", "corrected by", "error",
)  # fmt: skip


def _model_rows(plan: BackendPlan) -> list[tuple[str, ...]]:
    return [
        (
            str(entry.bucket),
            name,
            f"{model.fixed_us:.2f}",
            f"{1000 * model.per_token_us:.3f}",
            f"{1000 * model.per_longest_us:.3f}",
            f"{min(model.factors):.2f}-{max(model.factors):.2f}" if model.factors else "-",
            f"{100 * model.error:.1f} %",
        )
        for entry in plan.entries
        for name, model in zip(entry.variants, entry.models, strict=False)
    ]


def compare(first: dict[str, Any], second: dict[str, Any]) -> list[dict[str, Any]]:
    """Each field that differs, by its path; None where one plan has no such field."""
    left, right = (dict(_flatten(plan)) for plan in (first, second))
    return [
        {"field": name, "first": left.get(name), "second": right.get(name)}
        for name in dict.fromkeys([*left, *right])
        if left.get(name) != right.get(name)
    ]


def _flatten(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        items = [(f".{name}" if path else name, item) for name, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        # a bucket is better known by its size than by its place
        items = [(f"[{item.get('bucket', i)}]", item) for i, item in enumerate(value)]
    else:
        return [(path, value)]
    return [pair for name, item in items for pair in _flatten(item, path + name)]

"""`bench decode`: how fast decode steps are, against the time that reading the memory takes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tp_runtime.config import RuntimeConfig
from tp_runtime.errors import ConfigError
from tp_runtime.launch import exits
from tp_runtime.launch.bench_decode import LOOPS, SAMPLINGS, DecodeBench
from tp_runtime.launch.bench_report import as_text
from tp_runtime.launch.options import Parser, add_common, add_settings, json_target, parse_number
from tp_runtime.launch.output import say
from tp_runtime.launch.progress import Progress

if TYPE_CHECKING:
    import argparse

    from tp_runtime.launch.interrupts import Interrupts

HELP = "measure decode steps of a model: time, share of the memory floor, idle gaps, host time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", parser_class=Parser)
    decode = actions.add_parser("decode", help=HELP, description=HELP)
    decode.add_argument(
        "--batch", action="append", metavar="N", help="requests; may be repeated (default 1, 8, 32)"
    )
    decode.add_argument(
        "--context", metavar="N", help="tokens in the cache of each request (default 1024)"
    )
    decode.add_argument("--steps", metavar="N", help="steps that are timed (default 200)")
    decode.add_argument(
        "--sampling",
        action="append",
        choices=tuple(SAMPLINGS),
        help="may be repeated (default all of them)",
    )
    decode.add_argument(
        "--loop",
        action="append",
        choices=LOOPS,
        help="two steps in flight (async), with every sampling, or none (sync), with the first "
        "one; may be repeated (default both)",
    )
    decode.add_argument(
        "--compare-all-reduce",
        action="store_true",
        help="measure every choice of --all-reduce, one after the other",
    )
    decode.add_argument("--trace", metavar="FILE", help="write a profiler trace of 10 steps")
    add_common(decode)
    add_settings(decode)


def run(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """Run the verb on this rank; rank 0 prints."""
    if args.action is None:
        raise exits.UsageError("expected an action: bench decode")
    batches = [_number(text, "--batch") for text in args.batch or ("1", "8", "32")]
    context = _number(args.context or "1024", "--context")
    steps = _number(args.steps or "200", "--steps")
    config = RuntimeConfig.resolve(args, on_failure="exit").config
    if config.model is None:
        raise ConfigError("no model: expected --model random:llama-3-8b, smollm2, or a path")
    bench = DecodeBench(
        config=_fitted(config, batches, context, steps),
        batches=tuple(sorted(set(batches))),
        context_tokens=context,
        steps=steps,
        samplings=tuple(args.sampling or SAMPLINGS),
        loops=tuple(args.loop or LOOPS),
        ways=("auto", "nccl") if args.compare_all_reduce else (config.all_reduce,),
        trace=args.trace,
    )
    target = json_target(args)
    result: dict[str, Any] | None = None
    with Progress() as progress:
        result = bench.run(progress, interrupts)
    if result is not None:
        target.write(result)
        if not target.on_stdout:
            say(as_text(result))
    return exits.OK


def _number(text: str, flag: str) -> int:
    value = int(parse_number(int, text, flag=flag))
    if value < 1:
        raise exits.UsageError(f"flag {flag}={text!r}: expected at least 1")
    return value


def _fitted(
    config: RuntimeConfig, batches: list[int], context_tokens: int, steps: int
) -> RuntimeConfig:
    """Graphs for the batches alone, and a cache for the largest."""
    fitted = dataclasses.replace(
        config, max_batch_size=max(batches), decode_buckets=tuple(sorted(set(batches)))
    )
    if fitted.max_seq_len is None:
        fitted = dataclasses.replace(fitted, max_seq_len=2 * context_tokens + steps)
    return fitted

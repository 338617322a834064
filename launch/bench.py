"""`bench decode`: how fast decode steps are, against the time that reading the memory takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tp_runtime.config import RuntimeConfig, rows
from tp_runtime.errors import ConfigError
from tp_runtime.launch import exits
from tp_runtime.launch.bench_decode import LOOPS, SAMPLINGS, DecodeBench
from tp_runtime.launch.bench_report import as_text
from tp_runtime.launch.options import Parser, add_common, add_settings, json_target, parse_number
from tp_runtime.launch.output import say
from tp_runtime.launch.progress import Progress
from tp_runtime.launch.provenance import settings

if TYPE_CHECKING:
    import argparse

    from tp_runtime.config import ResolvedConfig
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
    batches = [_count(text, "--batch") for text in args.batch or ("1", "8", "32")]
    context = _count(args.context or "1024", "--context")
    steps = _count(args.steps or "200", "--steps")
    resolved = RuntimeConfig.resolve(args, on_failure="exit")
    config = resolved.config
    if config.model is None:
        raise ConfigError("no model: expected --model random:llama-3-8b, smollm2, or a path")
    fitted = _fitted(resolved, config.model, batches, context, steps)
    bench = DecodeBench(
        config=fitted.config,
        batches=tuple(sorted(set(batches))),
        context_tokens=context,
        steps=steps,
        samplings=tuple(args.sampling or SAMPLINGS),
        loops=tuple(args.loop or LOOPS),
        ways=_every_way(config) if args.compare_all_reduce else (config.all_reduce,),
        trace=args.trace,
    )
    target = json_target(args)
    result: dict[str, Any] | None = None
    with Progress() as progress:
        result = bench.run(progress, interrupts)
    if result is not None:
        target.write({**result, "settings": settings(fitted)})
        if not target.on_stdout:
            say(as_text(result))
    return exits.OK


def _count(text: str, flag: str) -> int:
    return int(parse_number(int, text, flag=flag, minimum=1))


def _every_way(config: RuntimeConfig) -> tuple[str, ...]:
    """The choices of all_reduce. Raises UsageError where all of them are the same."""
    from tp_runtime.connection import resolve_device
    from tp_runtime.ranks import RankInfo

    info = RankInfo.from_env(tp_size=config.tp_size)
    device = resolve_device(config, info.local_rank).type
    if info.tp_size == 1 or device == "cpu":
        raise exits.UsageError(
            f"flag --compare-all-reduce: expected at least 2 ranks on GPUs, got {info.tp_size} on "
            f"{device}, where --all-reduce changes nothing; leave the flag out, or use torchrun "
            "on a host with several GPUs"
        )
    return rows()["all_reduce"].choices


def _fitted(
    resolved: ResolvedConfig, model: str, batches: list[int], context_tokens: int, steps: int
) -> ResolvedConfig:
    """Graphs for the batches alone, a cache for the largest, and room for every token.

    Raises:
        UsageError: the model, or max_seq_len where it was given, has too little room.
    """
    from tp_runtime.launch.model_shape import model_config

    flags = f"flags --context={context_tokens} and --steps={steps}"
    fitted = resolved.changed(
        "flag --batch", max_batch_size=max(batches), decode_buckets=tuple(sorted(set(batches)))
    )
    max_seq_len = fitted.config.max_seq_len
    if max_seq_len is not None:
        if context_tokens + steps > max_seq_len:
            raise exits.UsageError(
                f"{flags}: expected a sum of at most max_seq_len={max_seq_len}, got "
                f"{context_tokens + steps}; lower one of them or raise --max-seq-len"
            )
        return fitted
    # a request decodes on while the prompts after it are computed
    needed = 2 * context_tokens + steps
    positions = model_config(model).max_positions
    if needed > positions:
        raise exits.UsageError(
            f"{flags}: expected 2 * context + steps of at most {positions}, the positions of "
            f"{model}, got {needed}; lower one of them"
        )
    return fitted.changed("flags --context and --steps", max_seq_len=needed)

"""`decode`: answer prompts on all ranks; rank 0 prints."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from tp_runtime.config import RuntimeConfig
from tp_runtime.errors import ConfigError, RequestError
from tp_runtime.launch import exits
from tp_runtime.launch.decode_report import Clock, document, peer_line, summary
from tp_runtime.launch.options import add_common, add_settings, json_target, parse_number
from tp_runtime.launch.output import say
from tp_runtime.launch.printer import Printer
from tp_runtime.launch.progress import Progress
from tp_runtime.launch.prompts import encode_prompt, given_prompts, read_stdin
from tp_runtime.ranks import RankInfo
from tp_runtime.sampling import SamplingParams

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Sequence

    from tp_runtime.config import ResolvedConfig
    from tp_runtime.launch.decode_report import Reported
    from tp_runtime.launch.interrupts import Interrupts
    from tp_runtime.launch.output import JsonTarget
    from tp_runtime.launch.prompts import Encoder
    from tp_runtime.requests import RequestOutput

    class DecodeEngine(Reported, Protocol):
        """What this command uses of `tp_runtime.Engine`."""

        @property
        def tokenizer(self) -> Encoder | None: ...
        def start(self, *, progress: Callable[[str, int, int], None] | None = None) -> None: ...
        def add_request(
            self,
            prompt_token_ids: Sequence[int],
            sampling: SamplingParams,
            *,
            request_id: str | None = None,
        ) -> str: ...
        def step(self) -> Iterable[RequestOutput]: ...
        def step_peer(self) -> bool: ...
        def close(self, reason: str | None = None) -> None: ...

    MakeEngine = Callable[[RuntimeConfig], DecodeEngine]

log = logging.getLogger(__name__)

HELP = "answer prompts with a model; under torchrun all ranks work on them together"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    prompts = parser.add_argument_group("prompts (or one a line on standard input)")
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated")
    prompts.add_argument(
        "--prompts-file", metavar="FILE", help="one prompt a line; - is standard input"
    )
    prompts.add_argument("--raw", action="store_true", help="no chat template")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", metavar="N", help="for each prompt (default 16)")
    sampling.add_argument("--temperature", metavar="X", help="0 takes the best token (default 0)")
    sampling.add_argument("--top-k", metavar="N", help="keep the N best tokens (default 0: all)")
    sampling.add_argument(
        "--top-p", metavar="X", help="keep the best tokens of this probability (default 1: all)"
    )
    sampling.add_argument(
        "--min-p", metavar="X", help="drop tokens below X times the best one (default 0: none)"
    )
    sampling.add_argument(
        "--seed",
        metavar="N",
        help="of the random numbers of each prompt (unset: another one each time)",
    )
    sampling.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after an end token")
    parser.add_argument("--quiet", action="store_true", help="no summary after the answers")
    parser.add_argument(
        "--verbose-ranks", action="store_true", help="let ranks above 0 log and report too"
    )
    add_common(parser)
    add_settings(parser)


def run(
    args: argparse.Namespace, interrupts: Interrupts, *, make_engine: MakeEngine | None = None
) -> int:
    """Run the verb. Returns the exit status.

    Args:
        make_engine: builds the engine; None = `tp_runtime.engine.Engine`.
    """
    resolved = RuntimeConfig.resolve(args, on_failure="exit")
    config = resolved.config
    if config.model is None:
        raise ConfigError("no model: expected --model smollm2, a path, or random:<named config>")
    info = RankInfo.from_env(tp_size=config.tp_size)
    sampling = sampling_of(args)
    target = json_target(args).for_group(info.tp_group)
    prompts = given_prompts(args.prompt, args.prompts_file)
    if prompts is None:
        if info.world_size > info.tp_size:
            raise ConfigError(
                "several TP groups cannot share standard input: expected --prompt or --prompts-file"
            )
        # only one rank may read it, and the others have nothing to check
        prompts = read_stdin() if info.tp_rank == 0 else ()
    elif resolved.sources["max_batch_size"] == "default" and prompts:
        # every rank knows how many there are: fewer buckets to measure and to capture
        resolved = resolved.changed(
            "number of prompts", max_batch_size=min(config.max_batch_size, len(prompts))
        )

    engine = (make_engine or _engine)(resolved.config)
    try:
        if info.tp_rank > 0:
            status = _serve(engine, args, info, interrupts)
        else:
            status = _answer(engine, args, info, interrupts, prompts, sampling, target, resolved)
    except KeyboardInterrupt:
        # between two steps everybody can be told to stop; in the middle of a start nobody listens
        engine.close(None if interrupts.deferred else "interrupted")
        raise
    except exits.REPORTED as error:
        engine.close(exits.one_line(error))
        raise
    engine.close()
    return status


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """Raises: ConfigError or RequestError naming the flag."""
    fields: dict[str, object] = {"stop": tuple(args.stop or ()), "ignore_eos": args.ignore_eos}
    for name, kind in (
        ("max_tokens", int),
        ("temperature", float),
        ("top_k", int),
        ("top_p", float),
        ("min_p", float),
        ("seed", int),
    ):
        text = getattr(args, name)
        if text is not None:
            fields[name] = parse_number(kind, text, flag="--" + name.replace("_", "-"))
    try:
        return SamplingParams(**fields)  # type: ignore[arg-type]
    except RequestError as error:
        # it begins with the name of the field, and each field is a flag
        name, _, problem = str(error).partition(": ")
        raise RequestError(f"flag --{name.replace('_', '-')}: {problem}") from error


def _engine(config: RuntimeConfig) -> DecodeEngine:
    from tp_runtime.engine import Engine

    return Engine(config)


def _serve(
    engine: DecodeEngine, args: argparse.Namespace, info: RankInfo, interrupts: Interrupts
) -> int:
    engine.start()
    # rank 0 gets the signal too, and ends all ranks between two steps
    interrupts.defer()
    while engine.step_peer():
        if interrupts.alone:
            engine.close("interrupted")
            raise KeyboardInterrupt
    if args.verbose_ranks:
        say(peer_line(engine, info))
    interrupts.raise_if_noted()
    return exits.OK


def _answer(
    engine: DecodeEngine,
    args: argparse.Namespace,
    info: RankInfo,
    interrupts: Interrupts,
    prompts: Sequence[str],
    sampling: SamplingParams,
    target: JsonTarget,
    resolved: ResolvedConfig,
) -> int:
    clock = Clock()
    speaks = info.tp_group == 0 and not target.on_stdout
    with Progress(enabled=info.tp_group == 0) as progress:
        engine.start(progress=progress)
        clock.loaded()
        interrupts.defer()
        finished = _decode(engine, prompts, sampling, clock, interrupts, progress, args.raw, speaks)
    document_ = document(engine, resolved, prompts, finished, clock)
    target.write(document_)
    if speaks and not args.quiet:
        say()
        say(summary(engine, finished, document_))
    failed = [(i, output.error) for i, output in enumerate(finished, 1) if output.error is not None]
    for i, error in failed:
        log.error("prompt %d of %d was given up: %s", i, len(prompts), error)
    return exits.FAILED if failed else exits.OK


def _decode(
    engine: DecodeEngine,
    prompts: Sequence[str],
    sampling: SamplingParams,
    clock: Clock,
    interrupts: Interrupts,
    progress: Progress,
    raw: bool,
    speaks: bool,
) -> list[RequestOutput]:
    """All prompts at once, step by step. Returns the final outputs in the order of the prompts."""
    printer = Printer(prompts, enabled=speaks)
    order = _submit(engine, prompts, sampling, raw)
    index = {request_id: i for i, request_id in enumerate(order)}
    clock.submitted()
    log.info("decoding %d prompts", len(prompts))
    final: list[RequestOutput | None] = [None] * len(prompts)
    open_requests = len(prompts)
    started: set[int] = set()
    progress("prefill", 0, len(prompts))
    while open_requests:
        interrupts.raise_if_noted()
        for output in engine.step():
            i = index[output.request_id]
            clock.token(i, len(output.token_ids))
            if i not in started:
                started.add(i)
                progress("prefill", len(started), len(prompts))
                if len(started) == len(prompts):
                    progress.clear()
            if speaks:
                progress.clear()
            printer.show(i, output)
            if output.finished:
                final[i] = output
                open_requests -= 1
    clock.finished()
    return [output for output in final if output is not None]


def _submit(
    engine: DecodeEngine, prompts: Sequence[str], sampling: SamplingParams, raw: bool
) -> list[str]:
    ids: list[str] = []
    for i, prompt in enumerate(prompts):
        try:
            tokens = encode_prompt(prompt, engine.tokenizer, raw=raw)
            ids.append(engine.add_request(tokens, sampling, request_id=str(i)))
        except RequestError as error:
            raise RequestError(f"prompt {i + 1} of {len(prompts)}: {error}") from error
    return ids

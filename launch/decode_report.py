"""What `decode` says at the end: the JSON document, and the short table for a person."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from tp_runtime.launch.output import table
from tp_runtime.launch.provenance import provenance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tp_runtime.config import ResolvedConfig
    from tp_runtime.ranks import RankInfo
    from tp_runtime.requests import RequestOutput

    class Chosen(Protocol):
        @property
        def backend(self) -> str: ...

    class Chooser(Protocol):
        """The part of a BackendPlan that is used here."""

        @property
        def device(self) -> str: ...
        @property
        def buckets(self) -> Sequence[int]: ...
        def variants(self, bucket: int) -> Sequence[str]: ...
        def choose(self, *, batch_size: int, total_kv: int, max_kv: int) -> Chosen: ...

    class Reported(Protocol):
        """The part of an engine that is reported."""

        @property
        def plan(self) -> Chooser: ...
        @property
        def plan_source(self) -> str: ...
        @property
        def plan_digest(self) -> str | None: ...
        @property
        def capture_digest(self) -> str | None: ...
        def rank_reports(self) -> Sequence[Mapping[str, Any]]: ...


RANK_KEYS = ("rank", "plan_digest", "capture_digest")


def plan_document(engine: Reported) -> dict[str, Any]:
    """Which backends the plan captured for each bucket, and where it is from."""
    plan = engine.plan
    return {
        "source": engine.plan_source,
        "device": plan.device,
        "buckets": [
            {"bucket": bucket, "backends": list(plan.variants(bucket))} for bucket in plan.buckets
        ],
    }


class Clock:
    """When things happened, in seconds since it was made.

    Args:
        now: a monotonic clock in seconds.
    """

    def __init__(self, now: Any = time.perf_counter) -> None:
        self._now = now
        self._start: float = now()
        self._loaded = self._submitted = self._finished = 0.0
        self._first: dict[int, float] = {}
        self._tokens: dict[int, int] = {}

    def loaded(self) -> None:
        """The engine has started."""
        self._loaded = self._now() - self._start

    def submitted(self) -> None:
        """All prompts are queued."""
        self._submitted = self._now() - self._start

    def token(self, index: int, count: int) -> None:
        """Prompt `index` has `count` tokens now."""
        if count:
            self._first.setdefault(index, self._now() - self._start)
        self._tokens[index] = count

    def finished(self) -> None:
        """The last prompt is done."""
        self._finished = self._now() - self._start

    def timing(self) -> dict[str, float | int | None]:
        """Seconds and rates. A rate over no time is None.

        `tokens_per_s` counts all tokens from submission to the end; `decode_tokens_per_s` leaves
        out each prompt's first token and the time before the earliest of them, so it says
        nothing of prefill.
        """
        first = self._first.values()
        total = sum(self._tokens.values())
        decode_s = self._finished - min(first, default=self._finished)
        run_s = self._finished - self._submitted
        waits = [moment - self._submitted for moment in first]
        return {
            "start_s": self._loaded,
            "run_s": run_s,
            "output_tokens": total,
            "time_to_first_token_s": sum(waits) / len(waits) if waits else None,
            "tokens_per_s": total / run_s if run_s > 0 else None,
            "decode_tokens_per_s": (total - len(waits)) / decode_s if decode_s > 0 else None,
        }


def document(
    engine: Reported,
    resolved: ResolvedConfig,
    prompts: Sequence[str],
    outputs: Sequence[RequestOutput],
    clock: Clock,
) -> dict[str, Any]:
    """The JSON of a run; outputs are in the order of the prompts, "error" where one has failed.

    Args:
        resolved: the settings that the engine runs with.
    """
    return {
        "outputs": [
            {
                "request_id": output.request_id,
                "prompt": prompt,
                "prompt_token_ids": list(output.prompt_token_ids),
                "token_ids": list(output.token_ids),
                "text": output.text,
                "finish_reason": output.finish_reason,
                **({} if output.error is None else {"error": output.error}),
            }
            for prompt, output in zip(prompts, outputs, strict=True)
        ],
        "ranks": [{key: report[key] for key in RANK_KEYS} for report in engine.rank_reports()],
        "plan": plan_document(engine),
        "timing": clock.timing(),
        **provenance(resolved),
    }


def summary(engine: Reported, outputs: Sequence[RequestOutput], document: Mapping[str, Any]) -> str:
    """Per rank the digests, then the backend and the speed."""
    ranks = table(
        [
            (str(r["rank"]), short(r["plan_digest"]), short(r["capture_digest"]))
            for r in document["ranks"]
        ],
        header=("rank", "plan", "capture"),
    )
    timing = document["timing"]
    kv = [len(output.prompt_token_ids) + len(output.token_ids) for output in outputs]
    choice = engine.plan.choose(batch_size=len(kv), total_kv=sum(kv), max_kv=max(kv))
    facts = [
        ("backend", f"{choice.backend} ({engine.plan_source})"),
        ("tokens", f"{timing['output_tokens']} in {timing['run_s']:.2f} s"),
    ]
    if timing["decode_tokens_per_s"] is not None:
        facts.append(("decode", f"{timing['decode_tokens_per_s']:.1f} tokens/s"))
    if timing["time_to_first_token_s"] is not None:
        facts.append(("first token", f"{timing['time_to_first_token_s']:.3f} s"))
    return f"{ranks}\n{table(facts)}"


def peer_line(engine: Reported, info: RankInfo) -> str:
    """One line of a rank above 0."""
    return (
        f"rank {info.rank}: plan {short(engine.plan_digest)}, "
        f"capture {short(engine.capture_digest)}"
    )


def short(digest: str | None) -> str:
    """Enough of a digest to compare by eye."""
    return digest[:16] if digest else "-"

"""One request: what was asked, what came out, and what the scheduler knows of it.

Two objects, each with one owner. `Request` belongs to the engine's thread and counts by
arithmetic what was planned. `OutputStream` belongs to the harvest, which may run on a worker
thread, and holds the tokens. They meet only through finished marks and harvest entries.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tp_runtime.errors import HarvestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tp_runtime.sampling import SamplingParams
    from tp_runtime.step_plan import TokenArray


class TextStream(Protocol):
    """Turns the tokens of one sequence into text as they come."""

    def push(self, token_id: int) -> str:
        """Add one id; the text that is certain now, often "" inside a character."""
        ...

    def flush(self) -> str:
        """The rest, when no more ids will come; an unfinished character becomes U+FFFD."""
        ...


@dataclass(slots=True, eq=False)
class RequestOutput:
    """A request as far as it has come. To be read only.

    One is made for every token, so it is not a frozen dataclass, and it does not copy the tokens:
    they only grow, and it remembers how many there were.

    Args:
        tokens, count: all generated tokens are the first `count` of `tokens`.
        text: all text so far; ends before a stop string. Empty without a tokenizer.
        new_text: what `text` gained since the output before.
        finish_reason: "eos", "length", "stop" or "abort"; None while it runs.
        error: why it was aborted by the runtime itself; None otherwise.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    tokens: list[int] = field(repr=False)
    count: int
    text: str
    new_text: str
    finish_reason: str | None
    error: str | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All generated tokens so far, a final EOS included."""
        return tuple(self.tokens[: self.count])

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class OutputStream:
    """Collects the tokens of one request, finds its end, and says what is new.

    Args:
        max_new_tokens: after this many tokens the reason is "length".
        eos_token_ids: tokens that end it; empty to ignore them.
        text_stream: None where there is no tokenizer; then stop strings cannot be used.
    """

    # in a step of many requests every object is out of the caches, so each has few parts
    __slots__ = (
        "_emitted",
        "_eos_token_ids",
        "_hold_back",
        "_max_new_tokens",
        "_stop",
        "_text",
        "_text_stream",
        "error",
        "finish_reason",
        "prompt_token_ids",
        "request_id",
        "token_ids",
    )

    def __init__(
        self,
        *,
        request_id: str,
        prompt_token_ids: Sequence[int],
        max_new_tokens: int,
        eos_token_ids: Sequence[int],
        stop: Sequence[str],
        text_stream: TextStream | None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.error: str | None = None
        self._max_new_tokens = max_new_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._stop = tuple(stop)
        # text that could still become a stop string is held back
        self._hold_back = max((len(text) for text in stop), default=1) - 1
        self._text_stream = text_stream
        self._text = ""
        self._emitted = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def push(self, token_id: int) -> RequestOutput:
        """Take the next token. Must not be called once finished."""
        self.token_ids.append(token_id)
        is_eos = token_id in self._eos_token_ids
        if self._text_stream is not None and not is_eos:
            self._text += self._text_stream.push(token_id)
        if is_eos:
            self.finish_reason = "eos"
        elif self._stop and self._cut_at_stop_string():
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self._max_new_tokens:
            self.finish_reason = "length"
        if self._text_stream is not None and self.finish_reason in ("eos", "length"):
            self._text += self._text_stream.flush()
            if self._cut_at_stop_string():
                self.finish_reason = "stop"
        return self._output()

    def abort(self, error: str | None = None) -> RequestOutput:
        """End it where it is; `error` says why when nobody asked for it."""
        if self._text_stream is not None and error is None:
            self._text += self._text_stream.flush()  # may raise: it has not ended then
        self.finish_reason = "abort"
        self.error = error
        return self._output()

    def _cut_at_stop_string(self) -> bool:
        # what was emitted holds no begin of a stop string, so nothing before it is searched
        found = [at for at in (self._text.find(s, self._emitted) for s in self._stop) if at >= 0]
        if found:
            self._text = self._text[: min(found)]
        return bool(found)

    def _output(self) -> RequestOutput:
        end = len(self._text)
        if not self.finished:
            end = max(self._emitted, end - self._hold_back)
        new_text = self._text[self._emitted : end]
        self._emitted = end
        return RequestOutput(
            self.request_id,
            self.prompt_token_ids,
            self.token_ids,
            len(self.token_ids),
            self._text[:end],
            new_text,
            self.finish_reason,
            self.error,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """What the scheduler counts of one request; never touched by the harvest.

    Args:
        to_prefill: int32, tokens to compute before it can decode: the prompt, and after a
            preemption what had been generated too.
        max_new_tokens: bounded by the model's length as well.
        computed: tokens whose keys and values are planned to be in the cache.
        planned: generated tokens that are planned or done.
        prefilled: all of `to_prefill` is planned, so it decodes from the next step on.
    """

    request_id: str
    output: OutputStream
    sampling: SamplingParams
    seed: int
    max_new_tokens: int
    to_prefill: TokenArray
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    planned: int = 0
    prefilled: bool = False
    retired: bool = False

    def restart(self) -> None:
        """After a preemption: all tokens known so far are to be computed again."""
        known = [*self.output.prompt_token_ids, *self.output.token_ids]
        self.to_prefill = np.array(known, dtype=np.int32)
        self.planned = len(self.output.token_ids)
        self.slot = -1
        self.blocks = []
        self.computed = 0
        self.prefilled = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What the harvest of one step needs: whose token each sampled row is, and who was aborted.

    Immutable; made when the step is planned.
    """

    step: int
    sampled: tuple[Request, ...] = ()
    aborted: tuple[Request, ...] = ()


class Harvest:
    """Turns the tokens of a step into outputs and finished marks. One thread at a time.

    The engine's thread takes the outputs when a step has been harvested, and finished marks at any
    time; deque appends and pops are atomic.
    """

    def __init__(self) -> None:
        self.outputs: deque[RequestOutput] = deque()
        self.finished: deque[tuple[int, Request]] = deque()
        self.ended = 0

    def run(self, snapshot: Snapshot, tokens: Sequence[int]) -> None:
        """Append a step's tokens. A token of a request that had ended is dropped: it was
        computed because the end is known one step late.

        Raises:
            HarvestError: some requests could not take their token and were aborted; the others
                have theirs.
        """
        failed: dict[str, Exception] = {}
        aborted = ((request, None) for request in snapshot.aborted)
        for request, token in chain(zip(snapshot.sampled, tokens, strict=True), aborted):
            stream = request.output
            if stream.finished:
                continue
            try:
                output = self._next_output(snapshot, stream, token)
            except Exception as error:  # noqa: BLE001 - a text stream may be anybody's code
                output = stream.abort(f"step {snapshot.step}: {error!r}")
                failed[request.request_id] = error
            self._emit(snapshot.step, request, output)
        if failed:
            named = ", ".join(f"{request_id} ({error!r})" for request_id, error in failed.items())
            raise HarvestError(
                f"step {snapshot.step}: aborted requests: {named}", request_ids=tuple(failed)
            )

    @staticmethod
    def _next_output(snapshot: Snapshot, stream: OutputStream, token: int | None) -> RequestOutput:
        """token: None for a request that is to be aborted."""
        if token is None:
            return stream.abort()
        if token < 0:
            return stream.abort(f"step {snapshot.step}: no token, the logits hold a NaN")
        return stream.push(token)

    def fail(self, snapshot: Snapshot, error: Exception) -> list[str]:
        """End every request of a step whose tokens could not be delivered; gives their ids."""
        ended = [r for r in (*snapshot.sampled, *snapshot.aborted) if not r.output.finished]
        for request in ended:
            output = request.output.abort(f"step {snapshot.step}: {error}")
            self._emit(snapshot.step, request, output)
        return [request.request_id for request in ended]

    def _emit(self, step: int, request: Request, output: RequestOutput) -> None:
        self.outputs.append(output)
        if output.finished:
            self._ended(step, request)

    def _ended(self, step: int, request: Request) -> None:
        self.ended += 1
        self.finished.append((step, request))

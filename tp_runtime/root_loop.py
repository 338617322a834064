"""Rank 0's side of the steps: requests in, plans out to the peers, tokens back as outputs."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import torch

from tp_runtime.async_runner import AsyncRunner
from tp_runtime.broadcast.pace import Cadence
from tp_runtime.errors import BroadcastError, HarvestError, RequestError
from tp_runtime.pages import PagePool
from tp_runtime.requests import Harvest, OutputStream, Request, RequestOutput, Snapshot
from tp_runtime.sampling import SEED_LIMIT, SamplingParams
from tp_runtime.scheduler import GraphChoice, Scheduler
from tp_runtime.staging import StagingRing
from tp_runtime.step_message import StepEncoder
from tp_runtime.step_plan import StepKind
from tp_runtime.step_times import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence
    from contextlib import AbstractContextManager

    from tp_runtime.broadcast import CpuTpBroadcaster
    from tp_runtime.config import RuntimeConfig
    from tp_runtime.models.base import ModelShape
    from tp_runtime.pages import PagePoolStatistics
    from tp_runtime.requests import TextStream
    from tp_runtime.scheduler import SchedulerStatistics
    from tp_runtime.staging import StagingLease
    from tp_runtime.startup import RankRuntime
    from tp_runtime.step_times import StepTimes

log = logging.getLogger(__name__)

STEPS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A step that has run (or, on a GPU, was enqueued) and is still to be harvested."""

    snapshot: Snapshot
    lease: StagingLease | None


class Tokenizer(Protocol):
    """What the runtime needs of a tokenizer; `tp_runtime.models` has one for its models."""

    def encode(self, text: str) -> list[int]: ...

    def stream(self) -> TextStream: ...


class RootLoop:
    """Owns the requests. One owner thread; a worker harvests while the next step runs.

    check: raises if the tokens that a device gave mean nothing, see `TpGroup.raise_if_failed`.
    """

    def __init__(
        self,
        *,
        config: RuntimeConfig,
        channel: CpuTpBroadcaster,
        runtime: RankRuntime,
        shape: ModelShape,
        device: torch.device,
        tokenizer: Callable[[], Tokenizer] | None,
        times: StepTimes,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._channel = channel
        self._check = check
        self._encoder = StepEncoder()
        self._cadence = Cadence()
        self._runtime = runtime
        self._shape = shape
        self._tokenizer = tokenizer
        self._times = times
        self._in_flight = config.async_decode
        self._captures = device.type == "cuda"
        self._ring = StagingRing(
            STEPS_IN_FLIGHT + 1, shape=(runtime.sizes.slots,), dtype=torch.int64, device=device
        )
        self._harvest = Harvest()
        plan = runtime.decision.plan
        self._pool = PagePool(runtime.sizes.num_blocks)
        self._scheduler = Scheduler(
            pool=self._pool,
            harvest=self._harvest,
            block_size=runtime.sizes.block_size,
            slots=runtime.sizes.slots,
            chunk_tokens=config.prefill_chunk_tokens,
            lag=STEPS_IN_FLIGHT if config.async_decode else 1,
            choose=self._choose,
            wait_for_harvest=self._harvest_all,
        )
        self._live: dict[str, Request] = {}
        self._holders: dict[str, set[str]] = {}
        self._ready: deque[RequestOutput] = deque()
        self._ids = itertools.count()
        self._graph_misses: dict[str, int] = {}
        # asked once: what was captured does not change, and no batch exceeds its bucket
        self._unusable = {
            (bucket, variant): runtime.runner.can_run(bucket, bucket, variant)[1]
            for bucket in plan.buckets
            for variant in range(len(plan.variants(bucket)))
        }
        self._ran: Ran | None = None
        self._undelivered: deque[HarvestError] = deque()
        self._abandoned: deque[str] = deque()
        self._unwanted: set[str] = set()
        self._in_step = False
        self._lost: Exception | None = None
        # last, as nobody ends its thread where one of the others fails; the harvest enqueues
        # nothing, so that the stream and event of a device would only cost time
        self._async = AsyncRunner(device=torch.device("cpu"), name="tp-harvest")

    @property
    def unfinished(self) -> int:
        """Requests whose last output has not been returned yet."""
        return len(self._live)

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._live)

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str | None,
        *,
        holder: set[str] | None = None,
    ) -> str:
        """Queue a request. Raises RequestError and changes nothing if it cannot be served.

        Args:
            holder: gets the id, and loses it when the last output has been given, to whoever asked.
        """
        if request_id is None:
            made_up = (f"request-{number}" for number in self._ids)  # generate() uses "0", "1", ...
            request_id = next(name for name in made_up if name not in self._live)
        else:
            self.check_free([request_id])
        prompt = self.checked_prompt(prompt_token_ids)
        if not isinstance(sampling, SamplingParams):
            raise RequestError(f"expected SamplingParams, got {type(sampling).__name__}")
        if sampling.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model has none")
        room = self._runtime.sizes.max_seq_len - len(prompt)
        max_new_tokens = min(sampling.max_tokens, room)
        request = Request(
            request_id=request_id,
            output=OutputStream(
                request_id=request_id,
                prompt_token_ids=prompt.tolist(),
                max_new_tokens=max_new_tokens,
                eos_token_ids=() if sampling.ignore_eos else self._shape.eos_token_ids,
                stop=sampling.stop,
                text_stream=None if self._tokenizer is None else self._tokenizer().stream(),
            ),
            sampling=sampling,
            seed=secrets.randbelow(SEED_LIMIT) if sampling.seed is None else sampling.seed,
            max_new_tokens=max_new_tokens,
            to_prefill=prompt,
        )
        self._scheduler.add(request)
        self._live[request_id] = request
        if holder is not None:
            holder.add(request_id)
            self._holders[request_id] = holder
        return request_id

    def check_free(self, request_ids: Sequence[str]) -> None:
        """Raises RequestError if one of these ids is in use, or is no text."""
        for request_id in request_ids:
            if not isinstance(request_id, str):
                raise RequestError(f"request id {request_id!r}: expected a str")
            if request_id in self._live:
                raise RequestError(f"request id {request_id!r} is in use")

    def abort(self, request_id: str) -> bool:
        """End a request early. False when it is not running (any more)."""
        request = self._live.get(request_id)
        if request is None:
            return False
        self._scheduler.abort(request)
        return True

    def step(
        self,
        terminal: Callable[[], AbstractContextManager[None]],
        *,
        of: Container[str] | None = None,
    ) -> list[RequestOutput]:
        """One step on every rank.

        Args:
            of: give only outputs of these requests; the others wait for a later call.
            terminal: makes a context in which a failure ends the engine; a failed harvest ends only
                the requests it was for.

        Raises:
            HarvestError: tokens of an earlier step could not be delivered.
        """
        self._in_step = True
        try:
            self._step(terminal, of)
            if self._async.idle:  # what it has harvested meanwhile need not wait for the next step
                self._finish_harvest()
        finally:
            self._in_step = False
        self._raise_undelivered(of)
        return self._take_outputs(of)

    def _step(
        self, terminal: Callable[[], AbstractContextManager[None]], of: Container[str] | None
    ) -> None:
        self._finish_harvest()
        with terminal():
            self._raise_lost()
        self._raise_undelivered(of)
        self._abort_abandoned()
        with terminal():  # all of it: what is published has to run
            step = self._scheduler.step
            self._times.begin(step)
            with self._times.measure(step, Phase.PLAN):
                plan, snapshot = self._scheduler.next_step()
            with self._times.measure(step, Phase.PUBLISH):
                next_s = self._cadence.expected_s(plan.kind)
                self._channel.publish(self._encoder.encode(plan), next_s=next_s)
                self._cadence.count(time.monotonic(), plan.kind)
            # Only now: the worker shares the interpreter with this thread, and while it plans and
            # publishes every peer waits for it. While a model runs on a CPU, or is enqueued kernel
            # by kernel, there is time for the worker; a replay it would only hold up.
            replays = self._captures and plan.bucket is not None
            if not replays:
                self._start_harvest()
            tokens = self._runtime.runner.run(plan)
            lease = None if tokens is None else self._ring.stage(tokens)
            if replays:
                self._start_harvest()
            self._ran = Ran(snapshot=snapshot, lease=lease)
            if not self._in_flight or plan.kind is StepKind.IDLE:
                self._harvest_all()

    @property
    def in_step(self) -> bool:
        """Whether a step is under way: what it calls may not begin another."""
        return self._in_step

    def abandon(self, request_ids: Sequence[str]) -> None:
        """Abort these with the next step, and drop their outputs. From any thread."""
        self._abandoned.extend(request_ids)

    def _abort_abandoned(self) -> None:
        while self._abandoned:
            request_id = self._abandoned.popleft()
            if self.abort(request_id):
                self._unwanted.add(request_id)

    def sync(self, terminal: Callable[[], AbstractContextManager[None]]) -> None:
        """Harvest all that has run. Raises HarvestError, as `step`."""
        with terminal():
            self._harvest_all()
        self._raise_undelivered(None)

    def _raise_lost(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _raise_undelivered(self, of: Container[str] | None) -> None:
        """Raise what concerns these requests; the rest is for whoever asks for the others."""
        for error in self._undelivered:
            if of is None or any(request_id in of for request_id in error.request_ids):
                self._undelivered.remove(error)
                raise error

    def stop(self) -> None:
        """Tell the peers that this was the last step."""
        self._channel.publish(self._encoder.encode(self._scheduler.stop_step()))

    def _take_outputs(self, of: Container[str] | None) -> list[RequestOutput]:
        """What has been harvested since the call before."""
        outputs: list[RequestOutput] = []
        others: list[RequestOutput] = []
        queue = self._ready
        while queue:
            output = queue.popleft()
            if output.request_id in self._unwanted:
                if output.finished:
                    self._unwanted.discard(output.request_id)
                    self._forget(output.request_id)
                continue
            if of is not None and output.request_id not in of:
                others.append(output)
                continue
            outputs.append(output)
            if output.finished:
                self._forget(output.request_id)
        queue.extend(others)
        return outputs

    def _forget(self, request_id: str) -> None:
        """Its last output has been given or dropped, so that its id may be used again."""
        del self._live[request_id]
        holder = self._holders.pop(request_id, None)
        if holder is not None:
            holder.discard(request_id)
        for error in tuple(self._undelivered):
            if error.request_ids and self._live.keys().isdisjoint(error.request_ids):
                # who had these has gone away; it must not meet others that get the same ids
                self._undelivered.remove(error)
                log.warning("%s", error)

    def close(self) -> None:
        """Harvest what has run and end the worker. Raises what the device raises."""
        try:
            if self._lost is None:
                self._harvest_all()
        except BroadcastError as error:  # a peer ended first, and nobody waits for tokens any more
            log.info("at close: %s", error)
        finally:
            for undelivered in self._undelivered:
                log.error("at close: %s", undelivered)
            self._async.close()

    def check_no_leaks(self) -> None:
        """After `close`: raises PagePoolError if blocks are held that no request can hold."""
        self._scheduler.settle()
        if not self._scheduler.has_work:
            self._pool.check_no_leaks()

    def scheduler_statistics(self) -> SchedulerStatistics:
        return self._scheduler.statistics()

    def page_statistics(self) -> PagePoolStatistics:
        return self._pool.statistics()

    def graph_misses(self) -> dict[str, int]:
        """Pure decode steps that ran eagerly, by reason."""
        return dict(self._graph_misses)

    def checked_prompt(
        self, prompt_token_ids: Sequence[int]
    ) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """The prompt as an array. Raises RequestError if it cannot be served."""
        try:
            tokens = np.asarray(prompt_token_ids)
        except ValueError as error:
            raise RequestError(f"the prompt is no sequence of token ids: {error}") from error
        if tokens.ndim != 1:
            kind = type(prompt_token_ids).__name__
            raise RequestError(f"the prompt is a {kind}: expected a flat sequence of token ids")
        if not len(tokens):
            raise RequestError("the prompt is empty: expected at least one token")
        if tokens.dtype.kind not in "iu":
            raise RequestError(f"the prompt holds {tokens.dtype}: expected token ids")
        bad = tokens[(tokens < 0) | (tokens >= self._shape.vocab_size)]
        if len(bad):
            raise RequestError(
                f"token id {bad[0]} is outside of the vocabulary of {self._shape.vocab_size}"
            )
        most = self._runtime.sizes.max_seq_len
        if len(tokens) >= most:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens; prompt and answer may have {most} together"
            )
        return tokens.astype(np.int32)

    def _choose(self, batch_size: int, total_kv: int, max_kv: int) -> GraphChoice:
        """The graph of a decode step: the plan's choice, if every rank can replay it."""
        choice = self._runtime.decision.plan.choose(
            batch_size=batch_size, total_kv=total_kv, max_kv=max_kv
        )
        if choice.bucket is None:
            reason = "batch beyond the largest bucket"
        else:
            reason = self._unusable[choice.bucket, choice.variant]
            if not reason:
                return GraphChoice(choice.bucket, choice.variant)
        self._graph_misses[reason] = self._graph_misses.get(reason, 0) + 1
        return GraphChoice(None, 0)

    def _start_harvest(self) -> None:
        """Harvest the step that ran last, on the worker, which is idle."""
        ran = self._ran
        if ran is not None:
            self._async.launch(lambda: self._harvest_step(ran))
            self._ran = None

    def _finish_harvest(self) -> None:
        """Wait for the worker, and take over what it did: outputs, and what went wrong, which is
        kept for `_raise_lost` and `_raise_undelivered`, so that an error comes before its outputs.
        """
        try:
            self._async.sync()
        except HarvestError as error:
            self._undelivered.append(error)
        except Exception as error:  # noqa: BLE001 - raised where it ends the engine
            self._lost = self._lost or error
        self._ready.extend(self._harvest.outputs)
        self._harvest.outputs.clear()

    def _harvest_all(self) -> None:
        """Harvest every step that has run. Raises what ended the group or the device."""
        self._finish_harvest()
        self._start_harvest()
        self._finish_harvest()
        self._raise_lost()

    def _harvest_step(self, ran: Ran) -> None:
        with self._times.measure(ran.snapshot.step, Phase.HARVEST):
            try:
                # asked while the device is behind, too: it may wait for a peer that is gone
                tokens = [] if ran.lease is None else cast("list[int]", ran.lease.read(self._check))
                self._check()
            except Exception as error:  # noqa: BLE001 - the thread of the steps raises it
                self._lost = error
                return
            try:
                self._harvest.run(ran.snapshot, tokens)
            except HarvestError:  # it names the requests that it has ended, and the others go on
                raise
            except Exception as error:
                aborted = self._harvest.fail(ran.snapshot, error)
                raise HarvestError(
                    f"step {ran.snapshot.step}: {error!r}; aborted requests: {aborted}",
                    request_ids=aborted,
                ) from error

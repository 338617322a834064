"""The whole runtime of one rank: start, requests, steps, close.

Rank 0 owns the requests: `add_request`, `step`, `generate`. The other ranks follow: `serve_peer`,
or `step_peer` where the host owns the loop. One `step` on rank 0 is one `step_peer` on each of the
others, also when there is nothing to do.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from tp_runtime.config import RuntimeConfig
from tp_runtime.connection import Connection
from tp_runtime.device_times import DeviceTimes
from tp_runtime.errors import ConfigError, HarvestError, RequestError, TpRuntimeError
from tp_runtime.root_loop import RootLoop
from tp_runtime.startup import build_rank, capture_rank
from tp_runtime.step_message import StepDecoder
from tp_runtime.step_plan import StepKind
from tp_runtime.step_times import Phase, StepTimes

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from tp_runtime.broadcast import BroadcasterStatistics
    from tp_runtime.graphs import CaptureReport
    from tp_runtime.group import GroupStatistics, TpGroup
    from tp_runtime.models.base import DecodeModel
    from tp_runtime.pages import PagePoolStatistics
    from tp_runtime.planning import Source
    from tp_runtime.requests import RequestOutput
    from tp_runtime.root_loop import Tokenizer
    from tp_runtime.sampling import SamplingParams
    from tp_runtime.scheduler import SchedulerStatistics
    from tp_runtime.selection import BackendPlan, BenchReport
    from tp_runtime.startup import Captured, Progress, RankRuntime
    from tp_runtime.step_runner import RunnerStatistics
    from tp_runtime.step_times import StepTimeStatistics
    from tp_runtime.watcher import OnFailure

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """What the parts of one rank counted; the last three on rank 0 only.

    graph_misses: pure decode steps that ran eagerly, by reason.
    """

    rank: int
    runner: RunnerStatistics
    channel: BroadcasterStatistics
    group: GroupStatistics
    times: StepTimeStatistics
    scheduler: SchedulerStatistics | None
    pages: PagePoolStatistics | None
    graph_misses: dict[str, int] | None


class Engine:
    """One rank of a tensor-parallel decode runtime. One owner thread: the one that starts it.

    Args:
        config: equal on all ranks but for what is a rank's own affair (see docs).
        group: the host's own group; None: formed from torchrun's variables, or a single rank.
        model: the host's own model; None: loaded from `config.model`.
        tokenizer: for a host's model; without one prompts are token ids and there is no text.
        on_failure: "raise", "exit", or a callable that is called from the watcher's thread with
            the cause; None: what the configuration says.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        *,
        group: TpGroup | None = None,
        model: DecodeModel | None = None,
        tokenizer: Tokenizer | None = None,
        on_failure: OnFailure | None = None,
    ) -> None:
        if not isinstance(config, RuntimeConfig):
            raise ConfigError(f"expected a RuntimeConfig, got {type(config).__name__}")
        if model is None and config.model is None:
            raise ConfigError("no model: set `model` in the configuration or pass one")
        self._config = config
        self._connection = Connection(config, group=group, on_failure=on_failure)
        self._model = model
        self._make_tokenizer: Callable[[], Tokenizer] | None = None
        if tokenizer is not None:
            self._make_tokenizer = lambda: tokenizer
        self._owner: int | None = None  # the thread that starts it
        self._decoder = StepDecoder()
        self._ready = False
        self._runtime: RankRuntime | None = None
        self._captured: Captured | None = None
        self._root: RootLoop | None = None
        self._times = StepTimes()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()  # nobody else will: the block is not entered
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(reason=None if error is None else f"{type(error).__name__}: {error}")

    @property
    def rank(self) -> int:
        """The rank in the TP group; known before `start` only if a group was passed."""
        return self._connection.rank

    def start(self, *, progress: Progress | None = None) -> None:
        """Bring this rank up together with the others; returns when all are ready.

        Args:
            progress: called with (stage, done, total); the stages are "load", "build",
                "selection" and "capture". A peer gets those of the selection from rank 0.

        Raises:
            TpRuntimeError: what went wrong, on this or on another rank, named.
        """
        if self._connection.closed:
            raise TpRuntimeError("the engine has been closed: make a new one")
        self._check_owner()
        if self._ready:
            return
        self._owner = threading.get_ident()
        tell = progress or (lambda stage, done, total: None)
        with self._connection.terminal():
            self._connection.open(rehearse=self._decoder.rehearse)
            channel, group = self._connection.channel, self._connection.group
            model = self._model
            if model is None:
                model = self._load_model(group, lambda done, total: tell("load", done, total))
            self._runtime = build_rank(self._config, channel, group, model, self._times, tell)
        self.trigger_capture(progress=tell)
        with self._connection.terminal():
            self._connection.expect_steps()
            if group.rank == 0:
                self._root = RootLoop(
                    config=self._config,
                    channel=channel,
                    runtime=self._runtime,
                    shape=model.shape,
                    device=group.device,
                    tokenizer=self._make_tokenizer,
                    times=self._times,
                    check=group.raise_if_failed,
                )
        self._ready = True

    def trigger_capture(self, *, progress: Progress | None = None) -> None:
        """Capture the graphs, once, on all ranks together. `start` calls it when weights, cache
        and groups exist, before any request; later calls do nothing."""
        self._check_owner()
        runtime, group = self._started()
        if self._captured is not None:
            return
        with self._connection.terminal():
            self._captured = capture_rank(
                self._config,
                self._connection.channel,
                group,
                runtime,
                progress or (lambda stage, done, total: None),
            )

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
    ) -> str:
        """Queue a request; it takes part from the next step on. Rank 0.

        Returns:
            The request's id, made up unless given.

        Raises:
            RequestError: the prompt is empty, too long, or holds what is no token; the id is in
                use; or the cache could never hold it. Nothing is changed.
        """
        return self._root_loop().add_request(prompt_token_ids, sampling, request_id)

    def abort(self, request_id: str) -> bool:
        """End a request early; its last output says "abort". False if it is not running. Rank 0."""
        return self._root_loop().abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Plan and run one step on every rank. Rank 0.

        Returns:
            Outputs that are new. With two steps in flight they are those of the step before.

        Raises:
            BroadcastError: a rank was lost; the engine has failed on every rank.
            HarvestError: tokens could not be delivered; the requests it names were aborted.
        """
        return self._root_loop().step(self._connection.terminal)

    def sync(self) -> None:
        """Wait until every step so far has run and its tokens are known. Rank 0.

        After each `step` it makes the loop that keeps nothing in flight, to compare with.

        Raises:
            HarvestError: as `step`.
        """
        self._root_loop().sync(self._connection.terminal)

    def time_device(self, *, steps: int = 0) -> DeviceTimes:
        """Mark from here on when the device works and when it idles, on this rank.

        Args:
            steps: for so many all is made ready now, so that the host's times stay what they are.
        """
        runtime, group = self._started()
        times = DeviceTimes(group.device, steps=steps)
        runtime.runner.time_device(times)
        return times

    @property
    def times(self) -> StepTimes:
        """Where the host's time of steps went, on this rank; also after the end."""
        return self._times

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
    ) -> Iterator[RequestOutput]:
        """Answer prompts, all at once; yields outputs as they grow. Rank 0.

        Request ids are the positions of the prompts, "0", "1", ... Texts are encoded as they are,
        without a chat template. Requests still running when the iterator is closed are aborted.
        What a :meth:`step` of the host has returned meanwhile is not yielded again.
        """
        root = self._root_loop()
        if isinstance(prompts, str | bytes):
            raise RequestError(f"expected a list of prompts, got one {type(prompts).__name__}")
        each = [sampling] * len(prompts) if not isinstance(sampling, Sequence) else list(sampling)
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts, but {len(each)} sampling parameters")
        ids = [str(i) for i in range(len(prompts))]
        root.check_free(ids)
        encoded = [self._encode(prompt) for prompt in prompts]
        for tokens in encoded:
            root.checked_prompt(tokens)  # before any of them is queued
        mine: set[str] = set()
        try:
            for name, tokens, params in zip(ids, encoded, each, strict=True):
                root.add_request(tokens, params, name, holder=mine)
            while mine:
                yield from root.step(self._connection.terminal, of=mine)
        finally:
            if self._connection.failure is None and not self._connection.closed:
                # a forgotten iterator ends wherever its memory is collected
                if threading.get_ident() != self._owner or root.in_step:
                    root.abandon(tuple(mine))
                else:
                    self._drop(root, mine)

    def _drop(self, root: RootLoop, mine: set[str]) -> None:
        """Abort requests that nobody will ask for any more, and free their ids."""
        for request_id in mine:
            root.abort(request_id)
        while mine:
            try:
                root.step(self._connection.terminal, of=mine)
            except HarvestError as error:  # of these, whose end nobody waits for
                log.warning("%s", error)

    @property
    def unfinished(self) -> int:
        """Requests whose last output has not been returned. Rank 0."""
        return self._root_loop().unfinished

    @property
    def running(self) -> tuple[str, ...]:
        """The ids of those requests. Rank 0."""
        return self._root_loop().request_ids

    def serve_peer(self) -> None:
        """Follow rank 0 until it stops. Ranks above 0."""
        while self.step_peer():
            pass

    def step_peer(self) -> bool:
        """Follow rank 0 for one step. Ranks above 0.

        Returns:
            False: rank 0 has stopped.

        Raises:
            BroadcastError: a rank was lost or silent.
        """
        runtime, group = self._started()
        self._check_owner()
        if group.rank == 0:
            raise TpRuntimeError("rank 0 plans the steps: call step() or generate() on it")
        with self._connection.terminal():
            channel = self._connection.channel
            begin_ns = time.monotonic_ns()
            message = channel.receive()
            got_ns = time.monotonic_ns()
            plan = self._decoder.decode(message)
            self._times.begin(plan.step)
            self._times.add(
                plan.step, Phase.MESSAGE, got_ns - max(begin_ns, channel.message_sent_ns)
            )
            self._times.add(plan.step, Phase.RECEIVE, time.monotonic_ns() - begin_ns)
            runtime.runner.run(plan)
            group.raise_if_failed()
        return plan.kind is not StepKind.STOP

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded on first use; None without one."""
        return None if self._make_tokenizer is None else self._make_tokenizer()

    @property
    def plan(self) -> BackendPlan:
        """Which decode backend serves which step; equal on every rank."""
        return self._started()[0].decision.plan

    @property
    def plan_digest(self) -> str | None:
        """Of a measured plan; None when nothing was measured."""
        return self._started()[0].plan_digest

    @property
    def plan_source(self) -> Source:
        """Whether the plan was measured now or by an earlier start, is from a file, or is the fixed
        priority. Peers only know that it is from rank 0."""
        return self._started()[0].decision.source

    @property
    def capture_digest(self) -> str | None:
        """Of what was captured, or prepared where there are no graphs."""
        return None if self._captured is None else self._captured.report.digest

    @property
    def capture_report(self) -> CaptureReport | None:
        """What this rank captured, how long it took, and the device memory that it took."""
        return None if self._captured is None else self._captured.report

    @property
    def selection_report(self) -> BenchReport | None:
        """What the selection measured, on rank 0; None when it was off."""
        return self._started()[0].decision.report

    @property
    def refusals(self) -> dict[str, str]:
        """Decode backends that may not be used here, with the reason."""
        return dict(self._started()[0].decision.refusals)

    def rank_reports(self) -> list[dict[str, Any]]:
        """What every rank said it holds: "rank", "plan_digest" and "capture_digest"; on rank 0,
        after `start`."""
        return [] if self._captured is None else [dict(r) for r in self._captured.rank_reports]

    def statistics(self) -> EngineStatistics:
        runtime, group = self._started()
        root = self._root
        return EngineStatistics(
            rank=self.rank,
            runner=runtime.runner.statistics(),
            channel=self._connection.channel.statistics(),
            group=group.statistics(),
            times=self._times.statistics(),
            scheduler=None if root is None else root.scheduler_statistics(),
            pages=None if root is None else root.page_statistics(),
            graph_misses=None if root is None else root.graph_misses(),
        )

    def close(self, reason: str | None = None) -> None:
        """End this rank; idempotent. On rank 0 it stops the others first.

        Args:
            reason: why this is no orderly end; every other rank then raises with it.
        """
        connection, root, runtime = self._connection, self._root, self._runtime
        if connection.closed or connection.forked:
            return
        connection.closed = True
        connection.stop(None if root is None else root.stop, reason)
        with ExitStack() as ends:
            ends.callback(connection.close)
            if runtime is not None:  # before the group, whose collectives its graphs hold
                ends.callback(connection.end, runtime.runner.close)
            if root is not None:
                ends.callback(connection.end, root.close)
        if root is not None and connection.failure is None and reason is None:
            root.check_no_leaks()  # last, so that a leak does not keep anything open

    def _load_model(self, group: TpGroup, progress: Callable[[int, int], None]) -> DecodeModel:
        import torch

        from tp_runtime.models import load_model

        if self._config.model is None:
            raise ConfigError("no model: set `model` in the configuration or pass one")
        dtype = getattr(torch, self._config.dtype_on(group.device.type))
        loaded = load_model(
            self._config.model,
            group=group,
            dtype=dtype,
            max_positions=self._config.max_seq_len,
            progress=progress,
        )
        self._make_tokenizer = loaded.tokenizer
        return loaded.model

    def _encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self._make_tokenizer is None:
            raise RequestError("this model has no tokenizer: pass token ids")
        return self._make_tokenizer().encode(prompt)

    def _started(self) -> tuple[RankRuntime, TpGroup]:
        if self._runtime is None:
            raise TpRuntimeError("the engine has not been started: call start() first")
        return self._runtime, self._connection.group

    def _check_owner(self) -> None:
        if self._owner not in (None, threading.get_ident()):
            raise TpRuntimeError("an engine belongs to the thread that started it")

    def _root_loop(self) -> RootLoop:
        self._check_owner()
        if self._root is None:
            _, group = self._started()
            raise TpRuntimeError(f"rank {group.rank} has no requests: call serve_peer() on it")
        self._connection.raise_if_ended()
        return self._root

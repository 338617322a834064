"""Which requests take part in the next step, on rank 0 only.

Continuous batching with chunked prefill: requests that decode go first, then the prompt being
computed, then waiting ones while slots and blocks last. All counts are arithmetic over what was
planned, so step N+1 can be planned while step N runs; only the end of a request (EOS, a stop
string) is learned from the harvest, `lag` steps later, and its extra token is dropped.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tp_runtime.errors import RequestError
from tp_runtime.requests import Harvest, Request, Snapshot
from tp_runtime.step_plan import Admit, BlockEntry, Chunk, StepKind, StepPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from tp_runtime.pages import PagePool


class GraphChoice(NamedTuple):
    """The graph that a decode step replays; bucket None is eager."""

    bucket: int | None
    variant: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStatistics:
    """Counts since start; `waiting` and `running` are now."""

    steps: int
    waiting: int
    running: int
    admitted: int
    preempted: int
    finished: int
    decode_rows: int
    prefill_tokens: int


class Scheduler:
    """Plans steps. One owner thread.

    Args:
        pool: KV blocks of `block_size` tokens.
        slots: requests that may run at the same time.
        chunk_tokens: most prompt tokens in one step.
        lag: a finished mark of step N is seen when step N + lag is planned: 1 when every step is
            waited for, 2 with two steps in flight.
        choose: (batch_size, total_kv, max_kv) -> the graph of a pure decode step.
        wait_for_harvest: returns when every step planned so far has been harvested.
    """

    def __init__(
        self,
        *,
        pool: PagePool,
        harvest: Harvest,
        block_size: int,
        slots: int,
        chunk_tokens: int,
        lag: int,
        choose: Callable[[int, int, int], GraphChoice],
        wait_for_harvest: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._harvest = harvest
        self._block_size = block_size
        self._chunk_tokens = chunk_tokens
        self._lag = lag
        self._choose = choose
        self._wait_for_harvest = wait_for_harvest
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in order of admission
        self._free_slots = list(range(slots))
        self._aborting: list[Request] = []
        self._step = 0
        self._last_rows: tuple[int, ...] = ()
        self._admits: list[Admit] = []
        self._blocks: list[BlockEntry] = []
        self._admitted = self._preempted = 0
        self._decode_rows = self._prefill_tokens = 0

    @property
    def step(self) -> int:
        """The number of the step that `next_step` will plan."""
        return self._step

    @property
    def has_work(self) -> bool:
        """Something waits, runs, or is being aborted."""
        return bool(self._waiting or self._running or self._aborting)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it could never hold its tokens."""
        tokens = len(request.to_prefill) + request.max_new_tokens - 1
        blocks = self._blocks_for(tokens)
        if blocks > self._pool.total:
            raise RequestError(
                f"request {request.request_id} needs {blocks} KV blocks for {tokens} tokens, "
                f"the cache has {self._pool.total}: lower max_tokens or raise kv_cache_tokens"
            )
        self._waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request; its output says "abort" unless it has ended by then."""
        if request in self._waiting:
            self._waiting.remove(request)
            request.retired = True
        elif request in self._running:
            self._retire(request, after=self._step - 1)
        self._aborting.append(request)

    def next_step(self) -> tuple[StepPlan, Snapshot]:
        """Plan one step; IDLE when nothing can run."""
        self._collect(self._step - self._lag)
        decoding = self._plan_decode()
        chunks, worked_on = self._plan_prefill()
        sampled = decoding + [request for request in worked_on if request.prefilled]
        aborted, self._aborting = tuple(self._aborting), []
        plan = self._build(decoding, chunks)
        snapshot = Snapshot(step=self._step, sampled=tuple(sampled), aborted=aborted)
        for request in sampled:
            request.planned += 1
            if request.planned >= request.max_new_tokens:
                self._retire(request, after=self._step)  # its end is known by arithmetic
        self._decode_rows += len(decoding)
        for chunk in chunks:
            self._prefill_tokens += len(chunk.token_ids)
        self._step += 1
        return plan, snapshot

    def settle(self) -> None:
        """Take over all that was harvested; only when no step is in flight."""
        self._collect(self._step - 1)

    def stop_step(self) -> StepPlan:
        """The last plan of all."""
        return StepPlan(step=self._step, kind=StepKind.STOP)

    def statistics(self) -> SchedulerStatistics:
        return SchedulerStatistics(
            steps=self._step,
            waiting=len(self._waiting),
            running=len(self._running),
            admitted=self._admitted,
            preempted=self._preempted,
            finished=self._harvest.ended,
            decode_rows=self._decode_rows,
            prefill_tokens=self._prefill_tokens,
        )

    def _collect(self, up_to: int) -> None:
        """Take over what the harvest of steps up to `up_to` found; later marks wait, so that a
        run does not depend on how fast the worker was."""
        self._pool.complete(up_to)
        finished = self._harvest.finished
        while finished and finished[0][0] <= up_to:
            _, request = finished.popleft()
            if not request.retired:
                self._retire(request, after=self._step - 1)

    def _retire(self, request: Request, *, after: int) -> None:
        """The request takes part in no step after `after`."""
        request.retired = True
        self._release(request, after=after)

    def _release(self, request: Request, *, after: int) -> None:
        self._running.remove(request)
        self._blocks = [entry for entry in self._blocks if entry[0] != request.slot]
        self._pool.release(request.blocks, after=after)
        heapq.heappush(self._free_slots, request.slot)

    def _plan_decode(self) -> list[Request]:
        decoding = [request for request in self._running if request.prefilled]
        size = self._block_size
        if [r for r in decoding if r.computed >= len(r.blocks) * size]:
            # a row that grows may end or preempt another one, before it or after it
            grown = [r for r in decoding if self._runs(r) and self._grow(r, r.computed + 1)]
            decoding = [request for request in grown if self._runs(request)]
        for request in decoding:
            request.computed += 1
        return decoding

    def _plan_prefill(self) -> tuple[list[Chunk], list[Request]]:
        chunks: list[Chunk] = []
        worked_on: list[Request] = []
        budget = self._chunk_tokens
        for request in self._running:
            if budget > 0 and not request.prefilled:
                chunks.append(self._chunk(request, budget))
                worked_on.append(request)
                budget -= len(chunks[-1].token_ids)
        while budget > 0 and self._waiting and self._admit(self._waiting[0]):
            request = self._waiting.popleft()
            chunks.append(self._chunk(request, budget))
            worked_on.append(request)
            budget -= len(chunks[-1].token_ids)
        return chunks, worked_on

    def _admit(self, request: Request) -> bool:
        """Give a waiting request a slot and the blocks of its whole prompt, or leave it."""
        if not self._free_slots:
            return False
        # one more token, so that it is not preempted by its own first decode step
        tokens = min(len(request.to_prefill) + 1, self._most_tokens(request))
        blocks = self._pool.allocate(self._blocks_for(tokens))
        if blocks is None:
            return False
        request.slot = heapq.heappop(self._free_slots)
        self._admits.append(Admit(slot=request.slot, sampling=request.sampling, seed=request.seed))
        self._hold(request, blocks)
        self._running.append(request)
        self._admitted += 1
        return True

    def _chunk(self, request: Request, budget: int) -> Chunk:
        start = request.computed
        token_ids = request.to_prefill[start : start + budget]
        request.computed += len(token_ids)
        request.prefilled = request.computed == len(request.to_prefill)
        return Chunk(slot=request.slot, start=start, token_ids=token_ids, samples=request.prefilled)

    def _grow(self, request: Request, tokens: int) -> bool:
        """Hold blocks for `tokens`; False if the request ended or was preempted instead."""
        missing = self._blocks_for(tokens) - len(request.blocks)
        if missing <= 0:
            return True
        blocks = self._pool.allocate(missing)
        if blocks is None:
            self._reclaim()
        while blocks is None and not request.retired:
            blocks = self._pool.allocate(missing)
            if blocks is None and self._preempt_youngest() is request:
                return False
        if blocks is None:
            return False
        self._hold(request, blocks)
        return True

    def _reclaim(self) -> None:
        """Wait for the steps in flight: their ends become known and their blocks free."""
        self._wait_for_harvest()
        self.settle()

    def _preempt_youngest(self) -> Request:
        """Send the request admitted last back to the queue; only after `_reclaim`, when all its
        tokens are known and nothing reads its blocks."""
        victim = self._running[-1]
        self._release(victim, after=self._step - 1)
        victim.restart()
        self._waiting.appendleft(victim)
        self._preempted += 1
        return victim

    def _hold(self, request: Request, blocks: list[int]) -> None:
        first = len(request.blocks)
        request.blocks.extend(blocks)
        self._blocks.extend(
            (request.slot, position, block) for position, block in enumerate(blocks, start=first)
        )

    def _build(self, decoding: list[Request], chunks: list[Chunk]) -> StepPlan:
        rows = tuple([request.slot for request in decoding])
        choice = GraphChoice(None, 0)
        kind = StepKind.IDLE
        if decoding and chunks:
            kind = StepKind.MIXED
        elif chunks:
            kind = StepKind.PREFILL
        elif decoding:
            kind = StepKind.DECODE
            lengths = [request.computed for request in decoding]
            choice = self._choose(len(decoding), sum(lengths), max(lengths))
        plan = StepPlan(
            step=self._step,
            kind=kind,
            bucket=choice.bucket,
            variant=choice.variant,
            rows=None if rows and rows == self._last_rows else rows,
            num_rows=len(rows),
            admits=tuple(self._admits),
            blocks=tuple(self._blocks),
            chunks=tuple(chunks),
        )
        if rows:
            self._last_rows = rows
        self._admits, self._blocks = [], []
        return plan

    @staticmethod
    def _runs(request: Request) -> bool:
        return request.slot >= 0 and not request.retired

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _most_tokens(self, request: Request) -> int:
        """Tokens that will ever be in the cache: the last one generated is not."""
        remaining = request.max_new_tokens - request.planned
        return len(request.to_prefill) + remaining - 1

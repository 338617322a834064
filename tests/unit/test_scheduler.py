"""The scheduler against a simulated device that checks every plan it is given."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tp_runtime.errors import RequestError
from tp_runtime.pages import PagePool
from tp_runtime.requests import Harvest, OutputStream, Request, Snapshot
from tp_runtime.sampling import SamplingParams
from tp_runtime.scheduler import GraphChoice, Scheduler
from tp_runtime.step_plan import StepKind, StepPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

EOS = 0
BLOCK = 4


def next_token(tokens: Sequence[int]) -> int:
    """A made-up model: the next token is a function of all tokens before it."""
    mixed = 17
    for token in tokens:
        mixed = (mixed * 31 + token + 1) % 1_000_003
    return mixed % 23


@dataclass
class Slot:
    tokens: list[int]
    blocks: dict[int, int]
    pending: int | None = None


class SimulatedRank:
    """Applies plans as a rank would, keeping whole sequences, and checks what it is told."""

    def __init__(self, slots: int) -> None:
        self.slots: list[Slot] = [Slot([], {}) for _ in range(slots)]
        self.rows: tuple[int, ...] = ()
        self.cache: dict[tuple[int, int], tuple[int, int]] = {}

    def run(self, plan: StepPlan) -> list[int]:
        for admit in plan.admits:
            self.slots[admit.slot] = Slot([], {})
        for slot, position, block in plan.blocks:
            self.slots[slot].blocks[position] = block
        rows = self.rows if plan.rows is None else plan.rows
        if plan.num_rows:
            self.rows = rows
        assert len(rows) == plan.num_rows
        sampled = []
        for slot in rows:
            state = self.slots[slot]
            assert state.pending is not None, "a row decodes before its prompt is done"
            self.write(slot, [state.pending])
            state.pending = next_token(state.tokens)
            sampled.append(state.pending)
        for chunk in plan.chunks:
            state = self.slots[chunk.slot]
            assert chunk.start == len(state.tokens), "chunks follow each other"
            self.write(chunk.slot, chunk.token_ids.tolist())
            if chunk.samples:
                state.pending = next_token(state.tokens)
                sampled.append(state.pending)
        return sampled

    def write(self, slot: int, tokens: list[int]) -> None:
        """Put tokens into the paged cache and check that the whole sequence is still there."""
        state = self.slots[slot]
        for token in tokens:
            position = len(state.tokens)
            block = state.blocks[position // BLOCK]
            assert block > 0, "the dummy block holds no request"
            self.cache[block, position % BLOCK] = (slot, token)
            state.tokens.append(token)
        for position, token in enumerate(state.tokens):
            block = state.blocks[position // BLOCK]
            assert self.cache[block, position % BLOCK] == (slot, token), "a block was shared"


class Bench:
    """A scheduler, a simulated rank and a harvest that is `lag` - 1 steps behind."""

    def __init__(self, *, blocks: int, slots: int, chunk: int, lag: int) -> None:
        self.pool = PagePool(blocks + 1)
        self.harvest = Harvest()
        self.lag = lag
        self.rank = SimulatedRank(slots)
        self.in_flight: list[tuple[Snapshot, list[int]]] = []
        self.plans: list[StepPlan] = []
        self.streams: dict[str, OutputStream] = {}
        self.scheduler = Scheduler(
            pool=self.pool,
            harvest=self.harvest,
            block_size=BLOCK,
            slots=slots,
            chunk_tokens=chunk,
            lag=lag,
            choose=lambda batch, total, longest: GraphChoice(slots, 0),
            wait_for_harvest=self.settle,
        )

    def settle(self) -> None:
        while self.in_flight:
            snapshot, tokens = self.in_flight.pop(0)
            self.harvest.run(snapshot, tokens)

    def add(
        self, name: str, prompt: list[int], max_tokens: int, *, ignore_eos: bool = False
    ) -> Request:
        stream = OutputStream(
            request_id=name,
            prompt_token_ids=prompt,
            max_new_tokens=max_tokens,
            eos_token_ids=() if ignore_eos else (EOS,),
            stop=(),
            text_stream=None,
        )
        request = Request(
            request_id=name,
            output=stream,
            sampling=SamplingParams(),
            seed=1,
            max_new_tokens=max_tokens,
            to_prefill=np.array(prompt, dtype=np.int32),
        )
        self.scheduler.add(request)
        self.streams[name] = stream
        return request

    def step(self) -> StepPlan:
        plan, snapshot = self.scheduler.next_step()
        self.plans.append(plan)
        tokens = self.rank.run(plan)
        assert len(tokens) == len(snapshot.sampled)
        self.in_flight.append((snapshot, tokens))
        keep = self.lag - 1 if plan.kind is not StepKind.IDLE else 0
        while len(self.in_flight) > keep:
            done, values = self.in_flight.pop(0)
            self.harvest.run(done, values)
        return plan

    def run_all(self, most: int = 10_000) -> None:
        for _ in range(most):
            if self.step().kind is StepKind.IDLE and not self.scheduler.has_work:
                break
        else:
            raise AssertionError("the requests did not end")
        for _ in range(self.lag):
            self.step()


def expected(prompt: list[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
    tokens = list(prompt)
    out: list[int] = []
    while len(out) < max_tokens:
        out.append(next_token(tokens))
        tokens.append(out[-1])
        if out[-1] == EOS and not ignore_eos:
            break
    return out


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_random_requests_get_their_tokens_and_all_blocks_come_back(seed: int, lag: int) -> None:
    rng = random.Random(seed)
    bench = Bench(
        blocks=rng.randint(12, 40),
        slots=rng.randint(1, 6),
        chunk=rng.choice([1, 3, 8, 64]),
        lag=lag,
    )
    wanted = {}
    aborted = set()
    waiting = []
    for i in range(40):
        prompt = [rng.randint(1, 22) for _ in range(rng.randint(1, 20))]
        most = rng.randint(1, 25)
        wanted[str(i)] = expected(prompt, most)
        waiting.append((str(i), prompt, most))
    running = {}
    while waiting:
        for name, prompt, most in waiting[: rng.randint(0, 4)]:
            running[name] = bench.add(name, prompt, most)
            waiting.pop(0)
        for _ in range(rng.randint(0, 6)):
            bench.step()
        if running and rng.random() < 0.2:
            name = rng.choice(sorted(running))
            if not bench.streams[name].finished:
                aborted.add(name)
                bench.scheduler.abort(running[name])
    bench.run_all()
    for name, tokens in wanted.items():
        stream = bench.streams[name]
        assert stream.finished, name
        if name in aborted and stream.finish_reason == "abort":
            assert stream.token_ids == tokens[: len(stream.token_ids)]
        else:
            assert stream.token_ids == tokens, name
    assert bench.pool.statistics().free == bench.pool.total
    bench.pool.check_no_leaks()


@pytest.mark.parametrize("lag", [1, 2])
def test_too_few_blocks_preempt_the_youngest_and_nothing_is_lost(lag: int) -> None:
    bench = Bench(blocks=10, slots=4, chunk=64, lag=lag)
    prompts = {str(i): [i + 1] * 4 for i in range(4)}
    for name, prompt in prompts.items():
        bench.add(name, prompt, 20, ignore_eos=True)
    bench.run_all()
    assert bench.scheduler.statistics().preempted > 0
    for name, prompt in prompts.items():
        assert bench.streams[name].token_ids == expected(prompt, 20, ignore_eos=True)
    assert bench.pool.statistics().free == bench.pool.total


def test_steady_decode_ships_rows_only_when_they_change() -> None:
    bench = Bench(blocks=40, slots=4, chunk=64, lag=2)
    for name in "ab":
        bench.add(name, [1, 2, 3], 12, ignore_eos=True)
    bench.run_all()
    decode = [plan for plan in bench.plans if plan.kind is StepKind.DECODE]
    assert decode[0].rows == (0, 1)
    assert all(plan.rows is None and not plan.admits for plan in decode[1:])
    assert sum(len(plan.blocks) for plan in decode[1:]) <= 2 * (12 // BLOCK + 1)


def test_a_prompt_is_computed_in_chunks_while_others_decode() -> None:
    bench = Bench(blocks=40, slots=4, chunk=5, lag=2)
    bench.add("short", [1], 20, ignore_eos=True)
    bench.step()
    bench.add("long", list(range(1, 18)), 2, ignore_eos=True)
    bench.run_all()
    kinds = [plan.kind for plan in bench.plans]
    assert kinds[:5] == [StepKind.PREFILL, *[StepKind.MIXED] * 4]
    assert [len(plan.chunks[0].token_ids) for plan in bench.plans[1:5]] == [5, 5, 5, 2]


def test_a_length_finish_is_known_in_advance() -> None:
    bench = Bench(blocks=40, slots=4, chunk=64, lag=2)
    bench.add("a", [1, 2], 3, ignore_eos=True)
    bench.run_all()
    assert [plan.num_rows for plan in bench.plans if plan.kind is StepKind.DECODE] == [1, 1]


def test_a_request_that_can_never_fit_is_refused_and_nothing_is_queued() -> None:
    bench = Bench(blocks=3, slots=2, chunk=64, lag=1)
    bench.add("fits", [1] * 8, 5)
    with pytest.raises(RequestError, match="needs 4 KV blocks for 13 tokens, the cache has 3"):
        bench.add("never", [1] * 8, 6)
    assert bench.scheduler.statistics().waiting == 1


def test_abort_of_a_waiting_request() -> None:
    bench = Bench(blocks=40, slots=1, chunk=64, lag=2)
    bench.add("runs", [1, 2], 5, ignore_eos=True)
    waits = bench.add("waits", [1, 2], 5)
    bench.step()
    bench.scheduler.abort(waits)
    bench.run_all()
    assert bench.streams["waits"].finish_reason == "abort"
    assert bench.streams["waits"].token_ids == []
    assert bench.streams["runs"].finish_reason == "length"

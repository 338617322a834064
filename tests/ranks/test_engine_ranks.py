"""The engine on real ranks: replayed plans, and ranks that die at the worst moment."""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.shrunk import shrunk_model
from tests.strikes import strike_before
from tp_runtime.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from tp_runtime.requests import TextStream

LETTERS = "abcdefghijklmnop"


class Letters:
    """A tokenizer for a model without one: token n is the letter n modulo 16."""

    def encode(self, text: str) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def stream(self) -> TextStream:
        return LetterStream()


class LetterStream:
    def push(self, token_id: int) -> str:
        return LETTERS[token_id % len(LETTERS)]

    def flush(self) -> str:
        return ""


def random_requests(seed: int, count: int) -> list[tuple[list[int], dict[str, Any]]]:
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        prompt = [rng.randrange(512) for _ in range(rng.randint(1, 70))]
        sampling: dict[str, Any] = {"max_tokens": rng.randint(1, 24), "seed": rng.randrange(2**40)}
        if rng.random() < 0.5:
            sampling["temperature"] = rng.choice([0.5, 1.0])
        if rng.random() < 0.3:
            sampling["top_k"] = 20
        if rng.random() < 0.3:
            sampling["stop"] = tuple(rng.sample(LETTERS, 2))
        requests.append((prompt, sampling))
    return requests


def replay(device: str = "cpu", requests: int = 200) -> dict[str, Any]:
    """Serve random requests with two steps in flight, then run the same plans one by one.

    Runs on each rank. Both runs use the same model; everything that a step leaves behind is
    compared: sampled tokens, lengths, last tokens, and the whole cache. On a GPU the model is one
    whose heads the kernels take, in bfloat16.
    """
    import torch

    from tp_runtime import Engine, RankInfo, RuntimeConfig, SamplingParams, TpGroup
    from tp_runtime.models import load_model

    info = RankInfo.from_env()
    rng = random.Random(5)
    settings: dict[str, Any] = {
        "max_batch_size": 12,
        "max_seq_len": 128,
        "kv_block_size": 16,
        "kv_cache_tokens": 16 * 50,
        "prefill_chunk_tokens": 48,
        "decode_buckets": (1, 4, 8),
    }
    recorded: list[tuple[Any, Any]] = []
    place = torch.device(device) if device == "cpu" else torch.device(device, info.local_rank)
    with TpGroup.create(info, device=place, timeout_s=60) as group:
        if device == "cpu":
            model = load_model("random:tiny", group=group, dtype=torch.float32).model
        else:
            torch.cuda.set_device(place)
            model = shrunk_model("llama-3-8b", group=group, dtype=torch.bfloat16)
        finished: dict[str, str | None] = {}
        with Engine(
            RuntimeConfig(async_decode=True, **settings),
            group=group,
            model=model,
            tokenizer=Letters(),
        ) as engine:
            runner = engine._started()[0].runner
            record(runner, recorded)
            if group.rank > 0:
                engine.serve_peer()
            else:
                waiting = random_requests(1, requests)
                while waiting or engine.unfinished:
                    for prompt, sampling in waiting[: rng.randint(0, 3)]:
                        engine.add_request(prompt, SamplingParams(**sampling))
                        waiting.pop(0)
                    for output in engine.step():
                        if output.finished:
                            finished[output.request_id] = output.finish_reason
                        elif rng.random() < 0.01:
                            engine.abort(output.request_id)
                for _ in range(2):
                    engine.step()
                pages = engine.statistics().pages
                misses = engine.statistics().graph_misses
            first = leftovers(runner)
        with Engine(
            RuntimeConfig(async_decode=False, **settings), group=group, model=model
        ) as engine:
            runner = engine._started()[0].runner
            for plan, tokens in recorded:
                again = runner.run(plan)
                assert (again is None) == (tokens is None), plan
                assert again is None or torch.equal(again, tokens), plan
            for name, before in first.items():
                assert torch.equal(leftovers(runner)[name], before), name
    result: dict[str, Any] = {"steps": len(recorded)}
    if group.rank == 0:
        result |= {
            "reasons": [
                list(finished.values()).count(r) for r in ("eos", "length", "stop", "abort")
            ],
            "free": pages.free if pages is not None else None,
            "total": pages.total if pages is not None else None,
            "misses": misses,
        }
    return result


def record(runner: Any, recorded: list[tuple[Any, Any]]) -> None:
    run: Callable[[Any], Any] = runner.run

    def recording(plan: Any) -> Any:
        tokens = run(plan)
        if plan.kind.name != "STOP":  # only the peers run it
            recorded.append((plan, None if tokens is None else tokens.clone()))
        return tokens

    runner.run = recording


def leftovers(runner: Any) -> dict[str, Any]:
    """Copies of everything that a step changes."""
    state, cache = runner._state, runner._cache
    return {
        "last_token": state.last_token[:-1].clone(),
        "length": state.length.clone(),
        "table": state.block_table.clone(),
        "k": cache._k[:, 1:].clone(),
        "v": cache._v[:, 1:].clone(),
    }


@pytest.mark.parametrize("tp_size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_replayed_plans_give_the_same_bits_and_no_block_is_lost(tp_size: int) -> None:
    results = run_ranks(replay, tp_size, 240)
    root = results[0]
    assert sum(root["reasons"]) == 200
    assert min(root["reasons"][1:]) > 0, "ends by length, stop string and abort all happened"
    assert root["free"] == root["total"]
    assert list(root["misses"]) == ["batch beyond the largest bucket"]
    assert {result["steps"] for result in results} == {root["steps"]}


def die(where: str, victim: int) -> dict[str, Any]:
    """On each rank: the victim kills itself at a moment; the others say what they saw."""
    import torch

    from tp_runtime import Engine, RankInfo, RuntimeConfig, SamplingParams, TpGroup
    from tp_runtime.errors import PeerLost, TpRuntimeError
    from tp_runtime.step_plan import StepKind
    from tp_runtime.step_runner import StepRunner

    rank = RankInfo.from_env().tp_rank

    def suicide(*args: object, **kwargs: object) -> None:
        print(f"at {time.monotonic()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        if where == "join":
            setattr(TpGroup, "create", suicide)
        elif where == "capture":
            setattr(StepRunner, "capture", suicide)
        elif where == "prefill":
            strike_before(StepKind.PREFILL, suicide)
        else:
            strike_before(StepKind.DECODE, suicide, after_step=10)
    began = time.monotonic()
    engine = Engine(RuntimeConfig(model="random:tiny", device="cpu", max_batch_size=2))
    try:
        engine.start()
        if rank > 0:
            engine.serve_peer()
        else:
            prompt = torch.arange(20).tolist()
            for _ in engine.generate([prompt], SamplingParams(max_tokens=200)):
                pass
        raise AssertionError("nobody noticed")
    except PeerLost as error:
        seen = {"lost": error.rank, "message": str(error), "seconds": time.monotonic() - began}
    finally:
        engine.close()
    try:
        engine.step() if rank == 0 else engine.step_peer()
    except TpRuntimeError as error:
        seen["later"] = str(error)
    return seen


@pytest.mark.parametrize(
    ("where", "tp_size", "victim"),
    [
        ("prefill", 2, 1),
        ("decode", 3, 2),
        *(
            pytest.param(where, tp_size, victim, marks=pytest.mark.long)
            for tp_size, victim in ((2, 0), (2, 1), (3, 2), (3, 1), (3, 0))
            for where in ("join", "capture", "prefill", "decode")
        ),
    ],
)
def test_a_killed_rank_is_named_by_every_survivor(where: str, tp_size: int, victim: int) -> None:
    results = run_ranks(die, tp_size, 60, args=(where, victim), expect_exit={victim: -9})
    for rank, seen in enumerate(results):
        if rank != victim:
            assert seen["lost"] == victim, seen
            assert f"rank {victim}" in seen["message"]
            assert seen["later"]


def differing(field: str) -> str:
    """On each rank: another setting on rank 1."""
    from tp_runtime import Engine, RankInfo, RuntimeConfig
    from tp_runtime.errors import TpRuntimeError

    settings: dict[str, Any] = {"model": "random:tiny", "device": "cpu", "max_batch_size": 2}
    if RankInfo.from_env().tp_rank == 1:
        settings[field] = {"max_batch_size": 3, "kv_block_size": 32}[field]
    engine = Engine(RuntimeConfig(**settings))
    try:
        engine.start()
    except TpRuntimeError as error:
        return str(error)
    finally:
        engine.close()
    return "no error"


@pytest.mark.parametrize(
    "field", ["max_batch_size", pytest.param("kv_block_size", marks=pytest.mark.long)]
)
def test_ranks_with_different_settings_refuse_naming_the_field(field: str) -> None:
    messages = run_ranks(differing, 2, 60, args=(field,))
    assert f"rank 1: field {field}: expected" in messages[0]
    assert f"field {field}: expected" in messages[1]


def stop_in_decode() -> dict[str, Any]:
    """On each rank: rank 1 is stopped, as by a debugger or a frozen container."""
    from tp_runtime import Engine, RankInfo, RuntimeConfig, SamplingParams
    from tp_runtime.errors import DeadlineExceeded
    from tp_runtime.step_plan import StepKind

    if RankInfo.from_env().tp_rank == 1:
        stop = functools.partial(os.kill, os.getpid(), signal.SIGSTOP)
        strike_before(StepKind.DECODE, stop, after_step=10)
    config = RuntimeConfig(
        model="random:tiny", device="cpu", max_batch_size=1, broadcast_timeout_s=2.0
    )
    engine = Engine(config)
    engine.start()
    if engine.rank > 0:
        engine.serve_peer()
    began = time.monotonic()
    try:
        for _ in engine.generate([[1, 2, 3]], SamplingParams(max_tokens=200, ignore_eos=True)):
            began = time.monotonic()
    except DeadlineExceeded as error:
        seconds = time.monotonic() - began
        os.kill(engine._connection.channel.pids[1], signal.SIGKILL)
        engine.close()
        return {"rank": error.rank, "seconds": seconds, "message": str(error)}
    raise AssertionError("nobody noticed")


def test_a_stopped_rank_is_late_after_the_broadcast_timeout() -> None:
    seen = run_ranks(stop_in_decode, 2, 60, expect_exit={1: -9})[0]
    assert seen["rank"] == 1
    assert 1.5 < seen["seconds"] < 20, seen
    assert "rank 1" in seen["message"]


def without_memory_on_rank_1() -> dict[str, Any]:
    """Two requests where rank 1 could not capture the graphs of their bucket. On each rank."""
    from tp_runtime import Engine, RankInfo, RuntimeConfig, SamplingParams
    from tp_runtime.step_runner import SAMPLERS, StepRunner

    if RankInfo.from_env().tp_rank == 1:
        lost = {(2, graph): "no memory to capture it" for graph in range(SAMPLERS)}
        StepRunner.dropped = property(lambda self: lost)  # type: ignore[assignment]
    config = RuntimeConfig(
        model="random:tiny", device="cpu", max_batch_size=2, decode_buckets=(1, 2)
    )
    with Engine(config) as engine:
        if engine.rank > 0:
            engine.serve_peer()
        else:
            sampling = SamplingParams(max_tokens=8, ignore_eos=True)
            for _ in engine.generate([[1, 2, 3], [4, 5]], sampling):
                pass
        statistics = engine.statistics()
        return {
            "capture": engine.capture_digest,
            "graph_steps": statistics.runner.graph_steps,
            "eager_steps": statistics.runner.eager_decode_steps,
            "misses": statistics.graph_misses,
        }


def test_all_ranks_go_without_a_graph_that_one_of_them_lacks() -> None:
    root, peer = run_ranks(without_memory_on_rank_1, 2, 60)
    assert root["capture"] == peer["capture"]
    assert root["eager_steps"] == peer["eager_steps"] > 0
    assert root["graph_steps"] == peer["graph_steps"] == 0
    assert list(root["misses"]) == ["bucket 2 variant 0: rank 1 had no memory to capture it"]

"""Steady decode on a GPU: no waiting for the device, no allocation, the bits of the plain loop."""

from __future__ import annotations

import collections
import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.ranks.test_engine_ranks import replay
from tests.shrunk import VOCAB, shrunk_model
from tp_runtime import Engine, RuntimeConfig, SamplingParams, TpGroup
from tp_runtime.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

WAITS = {
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
}
SAMPLINGS = (
    SamplingParams(max_tokens=3000, ignore_eos=True),
    SamplingParams(max_tokens=3000, ignore_eos=True, temperature=0.8, seed=3),
    SamplingParams(max_tokens=3000, ignore_eos=True, temperature=0.8, top_k=40, top_p=0.9, seed=4),
)


@pytest.fixture(params=[None, "flashinfer_fa2_tc"], ids=["default", "planned"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """With a backend that reads lengths on the device, and with one that plans on the host."""
    device = torch.device("cuda", 0)
    group = TpGroup.single(device)
    model = shrunk_model("llama-3-8b", group=group, dtype=torch.bfloat16)
    config = RuntimeConfig(
        max_batch_size=8,
        max_seq_len=4096,
        kv_cache_tokens=8 * 4096,
        decode_buckets=(4, 8),
        decode_backend=request.param,
    )
    with Engine(config, group=group, model=model) as engine:
        yield engine


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """What makes the host wait for the device raises in here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def fill(engine: Engine, rows: int) -> None:
    """Requests of three kinds in steady decode."""
    waiting = set()
    for row in range(rows):
        prompt = [(7 * row + i) % VOCAB for i in range(20 + 30 * row)]
        waiting.add(engine.add_request(prompt, SAMPLINGS[row % 3]))
    while waiting:
        waiting -= {output.request_id for output in engine.step()}
    for _ in range(30):
        engine.step()


def test_a_thousand_steps_wait_for_nothing_and_allocate_nothing(engine: Engine) -> None:
    fill(engine, 6)
    before = torch.cuda.memory_stats()
    with no_waiting():
        # an output comes with the step after the one that drew it, or with the next
        tokens = sum(len(engine.step()) for _ in range(1000))
    assert 6 * 998 <= tokens <= 6 * 1002
    after = torch.cuda.memory_stats()
    for name in ("num_device_alloc", "num_device_free", "allocated_bytes.all.current"):
        assert after[name] == before[name], name


def test_the_thread_that_drives_the_steps_makes_no_blocking_call(engine: Engine) -> None:
    from torch.profiler import ProfilerActivity, profile

    fill(engine, 6)
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True
    ) as profiler:
        for _ in range(50):
            engine.step()
    calls: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for event in profiler.events():
        calls[event.thread][event.name] += 1
    driver = max(calls.values(), key=lambda names: names["cudaGraphLaunch"])
    assert driver["cudaGraphLaunch"] == 50
    # the profiler itself waits for the device once, when it ends
    found = {name: driver[name] for name in WAITS if driver[name]}
    found.pop("cudaDeviceSynchronize", None)
    assert not found


def test_prompts_that_join_wait_for_nothing(engine: Engine) -> None:
    fill(engine, 4)
    with no_waiting():
        engine.add_request(list(range(300)), SAMPLINGS[1])
        engine.add_request(list(range(40)), SAMPLINGS[2])
        seen: set[str] = set()
        for _ in range(40):
            seen |= {output.request_id for output in engine.step()}
    assert len(seen) == 6


def greedy(engine: Engine, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    final: dict[str, list[int]] = {}
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for output in engine.generate(prompts, sampling):
        if output.finished:
            final[output.request_id] = list(output.token_ids)
    return [final[str(i)] for i in range(len(prompts))]


def test_replay_is_eager_bit_for_bit_over_page_and_bucket_borders() -> None:
    """The same backend from graphs of one bucket that is just large enough, and eagerly."""
    device = torch.device("cuda", 0)
    group = TpGroup.single(device)
    model = shrunk_model("llama-3-8b", group=group, dtype=torch.bfloat16)
    prompts = [[(3 * i + j) % VOCAB for j in range(60 + i)] for i in range(4)]
    streams = []
    for buckets in ((4,), (1,)):  # a batch of four is beyond the bucket of one: eager
        config = RuntimeConfig(
            max_batch_size=4,
            max_seq_len=512,
            decode_buckets=buckets,
            decode_backend="triton_splitkv",
        )
        with Engine(config, group=group, model=model) as engine:
            streams.append(greedy(engine, prompts, 150))
            runner = engine.statistics().runner
            ran = runner.graph_steps if buckets == (4,) else runner.eager_decode_steps
            assert ran > 100
    assert streams[0] == streams[1]


def test_replayed_plans_give_the_same_bits() -> None:
    result: dict[str, Any] = run_ranks(replay, 1, 300, args=("cuda", 500))[0]
    assert sum(result["reasons"]) == 500
    assert result["free"] == result["total"]

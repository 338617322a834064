"""The engine on a GPU gives the tokens of the engine on a CPU, from captured graphs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.gpu_group import break_device
from tests.strikes import strike_before
from tp_runtime.testing import run_ranks

pytestmark = pytest.mark.gpu

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6] * 30, [5], [3, 5, 8, 9, 7, 9] * 11]


def decode(device: str) -> dict[str, Any]:
    """On each rank: greedy and seeded random tokens in float32."""
    from tp_runtime import Engine, RuntimeConfig, SamplingParams

    config = RuntimeConfig(
        model="random:tiny",
        device=device,
        dtype="float32",
        max_batch_size=4,
        prefill_chunk_tokens=64,
        kv_cache_tokens=4096,
    )
    with Engine(config) as engine:
        if engine.rank > 0:
            engine.serve_peer()
            return {"capture": engine.capture_digest}
        streams = []
        for sampling in (
            SamplingParams(max_tokens=48, ignore_eos=True),
            SamplingParams(max_tokens=48, ignore_eos=True, temperature=0.8, seed=7),
            SamplingParams(max_tokens=48, ignore_eos=True, temperature=0.8, top_k=20, seed=7),
        ):
            final = {
                output.request_id: list(output.token_ids)
                for output in engine.generate(PROMPTS, sampling)
                if output.finished
            }
            streams.append([final[str(i)] for i in range(len(PROMPTS))])
        runner = engine.statistics().runner
        return {
            "streams": streams,
            "graph_steps": runner.graph_steps,
            "capture": engine.capture_digest,
        }


def decode_on_the_second_gpu() -> bool:
    """Whether that has made a context on the first one."""
    import torch

    from tp_runtime import Engine, RuntimeConfig, SamplingParams, TpGroup

    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    with TpGroup.single(device) as group:
        config = RuntimeConfig(model="random:tiny", max_batch_size=2, kv_cache_tokens=1024)
        with Engine(config, group=group) as engine:
            tokens = list(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8)))
    assert tokens
    return bool(torch._C._cuda_hasPrimaryContext(0))  # type: ignore[attr-defined]


def decode_until_a_fault(folder: str) -> None:
    from tp_runtime import Engine, RuntimeConfig, SamplingParams
    from tp_runtime.step_plan import StepKind

    struck_s = 0.0

    def strike() -> None:
        nonlocal struck_s
        struck_s = struck_s or time.monotonic()
        break_device()

    strike_before(StepKind.DECODE, strike, after_step=20)
    engine = Engine(RuntimeConfig(model="random:tiny", device="cuda", max_batch_size=2))
    engine.start()
    try:
        for _ in engine.generate([[1, 2, 3]], SamplingParams(max_tokens=400, ignore_eos=True)):
            pass
    except RuntimeError as error:
        assert time.monotonic() - struck_s < 5
        engine.close()
        Path(folder, "told").write_text(str(error))
    # torch may abort a process whose device is at fault when that ends, which is not ours
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_fault_of_the_device_ends_a_single_rank(tmp_path: Path) -> None:
    run_ranks(decode_until_a_fault, 1, 100, args=(str(tmp_path),), expect_exit={0: -9})
    assert "CUDA" in (tmp_path / "told").read_text()


def test_an_engine_takes_no_memory_of_another_gpu() -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    assert run_ranks(decode_on_the_second_gpu, 1, 100) == [False]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_tokens_of_the_cpu(tp_size: int) -> None:
    import torch

    if torch.cuda.device_count() < tp_size:
        pytest.skip(f"needs {tp_size} GPUs")
    expected = run_ranks(decode, 1, 200, args=("cpu",))[0]
    results = run_ranks(decode, tp_size, 300, args=("cuda",))
    got = results[0]
    assert got["graph_steps"] == expected["graph_steps"] > 0
    same = sum(
        a == b
        for mine, theirs in zip(got["streams"], expected["streams"], strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )
    # logits of random weights are close to each other, so a near tie may flip now and then
    assert same >= 10, f"{same} of 12 streams are equal"
    assert {result["capture"] for result in results} == {got["capture"]}

"""Two ranks on GPUs: the tokens of one, and the end of a rank whose peer fails in decode.

Each rank has its own GPU where there are two. On one GPU they share it (`gpu_group`): then there is
no NCCL, and what is about NCCL alone is skipped.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.gpu_group import break_device, open_group, too_few_gpus
from tests.restarts import serve_again
from tests.shrunk import VOCAB, save_shrunk
from tests.strikes import strike_before
from tests.tokens import Reference, count_ties
from tp_runtime.group import TpGroup
from tp_runtime.ranks import RankInfo
from tp_runtime.testing import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
two_gpus = pytest.mark.skipif(too_few_gpus(2), reason="needs two GPUs")

PROMPTS, TOKENS = 64, 32


def cases(device: str) -> list[tuple[bool, bool, str]]:
    """(async_decode, enable_dynamic_decode_backend, all_reduce)."""
    ways = ("auto",) if device == "cuda" and too_few_gpus(2) else ("nccl", "auto")
    return list(itertools.product((True, False), (True, False), ways))


def prompts() -> list[list[int]]:
    rng = random.Random(6)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 100))] for _ in range(PROMPTS)]


def make_group(device: str) -> TpGroup:
    if device == "cpu":
        return TpGroup.create(RankInfo.from_env(), device=torch.device(device), timeout_s=60)
    return open_group()


def decode(folder: str, device: str) -> list[dict[str, Any]]:
    """On each rank: the greedy streams of every case, and what they ran through."""
    from tp_runtime import Engine, RuntimeConfig, SamplingParams
    from tp_runtime.models import load_model

    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    results = []
    with make_group(device) as group:
        model = load_model(folder, group=group, dtype=torch.float32).model
        for in_flight, dynamic, all_reduce in cases(device):
            config = RuntimeConfig(
                max_batch_size=16,
                max_seq_len=256,
                decode_buckets=(4, 16),
                kv_cache_tokens=16 * 256,
                async_decode=in_flight,
                enable_dynamic_decode_backend=dynamic,
                all_reduce=all_reduce,
            )
            peer_sums = group.statistics().peer
            with Engine(config, group=group, model=model) as engine:
                streams = {}
                if engine.rank > 0:
                    engine.serve_peer()
                else:
                    for output in engine.generate(prompts(), sampling):
                        if output.finished:
                            streams[output.request_id] = list(output.token_ids)
                results.append(
                    {
                        "streams": [streams[str(i)] for i in range(len(streams))],
                        "capture": engine.capture_digest,
                        "graph_steps": engine.statistics().runner.graph_steps,
                        "peer_sums": group.statistics().peer - peer_sums,
                    }
                )
    return results


def references(folder: Path, streams: list[list[int]], device: str) -> list[Reference]:
    """What transformers would draw after each token of the streams, and how narrowly."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, local_files_only=True
    ).to(device)
    made = []
    for prompt, stream in zip(prompts(), streams, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt + stream], device=device)
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2, -1)
        made.append(
            Reference(
                prompt_token_ids=prompt,
                token_ids=best.indices[:, 0].tolist(),
                margins=(best.values[:, 0] - best.values[:, 1]).tolist(),
            )
        )
    return made


def check_tokens(folder: Path, device: str) -> None:
    save_shrunk("llama-3-8b", folder)
    env = {"XDG_CACHE_HOME": str(folder)}
    alone = run_ranks(decode, 1, 300, args=(str(folder), device), env=env)[0]
    both = run_ranks(decode, 2, 400, args=(str(folder), device), env=env)
    greedy = alone[0]["streams"]
    expected = references(folder, greedy, device)
    for case, one, two, peer in zip(cases(device), alone, *both, strict=True):
        ties = [count_ties(run["streams"], expected) for run in (one, two)]
        print(case, "ties", ties, "peer sums", two["peer_sums"])
        assert two["capture"] == peer["capture"]
        assert min(one["graph_steps"], two["graph_steps"]) > 0
        assert one["peer_sums"] == 0
        assert (two["peer_sums"] > 0) == (case[2] == "auto" and device == "cuda")


def test_greedy_tokens_are_those_of_one_rank(tmp_path: Path) -> None:
    check_tokens(tmp_path, "cuda")


def fail_in_decode(
    how: str, victim: int, all_reduce: str, folder: str, device: str
) -> dict[str, Any] | None:
    """On each rank: the victim is killed, stopped or breaks its device; the other says when."""
    from tp_runtime import Engine, RuntimeConfig, SamplingParams
    from tp_runtime.errors import TpRuntimeError
    from tp_runtime.step_plan import StepKind

    rank = RankInfo.from_env().tp_rank
    moment = Path(folder, "moment")
    if rank == victim:

        def fail() -> None:
            if moment.exists():
                return
            moment.write_text(str(time.monotonic()))
            if how == "fault":
                break_device()
            else:
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

        strike_before(StepKind.DECODE, fail, after_step=20)
    config = RuntimeConfig(
        model="random:tiny",
        device=device,
        max_batch_size=2,
        kv_cache_tokens=1024,
        all_reduce=all_reduce,
        broadcast_timeout_s=2.0,
    )
    # an engine makes its own group, except where two ranks have to share a GPU
    group = open_group() if device == "cuda" and too_few_gpus(2) else None
    engine = Engine(config, group=group)
    engine.start()
    pids = engine._connection.channel.pids
    try:
        if rank > 0:
            engine.serve_peer()
        else:
            for _ in engine.generate([[1, 2, 3]], SamplingParams(max_tokens=400, ignore_eos=True)):
                pass
        raise AssertionError("nobody noticed")
    except (TpRuntimeError, RuntimeError) as error:
        seen_s = time.monotonic() - float(moment.read_text())
        seen = {"kind": type(error).__name__, "rank": getattr(error, "rank", None)}
        message = str(error)
    if how == "stop":
        os.kill(pids[victim], signal.SIGKILL)
    engine.close()
    if group is not None:
        group.close()
    closed_s = time.monotonic() - float(moment.read_text())
    if rank == victim:
        # torch may abort a process whose device is at fault when that ends, which is not ours
        Path(folder, "told").write_text(message)
        os.kill(os.getpid(), signal.SIGKILL)
    return seen | {"seen_s": seen_s, "closed_s": closed_s, "message": message}


def check_survivor(how: str, victim: int, all_reduce: str, folder: Path, device: str) -> None:
    results = run_ranks(
        fail_in_decode,
        2,
        60,
        args=(how, victim, all_reduce, str(folder), device),
        expect_exit={victim: -signal.SIGKILL},
    )
    survivor = results[1 - victim]
    print(how, victim, all_reduce, results)
    assert survivor["seen_s"] < 5
    assert f"rank {victim}" in survivor["message"]
    if how == "kill":
        assert (survivor["kind"], survivor["rank"]) == ("PeerLost", victim)
    elif how == "fault":
        assert "CUDA" in survivor["message"]
        assert "CUDA" in (folder / "told").read_text()


@two_gpus
def test_torchrun_starts_all_ranks_again(tmp_path: Path) -> None:
    document = serve_again(tmp_path, "cuda")
    assert len(document["outputs"][0]["token_ids"]) == 40


@pytest.mark.parametrize("all_reduce", [pytest.param("nccl", marks=two_gpus), "auto"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", ["kill", "stop", "fault"])
def test_a_rank_whose_peer_fails_ends(
    how: str, victim: int, all_reduce: str, tmp_path: Path
) -> None:
    check_survivor(how, victim, all_reduce, tmp_path, "cuda")

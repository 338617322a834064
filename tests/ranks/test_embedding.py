"""The ways in for a host program: its own loop, process group, cache and model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tp_runtime.testing import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    """The module of an example file."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def host_loop() -> Any:
    return example("host_loop").run()


def transformers_model() -> list[list[int]]:
    """On each rank: tokens of the example, and transformers' own for the same prompt."""
    import torch

    module = example("transformers_model")
    tokens = module.run()
    model = module.tiny_llama()
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([[5, 17, 42]]),
            attention_mask=torch.ones(1, 3, dtype=torch.int64),
            max_new_tokens=20,
            do_sample=False,
            pad_token_id=0,
        )
    return [tokens, [int(token) for token in out[0, 3:]]]


@pytest.mark.long
def test_a_host_loop_with_its_own_group_cache_and_step_function() -> None:
    one = run_ranks(host_loop, 1, 120)[0]
    ranks = run_ranks(host_loop, 2, 120)
    assert [len(stream) for stream in one["streams"]] == [40, 40, 40]
    assert len({token for stream in one["streams"] for token in stream}) > 3
    for rank in ranks:
        assert rank["streams"] == one["streams"], "two ranks decode what one does"
    for digest in ("plan_digest", "capture_digest"):
        assert ranks[0][digest] == ranks[1][digest]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_a_model_of_a_framework_and_a_loop_of_the_host() -> None:
    tokens, expected = run_ranks(transformers_model, 2, 120)[0]
    assert len(expected) == 20
    assert len(set(expected)) > 5
    assert tokens == expected

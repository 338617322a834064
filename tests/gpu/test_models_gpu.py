"""Models on a GPU in bfloat16 against transformers in float32, prompt and decode alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.shrunk import VOCAB, save_shrunk
from tp_runtime import Engine, RuntimeConfig, SamplingParams, TpGroup
from tp_runtime.models.loading import load_model

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

TOKENS = 40


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-8b", "qwen2.5-7b"])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    device = torch.device("cuda", 0)
    save_shrunk(name, tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path), dtype=torch.float32, local_files_only=True
    )
    group = TpGroup.single(device)
    model = load_model(str(tmp_path), group=group, dtype=torch.bfloat16).model
    seen: list[Tensor] = []
    plain = model.logits

    def kept(hidden: Tensor) -> Tensor:
        logits = plain(hidden)
        seen.append(logits.float().cpu())
        return logits

    # two requests beyond a bucket of one: every decode step is eager, and its logits can be kept
    settings = RuntimeConfig(max_batch_size=2, max_seq_len=256, decode_buckets=(1,))
    prompts = [[(5 * i + 3 * j) % VOCAB for j in range(30)] for i in range(2)]
    final: dict[str, list[int]] = {}
    with Engine(settings, group=group, model=model) as engine:
        model.logits = kept  # type: ignore[method-assign]
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        for output in engine.generate(prompts, sampling):
            final[output.request_id] = list(output.token_ids)
    with torch.inference_mode():
        expected = [
            reference(torch.tensor([prompt + final[str(i)]])).logits[0, len(prompt) - 1 : -1]
            for i, prompt in enumerate(prompts)
        ]
    # the first step samples both prompts, each step after it one token of both
    assert len(seen) == TOKENS
    for step, logits in enumerate(seen):
        for row in range(2):
            wanted = expected[row][step]
            error = torch.linalg.vector_norm(logits[row] - wanted)
            assert float(error / torch.linalg.vector_norm(wanted)) < 0.03, (step, row)

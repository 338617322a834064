"""Writes smollm2_greedy.json: what transformers answers, greedily, in float32.

    python tests/golden/make_smollm2.py

Beside each token stands the margin of the step: the difference of the two best logits. Streams of
a correct engine may part from these only where the margin is below the rounding of float32.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tp_runtime.models.convert import convert_gguf
from tp_runtime.models.loading import find_smollm2

TOKENS = 64
GOLDEN = Path(__file__).parent / "smollm2_greedy.json"
QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Explain what a tensor is in one sentence.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "How many legs does a spider have?",
    "Give me a recipe for pancakes.",
)
TEXTS = (
    "Once upon a time",
    "The three laws of motion are",
    "def fibonacci(n):",
    "In 1969, the first",
    "A",
    "Der schnelle braune Fuchs",
    "1, 1, 2, 3, 5, 8,",
    "The lighthouse keeper climbed the stairs. " * 12,
)


def greedy(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """64 tokens, going on after an EOS, and the margin of each."""
    import torch

    tokens: list[int] = []
    margins: list[float] = []
    feed, cache = torch.tensor([prompt]), None
    for _ in range(TOKENS):
        out = model(input_ids=feed, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        best = out.logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(round(float(best.values[0] - best.values[1]), 6))
        feed = torch.tensor([[tokens[-1]]])
    return tokens, margins


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = find_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    with tempfile.TemporaryDirectory() as parent:
        folder = convert_gguf(source, Path(parent) / "smollm2")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    streams = []
    with torch.inference_mode():
        for text in (*QUESTIONS, *TEXTS):
            if text in QUESTIONS:
                chat = [{"role": "user", "content": text}]
                prompt = tokenizer.apply_chat_template(
                    chat, add_generation_prompt=True, return_dict=True
                )["input_ids"]
            else:
                prompt = tokenizer(text)["input_ids"]
            tokens, margins = greedy(model, list(prompt))
            streams.append(
                {
                    "prompt": text,
                    "prompt_token_ids": prompt,
                    "token_ids": tokens,
                    "margins": margins,
                }
            )
    lines = ",\n".join(json.dumps(stream) for stream in streams)
    GOLDEN.write_text(f'{{"model": "smollm2", "dtype": "float32", "streams": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()

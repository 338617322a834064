"""Decode steps of Llama-3-8B's shape on a GPU: `tp-runtime bench decode` beside transformers.

    python benchmarks/gpu_decode.py [--batch 1 --batch 8 --batch 32] [--steps 200] [--json FILE]
        [--no-transformers] [-- MORE FLAGS OF BENCH DECODE]

The weights are random, in bfloat16, with 1024 tokens in the cache. Ours runs as `bench decode`,
with the dynamic selection. transformers runs `generate` with a static cache, which it compiles and
replays from CUDA graphs, on the same shape; its step is the time that more new tokens take, so that
prefill and start are left out. Both run in processes of their own, one after the other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODEL = "llama-3-8b"
CONTEXT_TOKENS = 1024
RESULTS = Path(__file__).parent / "results"
_RIVAL_TOKENS = (16, 64)  # a short and a long answer; the step is the difference
_TIME_LIMIT_S = 900


def ours(batches: list[int], steps: int, more: list[str]) -> dict[str, Any]:
    """`bench decode` in a process of its own: what it wrote as JSON; its table is printed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.json"
        command = [
            *(sys.executable, "-m", "tp_runtime.launch", "bench", "decode"),
            *("--model", f"random:{MODEL}", "--context", str(CONTEXT_TOKENS)),
            *("--steps", str(steps), "--json", str(file), *more),
        ]
        for batch in batches:
            command += ["--batch", str(batch)]
        subprocess.run(command, check=True, timeout=_TIME_LIMIT_S)
        result: dict[str, Any] = json.loads(file.read_text())
    return result


def transformers_step(batch: int) -> dict[str, Any]:
    """A step of transformers' generate, in microseconds, and how long it took to get there."""
    import torch
    import transformers

    from tp_runtime.models.config import named_config
    from tp_runtime.models.convert import huggingface_config

    fields = huggingface_config(named_config(MODEL))
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    length = CONTEXT_TOKENS - _RIVAL_TOKENS[1] // 2
    prompt = torch.randint(0, config.vocab_size, (batch, length), device="cuda")
    mask = torch.ones_like(prompt)

    def run(tokens: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        model.generate(
            prompt,
            attention_mask=mask,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=True,
            top_k=0,
            temperature=0.8,
            cache_implementation="static",
            pad_token_id=0,
        )
        torch.cuda.synchronize()
        return time.perf_counter() - started

    started = time.perf_counter()
    # the cache is as long as the longest answer: the longer one first, so that it is kept
    run(_RIVAL_TOKENS[1])
    run(_RIVAL_TOKENS[1])
    warm_s = time.perf_counter() - started
    short_s, long_s = (min(run(tokens) for _ in range(2)) for tokens in _RIVAL_TOKENS)
    return {
        "batch": batch,
        "step_us": (long_s - short_s) / (_RIVAL_TOKENS[1] - _RIVAL_TOKENS[0]) * 1e6,
        "warm_up_s": warm_s,
        "transformers": transformers.__version__,
    }


def rival(batch: int) -> dict[str, Any]:
    """`transformers_step` in a process of its own: what it compiles for one batch is for that one
    alone, as compiled code takes a second size for a reason to be general, and slower."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rival.json"
        command = [sys.executable, __file__, "--rival-only", str(batch), "--json", str(file)]
        subprocess.run(command, check=True, timeout=_TIME_LIMIT_S)
        cell: dict[str, Any] = json.loads(file.read_text())
    print(
        f"transformers {cell['transformers']}, batch {batch}: {cell['step_us'] / 1e3:.2f} ms "
        f"(warm-up {cell['warm_up_s']:.0f} s)"
    )
    return cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu_decode.json")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--rival-only", type=int, metavar="BATCH", help=argparse.SUPPRESS)
    parser.add_argument("more", nargs="*", help="flags of bench decode, after --")
    args = parser.parse_args()
    if args.rival_only:
        args.json.write_text(json.dumps(transformers_step(args.rival_only)))
        return
    batches = args.batch or [1, 8, 32]
    result = ours(batches, args.steps, args.more or ["--enable-dynamic-decode-backend"])
    result["transformers"] = []
    args.json.write_text(json.dumps(result, indent=2) + "\n")
    for batch in [] if args.no_transformers else batches:
        result["transformers"].append(rival(batch))
        args.json.write_text(json.dumps(result, indent=2) + "\n")  # kept if the next one fails
    print(f"written to {args.json}")


if __name__ == "__main__":
    main()

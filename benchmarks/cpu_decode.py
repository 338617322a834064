"""Decode speed on a CPU: this runtime against transformers, on the same weights and threads.

    python benchmarks/cpu_decode.py [--rounds 3] [--tokens 64] [--json FILE]

One request of SmolLM2-135M in float32: transformers' generate on one core, ours at TP 1 on the
same core, and ours at TP 2 on two cores, one after the other, repeated, in fresh processes; the
medians over the rounds are compared. Ours selects its decode backend by measuring. The rate is
that of decoding: the first token and all before it are left out on every side. Then, at TP 2 with
16 running requests, the host's time of a step outside the model.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tp_runtime.testing import run_ranks

MODEL = "smollm2"
QUESTION = "Write a short story about a lighthouse."
RESULTS = Path(__file__).parent / "results"


def ours(pin: bool, tokens: int) -> dict[str, float]:
    """Decode rate of one request on every rank's own core. Runs on each rank."""
    from tp_runtime import Engine, RuntimeConfig, SamplingParams

    _pin(pin)
    config = RuntimeConfig(
        model=MODEL,
        max_batch_size=1,
        max_seq_len=512,
        device="cpu",
        enable_dynamic_decode_backend=True,
        plan_cache=False,
    )
    with Engine(config) as engine:
        if engine.rank > 0:
            engine.serve_peer()
            return {}
        prompt = engine.tokenizer.chat(QUESTION)
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        stamps = [time.perf_counter() for _ in engine.generate([prompt], sampling)]
        return {"tokens_per_s": (len(stamps) - 1) / (stamps[-1] - stamps[0])}


def ours_host_time(requests: int, tokens: int) -> dict[str, Any]:
    """Host time per step outside the model with many running requests. Runs on each rank."""
    from tp_runtime import Engine, RuntimeConfig, SamplingParams

    config = RuntimeConfig(
        model=MODEL,
        max_batch_size=requests,
        max_seq_len=512,
        device="cpu",
        decode_buckets=(requests,),
    )
    with Engine(config) as engine:
        if engine.rank > 0:
            engine.serve_peer()
        else:
            prompts = [engine.tokenizer.chat(f"{QUESTION} Number {i}.") for i in range(requests)]
            sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
            for _ in engine.generate(prompts, sampling):
                pass
        times = engine.statistics().times
        return {"outside_model_us": times.outside_model_us, "phase_us": times.phase_us}


def transformers_rate(folder: str, tokens: int) -> dict[str, float]:
    """Decode rate of transformers' generate on the same weights, on one core."""
    _pin(True)
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    from tp_runtime.models.loading import find_smollm2
    from tp_runtime.models.tokenizer import load_tokenizer

    torch.set_num_threads(1)

    class Stamps(BaseStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = load_tokenizer(find_smollm2()).chat(QUESTION)
    stamps = Stamps()
    with torch.inference_mode():
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            streamer=stamps,
        )
    times = stamps.times[1:]  # the first call of put brings the prompt
    return {"tokens_per_s": (len(times) - 1) / (times[-1] - times[0])}


def _pin(pin: bool) -> None:
    if pin:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def _measure(rounds: int, tokens: int, folder: str) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {"transformers": [], "tp1": [], "tp2": []}
    for turn in range(rounds):
        for name in list(rates) if turn % 2 == 0 else list(reversed(rates)):
            if name == "transformers":
                result = run_ranks(transformers_rate, 1, 600, args=(folder, tokens))[0]
            elif name == "tp1":
                result = run_ranks(ours, 1, 600, args=(True, tokens))[0]
            else:
                result = run_ranks(ours, 2, 600, args=(False, tokens))[0]
            rates[name].append(result["tokens_per_s"])
            print(f"round {turn + 1}: {name:13s} {rates[name][-1]:7.2f} tokens/s", flush=True)
    return rates


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "numpy", "msgpack")
    return {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in names
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, default=RESULTS / "cpu_decode.json")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        raise SystemExit(f"this benchmark needs 2 cores, this process may use {cores}")

    from tp_runtime.models.convert import convert_gguf
    from tp_runtime.models.loading import find_smollm2

    with tempfile.TemporaryDirectory() as parent:
        folder = convert_gguf(find_smollm2(), Path(parent) / "smollm2")
        rates = _measure(args.rounds, args.tokens, str(folder))
    host = run_ranks(ours_host_time, 2, 600, args=(16, args.tokens))
    median = {name: statistics.median(values) for name, values in rates.items()}
    report = {
        "what": "SmolLM2-135M-Instruct, float32, one request, decode tokens/s; median of rounds",
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu(),
        "cores": cores,
        "versions": _versions(),
        "tokens": args.tokens,
        "rounds": rates,
        "tokens_per_s": median,
        "tp1_over_transformers": median["tp1"] / median["transformers"],
        "tp2_over_tp1": median["tp2"] / median["tp1"],
        "host_us_per_step_at_16_requests": {"rank0": host[0], "rank1": host[1]},
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{'':24s}{'tokens/s':>9s}")
    print(f"{'transformers, 1 core':24s}{median['transformers']:9.2f}")
    print(f"{'ours TP 1, 1 core':24s}{median['tp1']:9.2f}")
    print(f"{'ours TP 2, 2 cores':24s}{median['tp2']:9.2f}")
    print(f"ours TP 1 / transformers  {report['tp1_over_transformers']:.2f}  (goal: at least 1.5)")
    print(f"ours TP 2 / ours TP 1     {report['tp2_over_tp1']:.2f}  (goal: above 1)")
    print(
        f"host time of a step outside the model, 16 requests: "
        f"{host[0]['outside_model_us']:.0f} us on rank 0, {host[1]['outside_model_us']:.0f} us on "
        "rank 1  (goal: below 400)"
    )
    print(f"written to {args.json}")


def _cpu() -> str:
    import torch

    from tp_runtime.selection.base import DeviceInfo

    return DeviceInfo.of(torch.device("cpu")).name


if __name__ == "__main__":
    main()

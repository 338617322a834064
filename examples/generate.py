"""The whole engine in a program of your own; text streams as it comes.

torchrun --standalone --nproc-per-node 2 examples/generate.py
"""

from __future__ import annotations

from tp_runtime import Engine, RuntimeConfig, SamplingParams


def main() -> None:
    config = RuntimeConfig(model="smollm2", max_batch_size=4, max_seq_len=512)
    with Engine(config) as engine:
        if engine.rank > 0:
            engine.serve_peer()  # until rank 0 leaves its `with`
            return
        prompt = engine.tokenizer.chat("Name the four seasons.")
        for output in engine.generate([prompt], SamplingParams(max_tokens=48)):
            print(output.new_text, end="", flush=True)
        print(f"\n[{output.finish_reason}, {len(output.token_ids)} tokens]")


if __name__ == "__main__":
    main()

"""What each selection rule loses on recorded measurements of an H200, as in docs/benchmarks.md.

    python benchmarks/selection_rules.py

Regret is the time of the rule's choice over the time of the best of four kernels in that batch:
geometric mean / 95th percentile / maximum over 48 equal-length and 41 ragged batches. Needs no GPU.
"""

from __future__ import annotations

from pathlib import Path

from tp_runtime.selection.regret import load_cells, table

DATA = Path(__file__).parents[1] / "tests" / "data"
KERNELS = ("flashinfer_xqa", "flashinfer_fa2_tc", "cudnn", "flashinfer_cuda_core")


def main() -> None:
    equal, mixed = (
        load_cells(DATA / name, backends=KERNELS, q_heads=32, kv_heads=8)
        for name in ("h200_decode_attention.json", "h200_decode_attention_ragged.json")
    )
    rows = table(equal, mixed)
    width = max(len(rule) for rule, _, _ in rows)
    print(f"{'rule':{width}}  {'equal lengths':>20}  {'ragged batches':>20}")
    for rule, on_equal, on_ragged in rows:
        print(f"{rule:{width}}  {on_equal!s:>20}  {on_ragged!s:>20}")


if __name__ == "__main__":
    main()

"""Products of few rows with the matrices of Llama-3-8B: cuBLAS, our kernels, and the floor.

    python benchmarks/skinny_linear.py [--output benchmarks/results/skinny_linear.json]

The floor is the bytes of the weight over the bandwidth of a large copy, measured here (a kernel
that only reads can be a little faster than it). Then the products of all 32 layers in one CUDA
graph, with a small kernel in the place of attention: as torch runs them, and as `choose_layer`
chooses. Needs an NVIDIA GPU that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from tp_runtime.ops.skinny_config import SkinnyOp
from tp_runtime.ops.skinny_layer import PRODUCTS, LayerChain, LayerConfigs, LayerMatrices
from tp_runtime.ops.skinny_layer import choose_layer as choose
from tp_runtime.ops.skinny_measure import SkinnyShape, best, measure

if TYPE_CHECKING:
    from collections.abc import Sequence

HIDDEN = 4096
ROWS = (1, 2, 4, 8, 16, 32)
LAYERS = 32
# name: operation, n, k of one rank
SHAPES = {
    "qkv": (SkinnyOp.NORM_LINEAR, 6144, HIDDEN),
    "output": (SkinnyOp.LINEAR_RESIDUAL, HIDDEN, 4096),
    "gate_up": (SkinnyOp.NORM_GATE_UP, 14336, HIDDEN),
    "down": (SkinnyOp.LINEAR_RESIDUAL, HIDDEN, 14336),
    "head": (SkinnyOp.LINEAR, 128256, HIDDEN),
    "qkv, 2 ranks": (SkinnyOp.NORM_LINEAR, 3072, HIDDEN),
    "output, 2 ranks": (SkinnyOp.LINEAR_RESIDUAL, HIDDEN, 2048),
    "gate_up, 2 ranks": (SkinnyOp.NORM_GATE_UP, 7168, HIDDEN),
    "down, 2 ranks": (SkinnyOp.LINEAR_RESIDUAL, HIDDEN, 7168),
    "head, 2 ranks": (SkinnyOp.LINEAR, 64128, HIDDEN),
}


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per microsecond of a large copy, read and written."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(9):
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return float(2 * source.numel() / median(times[2:]))


def products(device: torch.device, bandwidth: float, rows: Sequence[int]) -> list[dict[str, Any]]:
    found = []
    for name, (op, n, k) in SHAPES.items():
        for count in rows:
            shape = SkinnyShape(op=op, rows=count, n=n, k=k)
            samples = measure(shape, device, repeats=5)
            chosen = best(samples, margin=0.0)
            timed = {s.config: s.median_us for s in samples if s.median_us is not None}
            floor = shape.weight_bytes / bandwidth
            share = floor / timed[chosen]
            row: dict[str, Any] = {
                "product": name,
                "op": op.value,
                "rows": count,
                "n": n,
                "k": k,
                "floor_us": floor,
                "torch_us": timed[None],
                "best_us": timed[chosen],
                "share_of_bandwidth": share,
                "config": chosen and chosen.to_dict(),
                "samples": [
                    {"config": s.config and s.config.to_dict(), "us": s.median_us, "why": s.refused}
                    for s in samples
                ],
            }
            found.append(row)
            print(
                f"{name:18} rows {count:2}: torch {timed[None]:7.2f}  best {timed[chosen]:7.2f}  "
                f"floor {floor:7.2f} us  {100 * share:.0f} %",
                flush=True,
            )
    return found


def matrices(device: torch.device, ranks: int) -> list[LayerMatrices]:
    generator = torch.Generator(device).manual_seed(0)

    def normal(n: int, k: int) -> torch.Tensor:
        made = torch.randn(n, k, generator=generator, device=device, dtype=torch.bfloat16)
        return made.mul_(0.3 * k**-0.5)

    return [
        LayerMatrices(
            norm=torch.ones(HIDDEN, device=device, dtype=torch.bfloat16),
            qkv=normal(6144 // ranks, HIDDEN),
            output=normal(HIDDEN, 4096 // ranks),
            gate_up=normal(28672 // ranks, HIDDEN),
            down=normal(HIDDEN, 14336 // ranks),
        )
        for _ in range(LAYERS)
    ]


def chains(
    device: torch.device, bandwidth: float, rows: Sequence[int], ranks: int
) -> list[dict[str, Any]]:
    layers = matrices(device, ranks)
    floor = sum(layer.num_bytes for layer in layers) / bandwidth / 1e3
    found = []
    for count in rows:
        chosen = choose(layers, rows=count, ranks=ranks)
        chain = LayerChain(layers, rows=count, ranks=ranks)
        ours, torch_ms = (
            chain.median_us(configs, repeats=15) * LAYERS / 1e3
            for configs in (chosen, LayerConfigs())
        )
        configs = {name: getattr(chosen, name) for name in PRODUCTS}
        found.append(
            {
                "ranks": ranks,
                "rows": count,
                "floor_ms": floor,
                "torch_ms": torch_ms,
                "ours_ms": ours,
                "configs": {name: c and c.to_dict() for name, c in configs.items()},
            }
        )
        print(
            f"{LAYERS} layers of {ranks} rank(s), rows {count:2}: torch {torch_ms:.3f}  "
            f"ours {ours:.3f}  floor {floor:.3f} ms",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/skinny_linear.json")
    )
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    arguments = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    import triton

    bandwidth = copy_bandwidth(device)
    print(f"copy {bandwidth / 1e6:.3f} TB/s")
    layers: list[dict[str, Any]] = []
    result = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "gpu": torch.cuda.get_device_name(device),
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "dtype": "bfloat16",
        "copy_bytes_per_us": bandwidth,
        "layers": layers,
        "products": [],
    }

    def write() -> None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")

    layers += chains(device, bandwidth, arguments.rows, 1)
    write()
    result["products"] = products(device, bandwidth, arguments.rows)
    write()
    layers += chains(device, bandwidth, arguments.rows, 2)
    write()


if __name__ == "__main__":
    main()

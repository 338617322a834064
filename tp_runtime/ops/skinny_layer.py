"""Choose how the products of a decoder layer run, measured where they run: one after the other.

With dependent launches a kernel starts beside the end of the one before, so that its speed depends
on its neighbours: the fastest four alone are not the fastest layer (on an H200, one row of
Llama-3-8B: 4.05 ms against 3.53 ms for the layers' products). So each product's candidates are
measured alone first, which leaves the best few, and then in a chain of whole layers, one product
after the other until nothing gets faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

import torch

from tp_runtime.ops.skinny import (
    skinny_linear_residual,
    skinny_norm_gate_up,
    skinny_norm_linear,
)
from tp_runtime.ops.skinny_config import SkinnyConfig, SkinnyOp
from tp_runtime.ops.skinny_measure import SkinnyShape, measure, replay_us

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_KEPT = 5  # candidates of a product that are measured in the chain
_PASSES = 2
_EPS = 1e-5
_MARGIN = 0.002  # by which a chain must be faster for a change of its configurations
PRODUCTS: Final = ("gate_up", "down", "qkv", "output")  # the order in which they are chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMatrices:
    """The matrices of one layer, as this rank holds them; the model's own, so nothing is copied.

    Args:
        norm: [hidden].  qkv: [q + k + v width, hidden].  output: [hidden, q width].
        gate_up: [2 * n, hidden].  down: [hidden, n].
    """

    norm: Tensor
    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor

    @property
    def num_bytes(self) -> int:
        return sum(w.nbytes for w in (self.qkv, self.output, self.gate_up, self.down))

    def shapes(self, rows: int) -> dict[str, SkinnyShape]:
        """The shape of each of `PRODUCTS`."""

        def shape(op: SkinnyOp, weight: Tensor) -> SkinnyShape:
            n, k = weight.shape
            return SkinnyShape(op=op, rows=rows, n=n // op.stacked, k=k, dtype=weight.dtype)

        return {
            "gate_up": shape(SkinnyOp.NORM_GATE_UP, self.gate_up),
            "down": shape(SkinnyOp.LINEAR_RESIDUAL, self.down),
            "qkv": shape(SkinnyOp.NORM_LINEAR, self.qkv),
            "output": shape(SkinnyOp.LINEAR_RESIDUAL, self.output),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfigs:
    """How each product of a layer runs; None: as torch does."""

    qkv: SkinnyConfig | None = None
    output: SkinnyConfig | None = None
    gate_up: SkinnyConfig | None = None
    down: SkinnyConfig | None = None

    def replaced(self, product: str, config: SkinnyConfig | None) -> LayerConfigs:
        """These with another configuration for one product."""
        return LayerConfigs(
            **{name: config if name == product else getattr(self, name) for name in PRODUCTS}
        )


class LayerChain:
    """Layers one after the other in a CUDA graph, small kernels standing for what lies between.

    Args:
        layers: together larger than the L2 cache, or it would be what is measured.
        rows: of the batch.
        ranks: of the group; with more than one a kernel stands for each all-reduce.
    """

    def __init__(self, layers: Sequence[LayerMatrices], *, rows: int, ranks: int = 1) -> None:
        first = layers[0]
        self._layers = layers
        self._ranks = ranks
        self._width = first.output.shape[1]
        self._x = torch.randn(
            rows, first.qkv.shape[1], device=first.qkv.device, dtype=first.qkv.dtype
        )
        self._attended = self._x.new_empty(rows, self._width)
        self._stream = torch.cuda.Stream(self._x.device)  # type: ignore[no-untyped-call]

    def run(self, configs: LayerConfigs) -> Tensor:
        """The residual stream after the last layer: [rows, hidden]."""
        x = self._x
        for layer in self._layers:
            qkv = skinny_norm_linear(x, layer.norm, _EPS, layer.qkv, config=configs.qkv)
            self._attended.copy_(qkv[:, : self._width])  # stands for attention
            x = skinny_linear_residual(self._attended, layer.output, x, config=configs.output)
            x = x if self._ranks == 1 else x.clone()
            hidden = skinny_norm_gate_up(x, layer.norm, _EPS, layer.gate_up, config=configs.gate_up)
            x = skinny_linear_residual(hidden, layer.down, x, config=configs.down)
            x = x if self._ranks == 1 else x.clone()
        return x

    def median_us(self, configs: LayerConfigs, *, repeats: int = 7) -> float:
        """Time of one layer."""
        self._stream.wait_stream(torch.cuda.current_stream(self._x.device))
        with torch.cuda.stream(self._stream):
            self.run(configs)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self.run(configs)
            graph.replay()
            times = [replay_us(graph, self._stream) for _ in range(repeats)]
        torch.cuda.current_stream(self._x.device).wait_stream(self._stream)
        return median(times) / len(self._layers)


def choose_layer(
    layers: Sequence[LayerMatrices], *, rows: int, ranks: int = 1, repeats: int = 7
) -> LayerConfigs:
    """The configurations with which a chain of these layers is fastest.

    Args:
        layers: some or all of the model's, on a CUDA device that does nothing else; together
            larger than its L2 cache.
        rows: of the batch, 1 to 64.  ranks: see `LayerChain`.
        repeats: timings of each candidate.
    """
    device = layers[0].qkv.device
    kept: dict[str, list[SkinnyConfig | None]] = {}
    for product, shape in layers[0].shapes(rows).items():
        samples = [s for s in measure(shape, device, repeats=3) if s.median_us is not None]
        samples.sort(key=lambda sample: sample.median_us or 0.0)
        ours = [sample.config for sample in samples if sample.config is not None]
        kept[product] = [*ours[:_KEPT], None]
    chain = LayerChain(layers, rows=rows, ranks=ranks)
    best = LayerConfigs(**{product: configs[0] for product, configs in kept.items()})
    fastest = chain.median_us(best, repeats=repeats)
    for _ in range(_PASSES):
        before = best
        for product in PRODUCTS:
            for config in kept[product]:
                tried = best.replaced(product, config)
                if tried == best:
                    continue
                taken = chain.median_us(tried, repeats=repeats)
                if taken < fastest * (1 - _MARGIN):
                    best, fastest = tried, taken
        if best == before:
            break
    return best

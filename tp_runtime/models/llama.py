"""The Llama family of decoders (Llama, Mistral, Qwen2, Qwen3), one rank's part.

Two matrices per block are fused: rows of q, k, v lie one after the other, and so do gate and up.
Each layer has two collectives, after the attention output and after the feed-forward block.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from tp_runtime.errors import ConfigError
from tp_runtime.layers.linear import (
    ColumnParallelLinear,
    GatedLinear,
    Hidden,
    Matrix,
    RowParallelLinear,
)
from tp_runtime.layers.vocab import VocabParallelEmbedding, VocabParallelHead
from tp_runtime.models.base import ModelShape, QkNorm
from tp_runtime.ops.norm import RmsNorm
from tp_runtime.ops.rope import RopeTable
from tp_runtime.ops.skinny_layer import LayerMatrices
from tp_runtime.sizing import free_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tp_runtime.group import TpGroup
    from tp_runtime.layers.products import Product, ProductPlan
    from tp_runtime.models.base import Attention
    from tp_runtime.models.config import ModelConfig
    from tp_runtime.models.partition import Partition
    from tp_runtime.models.weights import LayerWeights, ShardReader


class LlamaLayer:
    """One decoder layer: attention and the gated feed-forward block, each with its norm."""

    __slots__ = (
        "_down",
        "_gate_up",
        "_index",
        "_output",
        "_qk_norm",
        "_qkv",
    )

    def __init__(
        self,
        index: int,
        weights: LayerWeights,
        *,
        config: ModelConfig,
        group: TpGroup,
    ) -> None:
        self._index = index
        input_norm = RmsNorm(weights.input_norm, config.rms_norm_eps)
        self._qkv = ColumnParallelLinear(input_norm, weights.qkv, weights.qkv_bias)
        self._qk_norm: QkNorm | None = None
        if weights.q_norm is not None and weights.k_norm is not None:
            self._qk_norm = QkNorm(
                q_weight=weights.q_norm, k_weight=weights.k_norm, eps=config.rms_norm_eps
            )
        post_norm = RmsNorm(weights.post_norm, config.rms_norm_eps)
        self._output = RowParallelLinear(weights.output, group, post_norm)
        self._gate_up = GatedLinear(post_norm, weights.gate_up)
        self._down = RowParallelLinear(weights.down, group)

    def __call__(self, hidden: Hidden, cos: Tensor, sin: Tensor, attention: Attention) -> Hidden:
        """The residual stream after this layer."""
        attended = attention.rotated(self._index, self._qkv(hidden), cos, sin, self._qk_norm)
        hidden = self._output(attended.flatten(1), hidden.stream)
        return self._down(self._gate_up(hidden), hidden.stream)

    def precedes(self, other: LlamaLayer) -> None:
        """Say which layer is the next one, which lets this one normalise for it."""
        self._down.next_norm = other._qkv.norm

    @property
    def linears(self) -> dict[str, ColumnParallelLinear | RowParallelLinear | GatedLinear]:
        """By the names that `LayerMatrices` has for them."""
        return {
            "qkv": self._qkv,
            "output": self._output,
            "gate_up": self._gate_up,
            "down": self._down,
        }

    @property
    def matrices(self) -> LayerMatrices:
        """The weights themselves."""
        weights = {name: linear.matrix.weight for name, linear in self.linears.items()}
        return LayerMatrices(norm=self._qkv.norm.weight, **weights)


def _rope_table(
    config: ModelConfig, positions: int, *, dtype: torch.dtype, group: TpGroup
) -> RopeTable:
    wanted = RopeTable.bytes_of(config.head_dim, positions, dtype)
    free = free_bytes(group.device, group.size)
    if wanted > free:
        raise ConfigError(
            f"no memory on {group.device} for the RoPE table of {positions} positions, the most "
            f"that the model claims or max_seq_len asks for: expected at most {free / 2**30:.1f} "
            f"GiB, it needs {wanted / 2**30:.1f} GiB; set max_seq_len to the longest sequence "
            "that you need"
        )
    return RopeTable(
        config.head_dim,
        theta=config.rope_theta,
        max_positions=positions,
        dtype=dtype,
        device=group.device,
        scaling=config.rope_scaling,
    )


class LlamaModel:
    """A `DecodeModel`: embedding, layers, final norm, head.

    Args:
        config: the whole model.
        partition: this rank's part.
        reader: gives the weights of that part.
        group: the ranks that hold the other parts.
        dtype: of weights and activations.
        max_positions: longest sequence that will be run, in tokens; the RoPE table has as many
            rows. None, or more than the model has: the model's own limit.

    Raises:
        ConfigError: no memory for the RoPE table of so many positions.
    """

    def __init__(
        self,
        config: ModelConfig,
        partition: Partition,
        reader: ShardReader,
        *,
        group: TpGroup,
        dtype: torch.dtype,
        max_positions: int | None = None,
    ) -> None:
        self.config = config
        positions = min(max_positions or config.max_positions, config.max_positions)
        embedding = Matrix(reader.embedding(), multiplied=config.tied_head)
        self._embedding = VocabParallelEmbedding(embedding, partition.vocab, group)
        self._layers = [
            LlamaLayer(index, reader.layer(index), config=config, group=group)
            for index in range(config.num_layers)
        ]
        for layer, after in pairwise(self._layers):
            layer.precedes(after)
        final_norm = RmsNorm(reader.final_norm(), config.rms_norm_eps)
        head = embedding if config.tied_head else Matrix(reader.head())
        self._head = VocabParallelHead(final_norm, head, partition.vocab)
        self._rope = _rope_table(config, positions, dtype=dtype, group=group)
        self._shape = ModelShape(
            num_layers=config.num_layers,
            q_heads=partition.q_heads.width,
            kv_heads=partition.kv_heads.width,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            vocab_start=partition.vocab.start,
            vocab_end=partition.vocab.end,
            max_positions=positions,
            dtype=dtype,
            eos_token_ids=config.eos_token_ids,
        )

    @property
    def shape(self) -> ModelShape:
        return self._shape

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """See `DecodeModel.forward`: [tokens] ids and positions -> [tokens, hidden]."""
        hidden = Hidden(self._embedding(token_ids))
        cos, sin = self._rope.at(positions)
        for layer in self._layers:
            hidden = layer(hidden, cos, sin, attention)
        return hidden.stream

    def logits(self, hidden: Tensor) -> Tensor:
        """See `DecodeModel.logits`: [rows, hidden] -> [rows, vocab_end - vocab_start]."""
        return self._head(hidden)

    @property
    def layer_products(self) -> dict[str, Product]:
        """See `TunedModel`; all layers make the same ones."""
        return {name: linear.product for name, linear in self._layers[0].linears.items()}

    @property
    def other_products(self) -> tuple[Product, ...]:
        """See `TunedModel`."""
        return (self._head.linear.product,)

    @property
    def layer_matrices(self) -> list[LayerMatrices]:
        """See `TunedModel`."""
        return [layer.matrices for layer in self._layers]

    def use_products(self, plan: ProductPlan) -> None:
        """See `TunedModel`."""
        for layer in self._layers:
            for linear in layer.linears.values():
                linear.use_products(plan)
        self._head.linear.use_products(plan)

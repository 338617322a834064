"""From a source of named tensors to one rank's shard of a Llama-family decoder.

Names are those of Hugging Face checkpoints, whatever the source is. A source is asked for the
rows and columns that the rank needs and for nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from tp_runtime.errors import ModelFormatError
from tp_runtime.models.partition import Span

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tp_runtime.models.config import ModelConfig
    from tp_runtime.models.partition import Partition

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


class WeightSource(Protocol):
    """Tensors of a whole model, by their Hugging Face name."""

    @property
    def config(self) -> ModelConfig: ...

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """A part of a tensor, in any floating dtype, on any device.

        Args:
            name: Hugging Face name.
            shape: what the whole tensor must be, [out, in] or [n].
            rows: half-open range of the first dimension; None for all of it.
            columns: half-open range of the last of two dimensions; None for all of it.

        Raises:
            ModelFormatError: there is no such tensor, or it has another shape.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer of one rank. Matrices are [out, in]; see `llama.py` for the order of fused rows."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class ShardReader:
    """Reads one rank's part of each tensor, padded with zeros, in the dtype and place of use.

    Args:
        source: where tensors come from.
        partition: which part this rank holds.
        dtype, device: of the result.
        on_tensor: called after each tensor that was read, for progress.
    """

    def __init__(
        self,
        source: WeightSource,
        partition: Partition,
        *,
        dtype: torch.dtype,
        device: torch.device,
        on_tensor: Callable[[], None] | None = None,
    ) -> None:
        self._source = source
        self._partition = partition
        self._dtype = dtype
        self._device = device
        self._on_tensor = on_tensor

    def embedding(self) -> Tensor:
        return self._vocabulary(EMBEDDING)

    def head(self) -> Tensor:
        return self._vocabulary(HEAD)

    def final_norm(self) -> Tensor:
        return self._vector(FINAL_NORM, self._source.config.hidden_size)

    def layer(self, index: int) -> LayerWeights:
        """All tensors of one layer.

        Raises:
            ModelFormatError: a tensor is missing, misshapen or holds values that are not finite.
        """
        config, part = self._source.config, self._partition
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        q = part.q_heads.scaled(config.head_dim)
        kv = part.kv_heads.scaled(config.head_dim)
        q_rows, kv_rows = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        hidden, inner = config.hidden_size, config.intermediate_size
        qkv_bias = None
        if config.qkv_bias:
            qkv_bias = torch.cat(
                [
                    self._rows(attention + "q_proj.bias", (q_rows,), q),
                    self._rows(attention + "k_proj.bias", (kv_rows,), kv),
                    self._rows(attention + "v_proj.bias", (kv_rows,), kv),
                ]
            )
        return LayerWeights(
            input_norm=self._vector(prefix + "input_layernorm.weight", hidden),
            qkv=torch.cat(
                [
                    self._rows(attention + "q_proj.weight", (q_rows, hidden), q),
                    self._rows(attention + "k_proj.weight", (kv_rows, hidden), kv),
                    self._rows(attention + "v_proj.weight", (kv_rows, hidden), kv),
                ]
            ),
            qkv_bias=qkv_bias,
            q_norm=self._vector(attention + "q_norm.weight", config.head_dim)
            if config.qk_norm
            else None,
            k_norm=self._vector(attention + "k_norm.weight", config.head_dim)
            if config.qk_norm
            else None,
            output=self._columns(attention + "o_proj.weight", (hidden, q_rows), q),
            post_norm=self._vector(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=torch.cat(
                [
                    self._rows(prefix + "mlp.gate_proj.weight", (inner, hidden), part.intermediate),
                    self._rows(prefix + "mlp.up_proj.weight", (inner, hidden), part.intermediate),
                ]
            ),
            down=self._columns(prefix + "mlp.down_proj.weight", (hidden, inner), part.intermediate),
        )

    def _vector(self, name: str, length: int) -> Tensor:
        return self._place(name, self._source.read(name, (length,)))

    def _rows(self, name: str, shape: tuple[int, ...], span: Span) -> Tensor:
        if span.real == 0:
            return self._place(name, torch.zeros(span.width, *shape[1:]))
        part = self._source.read(name, shape, rows=(span.start, span.stop))
        part = self._place(name, part)
        if span.real == span.width:
            return part
        return torch.cat([part, part.new_zeros(span.width - span.real, *shape[1:])])

    def _columns(self, name: str, shape: tuple[int, int], span: Span) -> Tensor:
        if span.real == 0:
            return self._place(name, torch.zeros(shape[0], span.width))
        part = self._source.read(name, shape, columns=(span.start, span.stop))
        part = self._place(name, part)
        if span.real == span.width:
            return part
        return torch.cat([part, part.new_zeros(shape[0], span.width - span.real)], 1)

    def _vocabulary(self, name: str) -> Tensor:
        config, vocab = self._source.config, self._partition.vocab
        span = Span(start=vocab.start, stop=vocab.start + vocab.real, width=vocab.width)
        # read before anything is allocated: that compares the shape with the file's
        return self._rows(name, (config.vocab_size, config.hidden_size), span)

    def _place(self, name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.to(device=self._device, dtype=self._dtype)
        if tensor.numel() and not bool(torch.isfinite(tensor).all()):
            raise ModelFormatError(
                f"{name} holds values that are not finite in {self._dtype}: the file is damaged, "
                "or the dtype is too narrow for it"
            )
        if self._on_tensor is not None:
            self._on_tensor()
        return tensor

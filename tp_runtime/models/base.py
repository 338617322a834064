"""The seam between a model and the runtime: what a model must offer, and what it is given.

A framework runs its own network here by implementing `DecodeModel`; it keeps its own weights and
calls back for attention, so that pages, prefill and the selected decode backend stay in one place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the runtime needs to know of one rank's part of a model.

    Head counts are per rank, after sharding and padding. `vocab_start` and `vocab_end` are this
    rank's half-open slice of the vocabulary; the slices of all ranks cover [0, vocab_size) in
    order. `logits` may return columns beyond `vocab_size` only if they are -inf.
    """

    num_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    vocab_start: int
    vocab_end: int
    max_positions: int
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QkNorm:
    """RMS norms of each query and key head. Weights: [head_dim]."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


class Attention(Protocol):
    """What a model calls once per layer, in layer order, with rotated q and k."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append k and v to the paged cache and attend.

        Args:
            layer: 0 .. num_layers - 1.
            q: [tokens, q_heads, head_dim]; k and v: [tokens, kv_heads, head_dim].

        Returns:
            [tokens, q_heads, head_dim], valid until the next call.
        """
        ...

    def rotated(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: QkNorm | None
    ) -> Tensor:
        """The same from the fused projection, with norm, rotation and append in one.

        Args:
            qkv: [tokens, (q_heads + 2 * kv_heads) * head_dim], heads of q, then k, then v.
            cos, sin: [tokens, 1, head_dim], from `RopeTable.at`.
            norms: of q and k before the rotation.
        """
        ...


class DecodeModel(Protocol):
    """One rank's part of a decoder. `forward` may use collectives; every rank calls it alike."""

    @property
    def shape(self) -> ModelShape: ...

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Run the layers.

        Args:
            token_ids: [tokens] int64.  positions: [tokens] int64.

        Returns:
            What `logits` takes for the rows that sample, [tokens, hidden], equal on every rank.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's vocabulary slice of some rows of what `forward` gave: [rows, hidden] ->
        [rows, vocab_end - vocab_start], in any floating dtype."""
        ...

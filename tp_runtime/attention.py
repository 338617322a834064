"""The paged KV cache of one rank, and attention over it for decode rows and prompt chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tp_runtime.ops.rope_append import first_rows, rope_append
from tp_runtime.selection.base import DecodeBackend, PagedKV

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tp_runtime.models.base import ModelShape, QkNorm


class KvCache:
    """Keys and values of every layer in HND pages.

    k[layer], v[layer]: [pages, kv_heads, page_size, head_dim], in the model's dtype. Zeroed, so
    that a page never read before holds finite numbers.
    """

    def __init__(
        self, shape: ModelShape, *, num_pages: int, page_size: int, device: torch.device
    ) -> None:
        self.page_size = page_size
        self.kv_heads = shape.kv_heads
        size = (shape.num_layers, num_pages, shape.kv_heads, page_size, shape.head_dim)
        self._k = torch.zeros(size, dtype=shape.dtype, device=device)
        self._v = torch.zeros(size, dtype=shape.dtype, device=device)
        self.k = list(self._k.unbind(0))
        self.v = list(self._v.unbind(0))
        self._flat_k = [k.view(-1, shape.head_dim) for k in self.k]
        self._flat_v = [v.view(-1, shape.head_dim) for v in self.v]
        self._head_rows = page_size * torch.arange(shape.kv_heads, device=device)

    @property
    def num_bytes(self) -> int:
        return 2 * self._k.numel() * self._k.element_size()

    def rows_of(self, pages: Tensor, positions: Tensor) -> Tensor:
        """Where a layer keeps the first head of each token; see `first_rows`.

        Args:
            pages: int [tokens], the kernel page of each.  positions: int64 [tokens].

        Returns:
            int64 [tokens], rows of the layer's [-1, head_dim] view.
        """
        return first_rows(pages, positions, kv_heads=self.kv_heads, page_size=self.page_size)

    def append(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v, [tokens, kv_heads, head_dim], to `rows_of` their tokens."""
        head_dim = k.shape[-1]
        where = (rows[:, None] + self._head_rows).flatten()
        self._flat_k[layer].index_copy_(0, where, k.reshape(-1, head_dim))
        self._flat_v[layer].index_copy_(0, where, v.reshape(-1, head_dim))

    def prefix(self, layer: int, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` tokens of a sequence, [kv_heads, length, head_dim] each."""
        k, v = self.k[layer][pages], self.v[layer][pages]
        heads, head_dim = k.shape[1], k.shape[-1]
        k = k.transpose(0, 1).reshape(heads, -1, head_dim)[:, :length]
        v = v.transpose(0, 1).reshape(heads, -1, head_dim)[:, :length]
        return k, v


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """The decode part of a step: one token per row, attended to by the backend of the plan.

    block_table: int32 [rows, width].  kv_lens: int32 [rows], the new token included.
    """

    backend: DecodeBackend
    block_table: Tensor
    kv_lens: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunk:
    """Tokens `start` .. `end` of one prompt. pages: int64, those that hold [0, end)."""

    start: int
    end: int
    pages: Tensor
    mask: Tensor | None

    @classmethod
    def make(cls, *, start: int, end: int, pages: Tensor) -> PromptChunk:
        mask = None
        if start:
            columns = torch.arange(end, device=pages.device)
            mask = columns <= torch.arange(start, end, device=pages.device)[:, None]
        return cls(start=start, end=end, pages=pages, mask=mask)


class StepAttention:
    """The `Attention` of one step: decode rows first, then the chunks, in token order."""

    def __init__(
        self,
        cache: KvCache,
        *,
        cache_rows: Tensor,
        decode: DecodeRows | None,
        chunks: Sequence[PromptChunk] = (),
    ) -> None:
        self._cache = cache
        self._cache_rows = cache_rows
        self._decode = decode
        self._chunks = chunks

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._cache.append(layer, self._cache_rows, k, v)
        return self._attend(layer, q)

    def rotated(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, norms: QkNorm | None
    ) -> Tensor:
        k_cache, v_cache = self._cache.k[layer], self._cache.v[layer]
        if norms is None:
            q = rope_append(qkv, cos, sin, self._cache_rows, k_cache, v_cache)
        else:
            q = rope_append(
                qkv,
                cos,
                sin,
                self._cache_rows,
                k_cache,
                v_cache,
                q_norm=norms.q_weight,
                k_norm=norms.k_weight,
                eps=norms.eps,
            )
        return self._attend(layer, q)

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        cache, decode = self._cache, self._decode
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        first = 0
        if decode is not None:
            first = decode.kv_lens.shape[0]
            kv = PagedKV(
                k=cache.k[layer],
                v=cache.v[layer],
                block_table=decode.block_table,
                kv_lens=decode.kv_lens,
            )
            rows = q[:first]
            if q.device.type != "cpu":
                rows = rows.contiguous()  # a model that rotates itself may hand over a view
            decode.backend.forward(rows, kv, out[:first])
        for chunk in self._chunks:
            last = first + chunk.end - chunk.start
            keys, values = cache.prefix(layer, chunk.pages, chunk.end)
            out[first:last] = F.scaled_dot_product_attention(
                q[first:last].transpose(0, 1)[None],
                keys[None],
                values[None],
                attn_mask=chunk.mask,
                is_causal=chunk.mask is None,
                enable_gqa=True,
            )[0].transpose(0, 1)
            first = last
        return out

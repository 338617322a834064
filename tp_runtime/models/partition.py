"""Which part of a decoder one rank holds.

Whole groups of heads (one key-value head and its query heads) go to ranks in order. Where they do
not divide, groups of zeros are appended: zero rows of q, k, v and zero columns of the output
projection add exactly nothing. So do zero columns of the feed-forward block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tp_runtime.errors import UnsupportedModel
from tp_runtime.layers.vocab import VocabSlice

if TYPE_CHECKING:
    from tp_runtime.models.config import ModelConfig

_LARGEST_TP_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Indices [start, stop) that exist; the rank's tensor has `width`, and the rest of it is 0."""

    start: int
    stop: int
    width: int

    @classmethod
    def of(cls, total: int, *, rank: int, size: int) -> Span:
        """Rank's part of `total` in equal widths; the last ones may be short or empty."""
        width = -(-total // size)
        return cls(start=min(rank * width, total), stop=min((rank + 1) * width, total), width=width)

    def scaled(self, by: int) -> Span:
        """The span in units that are `by` times finer."""
        return Span(start=self.start * by, stop=self.stop * by, width=self.width * by)

    @property
    def real(self) -> int:
        return self.stop - self.start


def padded_kv_heads(config: ModelConfig, tp_size: int) -> int | None:
    """Key-value heads after padding to a multiple of `tp_size`; None if that would add too many.

    At most half as many again: beyond that most ranks would compute zeros.
    """
    padded = -(-config.num_kv_heads // tp_size) * tp_size
    return padded if (padded - config.num_kv_heads) * 2 <= config.num_kv_heads else None


def tp_sizes(config: ModelConfig) -> tuple[int, ...]:
    """The tensor-parallel sizes at which a model can be run."""
    sizes = range(1, min(2 * config.num_kv_heads, _LARGEST_TP_SIZE) + 1)
    return tuple(size for size in sizes if padded_kv_heads(config, size) is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One rank's part of every tensor.

    Attributes:
        kv_heads: key-value heads; `kv_heads.width` of them per rank after padding.
        q_heads: the query heads that belong to them.
        intermediate: columns of the feed-forward block.
        vocab: token ids of the embedding and the head.
    """

    rank: int
    size: int
    kv_heads: Span
    q_heads: Span
    intermediate: Span
    vocab: VocabSlice

    @classmethod
    def of(cls, config: ModelConfig, *, rank: int, size: int) -> Partition:
        """Divide a model.

        Raises:
            UnsupportedModel: the heads cannot be divided; names the sizes that work.
        """
        if padded_kv_heads(config, size) is None:
            raise UnsupportedModel(
                f"{config.num_heads} query and {config.num_kv_heads} key-value heads cannot be "
                f"divided over a TP size of {size}; TP sizes that work for this model: "
                f"{', '.join(map(str, tp_sizes(config)))}"
            )
        kv_heads = Span.of(config.num_kv_heads, rank=rank, size=size)
        return cls(
            rank=rank,
            size=size,
            kv_heads=kv_heads,
            q_heads=kv_heads.scaled(config.group_size),
            intermediate=Span.of(config.intermediate_size, rank=rank, size=size),
            vocab=VocabSlice.of(config.vocab_size, rank=rank, size=size),
        )

"""The two ends of a decoder, split over the vocabulary.

Every rank has one contiguous slice of the same width, so that slices can be gathered; where the
vocabulary does not divide, the last ones reach past its end and those columns are -inf.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tp_runtime.layers.linear import ColumnParallelLinear, Hidden
from tp_runtime.ops.gather import gather_rows

if TYPE_CHECKING:
    from torch import Tensor

    from tp_runtime.group import TpGroup
    from tp_runtime.layers.linear import Matrix
    from tp_runtime.ops.norm import RmsNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabSlice:
    """Token ids [start, end) of one rank, of which only those below vocab_size exist."""

    start: int
    end: int
    vocab_size: int

    @classmethod
    def of(cls, vocab_size: int, *, rank: int, size: int) -> VocabSlice:
        width = -(-vocab_size // size)
        return cls(start=rank * width, end=(rank + 1) * width, vocab_size=vocab_size)

    @property
    def width(self) -> int:
        return self.end - self.start

    @property
    def real(self) -> int:
        """How many ids of the slice exist; they come first."""
        return max(0, min(self.end, self.vocab_size) - self.start)


class VocabParallelEmbedding:
    """Rows of the token embedding; a rank contributes zeros for ids of other ranks.

    Args:
        matrix: this rank's [slice.width, hidden].
        vocab: which ids those rows are.
        group: sums the contributions.
    """

    __slots__ = ("_group", "_matrix", "_vocab")

    def __init__(self, matrix: Matrix, vocab: VocabSlice, group: TpGroup) -> None:
        self._matrix = matrix
        self._vocab = vocab
        self._group = group

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[tokens] int64 in [0, vocab_size) -> [tokens, hidden], equal on every rank."""
        if token_ids.is_cuda:
            (rows,) = gather_rows(token_ids, self._matrix.weight, start=self._vocab.start)
        elif self._group.size == 1:
            rows = self._matrix.rows(token_ids)
        else:
            local = token_ids - self._vocab.start
            foreign = (local < 0) | (local >= self._vocab.width)
            rows = self._matrix.rows(local.masked_fill_(foreign, 0))
            rows.masked_fill_(foreign.unsqueeze(1), 0.0)
        return rows if self._group.size == 1 else self._group.all_reduce(rows)


class VocabParallelHead:
    """The final norm, and logits of this rank's slice of the vocabulary.

    Args:
        norm: of the input.
        matrix: this rank's [slice.width, hidden]; may be the embedding's own (tied weights).
        vocab: which ids its rows are.
    """

    __slots__ = ("_vocab", "linear")

    def __init__(self, norm: RmsNorm, matrix: Matrix, vocab: VocabSlice) -> None:
        self.linear = ColumnParallelLinear(norm, matrix)
        self._vocab = vocab

    def __call__(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, slice.width]; ids that do not exist are -inf."""
        logits = self.linear(Hidden(hidden))
        if self._vocab.real < self._vocab.width:
            logits[:, self._vocab.real :] = float("-inf")
        return logits

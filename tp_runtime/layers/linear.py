"""Matrices and the two ways of splitting them over ranks.

On a CPU one layout is chosen per matrix when it is loaded, by what was measured for one row
(float32, one thread, weights out of cache): BLAS streams memory fastest along the longer axis,
10-16 GB/s against 7-10 GB/s for `F.linear` on a wide matrix. More rows use the same storage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from tp_runtime.group import TpGroup

# A product with 4 or more rows makes BLAS copy the whole matrix into its own order first. Copied
# in slices of this many columns it stays in cache: a vocabulary head of 16 rows takes 20 % less.
_SLICE_COLUMNS = 512
_SLICE_ROWS = 4


class Matrix:
    """One weight in the layout that suits its device and shape. Never held twice.

    Args:
        weight: [out, in], as checkpoints store it.
        multiplied: False for an embedding without a head, whose rows are only looked up.
    """

    __slots__ = ("_slices", "_storage", "_transposed", "in_features", "out_features")

    def __init__(self, weight: Tensor, *, multiplied: bool = True) -> None:
        self.out_features, self.in_features = weight.shape
        tall = self.out_features >= self.in_features
        self._transposed = multiplied and tall and weight.device.type == "cpu"
        self._storage = weight.t().contiguous() if self._transposed else weight.contiguous()
        wide = self._transposed and self.out_features >= 4 * _SLICE_COLUMNS
        self._slices = torch.split(self._storage, _SLICE_COLUMNS, 1) if wide else ()

    @property
    def nbytes(self) -> int:
        return self._storage.nbytes

    def rows(self, index: Tensor) -> Tensor:
        """Rows of the [out, in] matrix, for an embedding that shares its memory with a head.

        Args:
            index: [n] int64, each in [0, out_features).

        Returns:
            [n, in].
        """
        if self._transposed:
            return self._storage.index_select(1, index).t().contiguous()
        return F.embedding(index, self._storage)

    def multiply(self, x: Tensor) -> Tensor:
        """x @ weight.T: [rows, in] -> [rows, out], contiguous."""
        if not self._transposed:
            if x.shape[0] == 1 and not x.is_cuda:
                return torch.mv(self._storage, x[0]).unsqueeze(0)
            return F.linear(x, self._storage)
        if not self._slices or x.shape[0] < _SLICE_ROWS:
            return torch.mm(x, self._storage)
        out = x.new_empty(x.shape[0], self.out_features)
        for part, columns in zip(torch.split(out, _SLICE_COLUMNS, 1), self._slices, strict=True):
            torch.mm(x, columns, out=part)
        return out

    def multiply_add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + x @ weight.T in one call: [rows, in], [rows, out] -> [rows, out]."""
        if self._transposed:
            return torch.addmm(residual, x, self._storage)
        if x.shape[0] == 1 and not x.is_cuda:
            return torch.addmv(residual[0], self._storage, x[0]).unsqueeze(0)
        return torch.addmm(residual, x, self._storage.t())


class ColumnParallelLinear:
    """Each rank has some output columns; no communication.

    Args:
        weight: this rank's [out / size, in]; projections may be stacked (fused qkv, gate_up).
        bias: [out / size] or None.
    """

    __slots__ = ("bias", "matrix")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.matrix = Matrix(weight)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in] -> [tokens, out / size]."""
        out = self.matrix.multiply(x)
        return out if self.bias is None else out.add_(self.bias)


class RowParallelLinear:
    """Each rank has some input columns; the partial products are summed over the ranks.

    The residual rides along: rank 0 adds it inside its product, so that the sum is already the
    new residual stream, and bit-identical on every rank.

    Args:
        weight: this rank's [out, in / size].
        group: sums the partial results.
    """

    __slots__ = ("_adds_residual", "_group", "matrix")

    def __init__(self, weight: Tensor, group: TpGroup) -> None:
        self.matrix = Matrix(weight)
        self._group = group
        self._adds_residual = group.rank == 0

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + sum over ranks of x @ weight.T.

        Args:
            x: [tokens, in / size].
            residual: [tokens, out], equal on every rank; not changed.

        Returns:
            [tokens, out], equal on every rank.
        """
        if self._adds_residual:
            out = self.matrix.multiply_add(x, residual)
        else:
            out = self.matrix.multiply(x)
        return out if self._group.size == 1 else self._group.all_reduce(out)

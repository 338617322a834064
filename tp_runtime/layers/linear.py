"""Matrices and the two ways of splitting them over ranks.

On a CPU one layout is chosen per matrix when it is loaded, by what was measured for one row
(float32, one thread, weights out of cache): BLAS streams memory fastest along the longer axis,
10-16 GB/s against 7-10 GB/s for `F.linear` on a wide matrix. More rows use the same storage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from tp_runtime.layers.products import NO_CONFIGS, Configs, Product, ProductPlan, config_for
from tp_runtime.ops.activation import silu_and_mul
from tp_runtime.ops.skinny import (
    SkinnyOp,
    skinny_linear,
    skinny_linear_residual,
    skinny_norm_gate_up,
    skinny_norm_linear,
)

if TYPE_CHECKING:
    from torch import Tensor

    from tp_runtime.group import TpGroup
    from tp_runtime.ops.norm import RmsNorm

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

    @property
    def weight(self) -> Tensor:
        """[out, in], contiguous on a GPU."""
        return self._storage.t() if self._transposed else self._storage

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


class Hidden(NamedTuple):
    """The residual stream between two linears, equal on every rank.

    stream: [tokens, hidden].
    normed: [tokens, hidden], normalised for the next linear, where that came with the sum over the
        ranks; else None, and the linear does it.
    """

    stream: Tensor
    normed: Tensor | None = None


class ColumnParallelLinear:
    """The norm before it, and each rank's output columns; no communication.

    Args:
        norm: of the input.
        weight: this rank's [out / size, in]; projections may be stacked (fused qkv).
        bias: [out / size] or None.
    """

    __slots__ = ("_configs", "bias", "matrix", "norm", "product")

    def __init__(self, norm: RmsNorm, weight: Tensor | Matrix, bias: Tensor | None = None) -> None:
        self.norm = norm
        self.matrix = weight if isinstance(weight, Matrix) else Matrix(weight)
        self.bias = bias
        self.product = Product(
            op=SkinnyOp.NORM_LINEAR,
            n=self.matrix.out_features,
            k=self.matrix.in_features,
            bias=bias is not None,
        )
        self._configs: Configs = NO_CONFIGS

    def use_products(self, plan: ProductPlan) -> None:
        self._configs = plan.configs(self.product)

    def __call__(self, hidden: Hidden) -> Tensor:
        """[tokens, in] -> [tokens, out / size]."""
        x, normed = hidden
        config = config_for(self._configs, x.shape[0])
        if config is not None:
            norm, weight = self.norm, self.matrix.weight
            return skinny_norm_linear(
                x, norm.weight, norm.eps, weight, self.bias, normed=normed, config=config
            )
        out = self.matrix.multiply(self.norm(x) if normed is None else normed)
        return out if self.bias is None else out.add_(self.bias)


class GatedLinear:
    """The norm before it, gate and up projections, and the activation; no communication.

    Args:
        norm: of the input.
        weight: this rank's [2 * inner / size, in], rows of gate before those of up.
    """

    __slots__ = ("_configs", "matrix", "norm", "product")

    def __init__(self, norm: RmsNorm, weight: Tensor) -> None:
        self.norm = norm
        self.matrix = Matrix(weight)
        self.product = Product(
            op=SkinnyOp.NORM_GATE_UP,
            n=self.matrix.out_features // 2,
            k=self.matrix.in_features,
        )
        self._configs: Configs = NO_CONFIGS

    def use_products(self, plan: ProductPlan) -> None:
        self._configs = plan.configs(self.product)

    def __call__(self, hidden: Hidden) -> Tensor:
        """[tokens, in] -> [tokens, inner / size]."""
        x, normed = hidden
        norm = self.norm
        config = config_for(self._configs, x.shape[0])
        if config is None:
            return silu_and_mul(self.matrix.multiply(norm(x) if normed is None else normed))
        return skinny_norm_gate_up(
            x, norm.weight, norm.eps, self.matrix.weight, normed=normed, config=config
        )


class RowParallelLinear:
    """Each rank has some input columns; the partial products are summed over the ranks.

    The residual rides along: rank 0 adds it inside its product, so that the sum is already the
    new residual stream, and bit-identical on every rank.

    Args:
        weight: this rank's [out, in / size].
        group: sums the partial results.
        next_norm: of the linear that follows; made together with the sum where that is faster.
    """

    __slots__ = ("_adds_residual", "_configs", "_group", "matrix", "next_norm", "product")

    def __init__(self, weight: Tensor, group: TpGroup, next_norm: RmsNorm | None = None) -> None:
        self.matrix = Matrix(weight)
        self._group = group
        self._adds_residual = group.rank == 0
        self.next_norm = next_norm
        self.product = Product(
            op=SkinnyOp.LINEAR_RESIDUAL, n=self.matrix.out_features, k=self.matrix.in_features
        )
        self._configs: Configs = NO_CONFIGS

    def use_products(self, plan: ProductPlan) -> None:
        self._configs = plan.configs(self.product)

    def __call__(self, x: Tensor, residual: Tensor) -> Hidden:
        """residual + sum over ranks of x @ weight.T.

        Args:
            x: [tokens, in / size].
            residual: [tokens, out], equal on every rank; not changed.

        Returns:
            [tokens, out].
        """
        out = self._partial(x, residual)
        group, norm = self._group, self.next_norm
        if group.size == 1:
            return Hidden(out)
        # a product of one row normalises it on the way, at no cost
        if norm is None or out.shape[0] == 1:
            return Hidden(group.all_reduce(out))
        return Hidden(*group.all_reduce_norm(out, norm.weight, norm.eps))

    def _partial(self, x: Tensor, residual: Tensor) -> Tensor:
        config = config_for(self._configs, x.shape[0])
        matrix = self.matrix
        if config is None:
            add = self._adds_residual
            return matrix.multiply_add(x, residual) if add else matrix.multiply(x)
        if self._adds_residual:
            return skinny_linear_residual(x, matrix.weight, residual, config=config)
        return skinny_linear(x, matrix.weight, config=config)

"""Layers against plain torch, whole and split over ranks."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F

from tests.fake_ranks import on_ranks
from tp_runtime.layers.linear import (
    ColumnParallelLinear,
    GatedLinear,
    Hidden,
    Matrix,
    RowParallelLinear,
)
from tp_runtime.layers.vocab import VocabParallelEmbedding, VocabParallelHead, VocabSlice
from tp_runtime.ops.activation import silu_and_mul
from tp_runtime.ops.norm import RmsNorm, rms_norm

if TYPE_CHECKING:
    from tp_runtime.group import TpGroup


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (32, 32), (2112, 16)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 16, 65])
def test_matrix_is_linear(shape: tuple[int, int], rows: int) -> None:
    torch.manual_seed(0)
    weight, x, residual = (
        torch.randn(shape),
        torch.randn(rows, shape[1]),
        torch.randn(rows, shape[0]),
    )
    matrix = Matrix(weight)
    torch.testing.assert_close(matrix.multiply(x), F.linear(x, weight))
    before = residual.clone()
    torch.testing.assert_close(matrix.multiply_add(x, residual), residual + F.linear(x, weight))
    assert torch.equal(residual, before)


@pytest.mark.parametrize("shape", [(40, 24), (24, 40)])
def test_matrix_gives_back_its_rows_and_holds_them_once(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    matrix = Matrix(weight)
    index = torch.tensor([3, 0, shape[0] - 1, 3])
    assert torch.equal(matrix.rows(index), weight[index])
    assert matrix.nbytes == weight.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [None, 3])
def test_rms_norm_is_its_formula(dtype: torch.dtype, heads: int | None) -> None:
    torch.manual_seed(1)
    shape = (5, 24) if heads is None else (5, heads, 24)
    x = torch.randn(shape, dtype=torch.float64) * 3
    weight = torch.rand(shape[1:], dtype=torch.float64) + 0.5
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    tolerance = 1e-6 if dtype == torch.float32 else 3e-2
    for actual in (
        rms_norm(x.to(dtype), weight.to(dtype), 1e-5),
        RmsNorm(weight.to(dtype), 1e-5)(x.to(dtype)),
    ):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(RmsNorm(torch.ones(8), 1e-6)(torch.zeros(2, 8)), torch.zeros(2, 8))


def test_silu_and_mul() -> None:
    gate, up = torch.randn(3, 8), torch.randn(3, 8)
    fused = torch.cat([gate, up], -1)
    torch.testing.assert_close(silu_and_mul(fused), F.silu(gate) * up)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_column_then_row_parallel_is_the_whole_block(size: int) -> None:
    torch.manual_seed(2)
    up, down = torch.randn(24, 10), torch.randn(10, 24)
    bias, x, residual = torch.randn(24), torch.randn(4, 10), torch.randn(4, 10)
    norm = RmsNorm(torch.rand(10), 1e-6)
    expected = residual + F.linear(F.linear(norm(x), up, bias).relu(), down)
    width = 24 // size

    def body(group: TpGroup) -> torch.Tensor:
        part = slice(group.rank * width, (group.rank + 1) * width)
        inner = ColumnParallelLinear(norm, up[part], bias[part].clone())(Hidden(x)).relu()
        return RowParallelLinear(down[:, part], group)(inner, residual).stream

    outputs = on_ranks(size, body)
    torch.testing.assert_close(outputs[0], expected)
    assert all(torch.equal(outputs[0], output) for output in outputs)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("size", [1, 2])
def test_the_next_norm_may_come_with_the_sum(size: int, rows: int) -> None:
    torch.manual_seed(5)
    down, gate_up = torch.randn(10, 24), torch.randn(12, 10)
    x, residual = torch.randn(rows, 24), torch.randn(rows, 10)
    norm = RmsNorm(torch.rand(10), 1e-3)
    stream = residual + x @ down.T
    width = 24 // size

    def body(group: TpGroup) -> tuple[Hidden, torch.Tensor, torch.Tensor]:
        part = slice(group.rank * width, (group.rank + 1) * width)
        hidden = RowParallelLinear(down[:, part], group, norm)(x[:, part], residual)
        column, gated = ColumnParallelLinear(norm, gate_up), GatedLinear(norm, gate_up)
        return hidden, column(hidden), gated(hidden)

    for hidden, column, gated in on_ranks(size, body):
        torch.testing.assert_close(hidden.stream, stream)
        assert (hidden.normed is not None) == (size > 1 and rows > 1)
        torch.testing.assert_close(column, norm(stream) @ gate_up.T)
        torch.testing.assert_close(gated, silu_and_mul(norm(stream) @ gate_up.T))


@pytest.mark.parametrize("vocab_size", [12, 13, 9])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_vocabulary_ends(vocab_size: int, size: int) -> None:
    torch.manual_seed(3)
    weight = torch.randn(vocab_size, 6)
    ids = torch.arange(vocab_size).flip(0)
    hidden = torch.randn(5, 6)
    norm = RmsNorm(torch.rand(6), 1e-6)

    def body(group: TpGroup) -> tuple[VocabSlice, torch.Tensor, torch.Tensor]:
        vocab = VocabSlice.of(vocab_size, rank=group.rank, size=group.size)
        part = torch.zeros(vocab.width, 6)
        part[: vocab.real] = weight[vocab.start : vocab.start + vocab.real]
        matrix = Matrix(part)
        rows = VocabParallelEmbedding(matrix, vocab, group)(ids)
        return vocab, rows, VocabParallelHead(norm, matrix, vocab)(hidden)

    results = on_ranks(size, body)
    for _, rows, _ in results:
        assert torch.equal(rows, weight[ids])
    logits = torch.cat([part for _, _, part in results], 1)
    torch.testing.assert_close(logits[:, :vocab_size], F.linear(norm(hidden), weight))
    assert bool((logits[:, vocab_size:] == float("-inf")).all())
    slices = [vocab for vocab, _, _ in results]
    assert slices[0].start == 0
    assert slices[-1].end >= vocab_size
    assert all(a.end == b.start for a, b in itertools.pairwise(slices))
    assert len({vocab.width for vocab in slices}) == 1

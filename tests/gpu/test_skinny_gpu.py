"""Skinny products on a GPU against float32, in eager mode and in chains of dependent launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tp_runtime.ops.skinny import (
    SkinnyConfig,
    SkinnyOp,
    skinny_linear,
    skinny_linear_residual,
    skinny_norm_gate_up,
    skinny_norm_linear,
)
from tp_runtime.ops.skinny_config import candidates
from tp_runtime.ops.skinny_measure import TOLERANCE, SkinnyInputs, SkinnyShape, best, measure
from tp_runtime.ops.skinny_measure import error_of as error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

OPS = list(SkinnyOp)
# rows that one kernel compiled serves
ROWS = {"one": [1], "16": [2, 3, 8, 15, 16], "32": [17, 25, 32]}
# n, k, bias: an odd n, and a k that no block divides; each a compilation of every configuration
SIZES = [(1001, 4096, True), (272, 1008, False)]


def configs(op: SkinnyOp, rows: int) -> list[SkinnyConfig]:
    dependent = torch.cuda.get_device_capability()[0] >= 9
    return candidates(op, rows=rows, n=4096, k=4096, dependent_launch=dependent)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("bucket", ROWS)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.value)
def test_every_configuration_against_float32(
    op: SkinnyOp, bucket: str, size: tuple[int, int, bool], dtype: torch.dtype
) -> None:
    n, k, bias = size
    for rows in ROWS[bucket]:
        shape = SkinnyShape(op=op, rows=rows, n=n, k=k, dtype=dtype, bias=bias)
        inputs = SkinnyInputs.random(shape, torch.device("cuda"), seed=rows)
        reference = inputs.reference()
        for config in configs(op, rows):
            torch.full_like(inputs.residual, torch.nan)  # what the allocator hands out next
            first = inputs.run(config)
            assert error(first, reference) <= TOLERANCE[dtype], (shape, config)
            assert torch.equal(first, inputs.run(config)), (shape, config)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.value)
def test_a_row_does_not_depend_on_the_others(op: SkinnyOp) -> None:
    inputs = SkinnyInputs.random(
        SkinnyShape(op=op, rows=16, n=512, k=4096), torch.device("cuda"), seed=3
    )
    for config in configs(op, 16):
        whole = inputs.run(config)
        for rows in (2, 5, 11):
            part = replace(
                inputs,
                x=inputs.x[:rows].contiguous(),
                residual=inputs.residual[:rows].contiguous(),
            )
            assert torch.equal(part.run(config), whole[:rows]), (config, rows)


class Chain:
    """Layers in which each product reads what the one before wrote, and buffers are reused."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        generator = torch.Generator("cuda").manual_seed(rows)

        def normal(*size: int) -> torch.Tensor:
            made = torch.randn(size, generator=generator, device="cuda", dtype=dtype)
            return made.mul_(size[-1] ** -0.5)

        self.x = normal(rows, 1024).mul_(32)
        self.norm = torch.ones(1024, device="cuda", dtype=dtype)
        self.qkv = [normal(1024, 1024) for _ in range(6)]
        self.gate_up = [normal(2 * 2048, 1024) for _ in range(6)]
        self.down = [normal(1024, 2048) for _ in range(6)]

    def run(self, index: int, *, dependent: bool) -> torch.Tensor:
        """The end of the chain, each operation with its configuration number `index`."""
        rows = self.x.shape[0]

        def config(op: SkinnyOp) -> SkinnyConfig:
            listed = configs(op, rows)
            chosen = listed[index % len(listed)]
            return replace(chosen, dependent_launch=dependent and chosen.dependent_launch)

        x = self.x
        for qkv, gate_up, down in zip(self.qkv, self.gate_up, self.down, strict=True):
            mixed = skinny_norm_linear(x, self.norm, 1e-5, qkv, config=config(SkinnyOp.NORM_LINEAR))
            mixed = skinny_linear(mixed, qkv, config=config(SkinnyOp.LINEAR))
            x = skinny_linear_residual(mixed, qkv, x, config=config(SkinnyOp.LINEAR_RESIDUAL))
            hidden = skinny_norm_gate_up(
                x, self.norm, 1e-5, gate_up, config=config(SkinnyOp.NORM_GATE_UP)
            )
            x = skinny_linear_residual(hidden, down, x, config=config(SkinnyOp.LINEAR_RESIDUAL))
        return x


@pytest.mark.parametrize("rows", [1, 4, 32])
def test_dependent_launches_change_nothing(rows: int) -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs programmatic dependent launch")
    chain = Chain(rows, torch.bfloat16)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for index in range(len(configs(SkinnyOp.LINEAR, rows))):
        with torch.cuda.stream(stream):
            apart = chain.run(index, dependent=False)
            assert torch.isfinite(apart).all()
            for _ in range(5):
                assert torch.equal(chain.run(index, dependent=True), apart), index
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                captured = chain.run(index, dependent=True)
            for _ in range(20):
                captured.fill_(torch.nan)
                graph.replay()
                assert torch.equal(captured, apart), index


def test_measuring_times_what_matches_and_chooses() -> None:
    shape = SkinnyShape(op=SkinnyOp.LINEAR_RESIDUAL, rows=1, n=4096, k=4096)
    samples = measure(shape, torch.device("cuda"), repeats=3)
    assert samples[0].config is None
    assert all(sample.median_us is not None and sample.refused is None for sample in samples)
    chosen = best(samples)
    fastest = min(samples, key=lambda sample: sample.median_us or 1e9)
    assert chosen in (fastest.config, None)

"""Skinny products without a GPU: what they compute, and which configurations are listed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from tp_runtime.ops.skinny import (
    SkinnyConfig,
    SkinnyOp,
    skinny_linear,
    skinny_linear_residual,
    skinny_norm_gate_up,
    skinny_norm_linear,
)
from tp_runtime.ops.skinny_config import candidates, refusal
from tp_runtime.ops.skinny_measure import SkinnySample, SkinnyShape, best

DOT = SkinnyConfig(kernel="dot", block_n=64, block_k=128)
FMA = SkinnyConfig(kernel="fma", block_n=8, block_k=512)


def test_what_the_operations_are() -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(3, 32), torch.randn(3, 24)
    weight, bias, norm = torch.randn(24, 32), torch.randn(24), torch.randn(32)
    torch.testing.assert_close(skinny_linear(x, weight, bias), x @ weight.T + bias)
    torch.testing.assert_close(skinny_linear_residual(x, weight, residual), residual + x @ weight.T)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm
    torch.testing.assert_close(
        skinny_norm_linear(x, norm, 1e-3, weight, bias), normed @ weight.T + bias
    )
    gate, up = torch.split(normed @ weight.T, 12, -1)
    torch.testing.assert_close(skinny_norm_gate_up(x, norm, 1e-3, weight), F.silu(gate) * up)
    # what is normalised already is not normalised again
    other = torch.randn(3, 32)
    torch.testing.assert_close(
        skinny_norm_linear(x, norm, 1e-3, weight, bias, normed=other), other @ weight.T + bias
    )
    gate, up = torch.split(other @ weight.T, 12, -1)
    torch.testing.assert_close(
        skinny_norm_gate_up(x, norm, 1e-3, weight, normed=other), F.silu(gate) * up
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "float16 or bfloat16"),
        ({"rows": 65}, "1 to 64 rows"),
        ({"rows": 0}, "1 to 64 rows"),
        ({"k": 4088}, "k a multiple of 16"),
        ({"config": FMA, "rows": 2}, "takes one row"),
        ({"config": SkinnyConfig(kernel="dot", block_n=128, block_k=256)}, "shared memory"),
    ],
)
def test_what_no_kernel_takes(changes: dict[str, object], reason: str) -> None:
    usual = {"rows": 8, "n": 4096, "k": 4096, "dtype": torch.bfloat16, "config": DOT}
    assert refusal(SkinnyOp.LINEAR, **usual) is None  # type: ignore[arg-type]
    refused = refusal(SkinnyOp.LINEAR, **{**usual, **changes})  # type: ignore[arg-type]
    assert refused is not None
    assert reason in refused


@pytest.mark.parametrize("op", list(SkinnyOp))
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 32, 64])
def test_candidates_are_distinct_and_may_run(op: SkinnyOp, rows: int) -> None:
    listed = candidates(op, rows=rows, n=4096, k=4096)
    assert len(listed) == len(set(listed)) >= 1
    for config in listed:
        assert config.kernel == ("fma" if rows == 1 else "dot")
        assert refusal(op, rows=rows, n=4096, k=4096, dtype=torch.float16, config=config) is None
    apart = candidates(op, rows=rows, n=4096, k=4096, dependent_launch=False)
    assert not any(config.dependent_launch for config in apart)


def test_no_candidates_where_no_kernel_runs() -> None:
    assert candidates(SkinnyOp.LINEAR, rows=65, n=4096, k=4096) == []
    assert candidates(SkinnyOp.LINEAR, rows=4, n=4096, k=100) == []


def test_a_configuration_travels_as_plain_values() -> None:
    assert SkinnyConfig.from_dict(DOT.to_dict()) == DOT
    with pytest.raises(TypeError, match="wheels"):
        SkinnyConfig.from_dict({**DOT.to_dict(), "wheels": 4})


def test_tensors_that_a_kernel_would_misread_are_refused() -> None:
    x, weight = torch.zeros(2, 32, dtype=torch.bfloat16), torch.zeros(8, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="contiguous"):
        skinny_linear(x, torch.zeros(32, 8, dtype=torch.bfloat16).t(), config=DOT)
    with pytest.raises(ValueError, match="expected a weight"):
        skinny_linear(x, weight[:, :16].contiguous(), config=DOT)
    with pytest.raises(ValueError, match="expected a residual"):
        skinny_linear_residual(x, weight, x, config=DOT)
    with pytest.raises(ValueError, match="on cpu, got"):
        skinny_linear(x, weight.float(), config=DOT)


def test_the_best_is_torch_unless_a_kernel_is_clearly_faster() -> None:
    torch_sample = SkinnySample(config=None, median_us=10.0)
    assert best([torch_sample, SkinnySample(config=DOT, median_us=9.0)]) == DOT
    assert best([torch_sample, SkinnySample(config=DOT, median_us=9.9)]) is None
    refused = SkinnySample(config=None, refused="too slow")
    assert best([refused, SkinnySample(config=DOT, median_us=9.0)]) == DOT
    with pytest.raises(ValueError, match="too slow"):
        best([refused])


def test_triton_is_not_imported_before_a_kernel_runs() -> None:
    code = "import sys, tp_runtime.ops.skinny_measure; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("n", "k"), [(32, 16), (96, 64), (960, 576), (3072, 4096), (28672, 4096), (128256, 4096)]
)
@pytest.mark.parametrize("op", SkinnyOp)
def test_a_timing_is_short_for_every_size_of_weight(n: int, k: int, op: SkinnyOp) -> None:
    shape = SkinnyShape(op=op, rows=1, n=n, k=k)
    copies, launches = shape.repetition
    assert launches % copies == 0
    assert 2 <= copies <= launches <= 512
    read_us = launches * shape.weight_bytes / 4e6
    assert 500 < max(read_us, launches * 2.0) < 3000  # a launch takes 2 us or more
    if shape.weight_bytes > 1 << 20:
        assert copies * shape.weight_bytes > 100 << 20  # more than L2 holds

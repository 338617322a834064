"""RoPE against its formula, and against transformers where that is installed."""

from __future__ import annotations

import math

import pytest
import torch

from tp_runtime.ops.rope import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    RopeTable,
    Scaling,
    inverse_frequencies,
    rotate,
)

LLAMA3 = Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
)


def test_rotation_is_a_complex_product() -> None:
    head_dim, positions = 8, torch.tensor([0, 3, 17])
    table = RopeTable(
        head_dim,
        theta=10000.0,
        max_positions=32,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    x = torch.randn(3, 2, head_dim)
    before = x.clone()
    rotated = rotate(x, *table.at(positions))
    assert torch.equal(x, before)
    for token, position in enumerate(positions.tolist()):
        for head in range(2):
            for pair in range(head_dim // 2):
                angle = position * 10000.0 ** (-2 * pair / head_dim)
                a, b = float(x[token, head, pair]), float(x[token, head, pair + head_dim // 2])
                turned = complex(a, b) * complex(math.cos(angle), math.sin(angle))
                assert float(rotated[token, head, pair]) == pytest.approx(turned.real, abs=1e-5)
                other = float(rotated[token, head, pair + head_dim // 2])
                assert other == pytest.approx(turned.imag, abs=1e-5)


@pytest.mark.parametrize("scaling", [None, LLAMA3, LinearScaling(factor=4.0)])
def test_a_table_is_the_same_however_many_rows_it_has(scaling: Scaling | None) -> None:
    most = 2 * (1 << 16) + 77  # made in three parts
    cpu = torch.device("cpu")
    frequency = inverse_frequencies(8, 10000.0, scaling)
    angle = torch.arange(most).float()[:, None] * frequency
    for rows in (most, 100):
        table = RopeTable(
            8, theta=10000.0, max_positions=rows, dtype=torch.bfloat16, device=cpu, scaling=scaling
        )
        cos, sin = (half[:, 0] for half in table.at(torch.arange(rows)))
        assert torch.equal(cos, torch.cat((angle.cos(),) * 2, -1)[:rows].bfloat16())
        assert torch.equal(sin, torch.cat((-angle.sin(), angle.sin()), -1)[:rows].bfloat16())


def test_rotation_takes_a_view_of_fused_heads() -> None:
    table = RopeTable(
        4, theta=100.0, max_positions=8, dtype=torch.float32, device=torch.device("cpu")
    )
    fused = torch.randn(2, 5, 4)
    cos, sin = table.at(torch.tensor([1, 5]))
    assert torch.equal(rotate(fused[:, :3], cos, sin), rotate(fused[:, :3].clone(), cos, sin))


def test_llama3_scaling_by_wavelength() -> None:
    plain = inverse_frequencies(128, 500000.0)
    scaled = inverse_frequencies(128, 500000.0, LLAMA3)
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4.0:
            expected = before
        elif wavelength > 8192 / 1.0:
            expected = before / 8.0
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected = (1 - smooth) * before / 8.0 + smooth * before
        assert after == pytest.approx(expected, rel=1e-5)
    ratios = plain / scaled
    assert float(ratios.min()) == 1.0
    assert float(ratios.max()) == 8.0
    assert bool(((ratios > 1.01) & (ratios < 7.9)).any())


def test_other_scalings() -> None:
    plain = inverse_frequencies(8, 10000.0)
    assert torch.equal(inverse_frequencies(8, 10000.0, LinearScaling(factor=4.0)), plain / 4.0)
    factors = FrequencyFactors(factors=(1.0, 2.0, 4.0, 8.0))
    expected = plain / torch.tensor([1.0, 2.0, 4.0, 8.0])
    assert torch.equal(inverse_frequencies(8, 10000.0, factors), expected)


def test_llama3_scaling_is_that_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    config = transformers.LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_theta": 500000.0,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    expected, attention_factor = utils.ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert attention_factor == 1.0
    torch.testing.assert_close(inverse_frequencies(128, 500000.0, LLAMA3), expected)

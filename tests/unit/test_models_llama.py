"""The decoder against transformers' own, and split over 1 to 4 ranks against itself."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest
import torch

from tests.fake_ranks import DenseAttention, on_ranks
from tp_runtime.errors import UnsupportedModel
from tp_runtime.group import TpGroup
from tp_runtime.models.config import NAMED_CONFIGS, ModelConfig
from tp_runtime.models.convert import huggingface_config, tensor_shapes
from tp_runtime.models.llama import LlamaModel
from tp_runtime.models.loading import load_model
from tp_runtime.models.partition import Partition, tp_sizes
from tp_runtime.models.random_weights import RandomWeights
from tp_runtime.models.weights import ShardReader
from tp_runtime.ops.rope import Llama3Scaling

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

CPU = torch.device("cpu")
TINY = NAMED_CONFIGS["tiny"]
IDS = torch.tensor([5, 500, 0, 77, 300, 508, 12])

VARIANTS = {
    "llama": TINY,
    # 9 / 3 heads, a vocabulary and an inner size that divide by nothing
    "uneven": dataclasses.replace(
        TINY, num_heads=9, num_kv_heads=3, vocab_size=509, intermediate_size=97, tied_head=True
    ),
    "llama3": dataclasses.replace(
        TINY,
        rope_scaling=Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=256
        ),
    ),
    "mistral": dataclasses.replace(TINY, architecture="mistral"),
    "qwen2": dataclasses.replace(TINY, architecture="qwen2", qkv_bias=True, tied_head=True),
    "qwen3": dataclasses.replace(TINY, architecture="qwen3", qk_norm=True, head_dim=32),
}


def build(config: ModelConfig, group: TpGroup, dtype: torch.dtype = torch.float32) -> LlamaModel:
    partition = Partition.of(config, rank=group.rank, size=group.size)
    source = RandomWeights(config, seed=3, device=CPU)
    reader = ShardReader(source, partition, dtype=dtype, device=CPU)
    return LlamaModel(config, partition, reader, group=group, dtype=dtype)


def run(model: LlamaModel, ids: Tensor, chunks: list[int]) -> tuple[Tensor, Tensor]:
    """(hidden, logits of this rank) of all tokens, fed in chunks."""
    attention = DenseAttention(model.shape.num_layers, model.shape.kv_heads)
    hidden, start = [], 0
    for chunk in chunks:
        positions = torch.arange(start, start + chunk)
        hidden.append(model.forward(ids[start : start + chunk], positions, attention))
        start += chunk
    states = torch.cat(hidden)
    return states, model.logits(states)


def whole(config: ModelConfig) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        return run(build(config, TpGroup.single(CPU)), IDS, [len(IDS)])


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_split_equals_whole(name: str, size: int) -> None:
    config = VARIANTS[name]
    hidden, logits = whole(config)
    results = on_ranks(size, lambda group: run(build(config, group), IDS, [4, 1, 2]))
    gathered = torch.cat([part for _, part in results], 1)
    assert bool((gathered[:, config.vocab_size :] == float("-inf")).all())
    torch.testing.assert_close(gathered[:, : config.vocab_size], logits, rtol=1e-4, atol=2e-5)
    for states, _ in results:
        assert torch.equal(states, results[0][0])
        torch.testing.assert_close(states, hidden, rtol=1e-4, atol=2e-5)


def test_two_collectives_a_layer_and_one_for_the_embedding() -> None:
    def body(group: TpGroup) -> int:
        run(build(TINY, group), IDS, [len(IDS)])
        return int(vars(group)["reduced"])

    assert on_ranks(2, body) == [2 * TINY.num_layers + 1] * 2


def test_shape_is_that_of_the_rank() -> None:
    shapes = on_ranks(2, lambda group: build(VARIANTS["uneven"], group).shape)
    assert [(s.q_heads, s.kv_heads, s.vocab_start, s.vocab_end) for s in shapes] == [
        (6, 2, 0, 255),
        (6, 2, 255, 510),
    ]
    assert {s.vocab_size for s in shapes} == {509}


def test_padded_groups_add_exactly_nothing() -> None:
    config = VARIANTS["uneven"]
    padded = Partition.of(config, rank=0, size=1)
    padded = dataclasses.replace(
        padded,
        kv_heads=dataclasses.replace(padded.kv_heads, width=4),
        q_heads=dataclasses.replace(padded.q_heads, width=12),
        intermediate=dataclasses.replace(padded.intermediate, width=104),
    )
    reader = ShardReader(
        RandomWeights(config, seed=3, device=CPU), padded, dtype=torch.float64, device=CPU
    )
    group = TpGroup.single(CPU)
    with torch.inference_mode():
        model = LlamaModel(config, padded, reader, group=group, dtype=torch.float64)
        _, logits = run(model, IDS, [len(IDS)])
        _, expected = run(build(config, group, torch.float64), IDS, [len(IDS)])
    # float64 inside, float32 out: only another order of exact sums could show
    torch.testing.assert_close(logits, expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("smollm2-135m", (1, 2, 3, 4)),
        ("tiny", (1, 2, 3, 4, 5, 6)),
        ("llama-3-8b", (1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12)),
    ],
)
def test_sizes_that_work_are_named(name: str, sizes: tuple[int, ...]) -> None:
    config = NAMED_CONFIGS[name]
    assert tp_sizes(config) == sizes
    with pytest.raises(UnsupportedModel, match=f"TP size of 16.*{', '.join(map(str, sizes))}$"):
        Partition.of(config, rank=0, size=16)


def test_bfloat16_stays_near_float32() -> None:
    _, expected = whole(TINY)
    with torch.inference_mode():
        _, logits = run(build(TINY, TpGroup.single(CPU), torch.bfloat16), IDS, [len(IDS)])
    assert logits.dtype == torch.bfloat16
    assert float((logits - expected).abs().max()) < 0.15


def test_random_weights_are_cut_not_drawn_again() -> None:
    source = RandomWeights(TINY, seed=1, device=CPU)
    name, shape = "model.layers.0.mlp.down_proj.weight", (64, 96)
    full = source.read(name, shape)
    assert torch.equal(source.read(name, shape, columns=(48, 96)), full[:, 48:])
    assert torch.equal(source.read(name, shape, rows=(5, 9)), full[5:9])
    other = RandomWeights(TINY, seed=2, device=CPU).read(name, shape)
    assert not torch.equal(full, other)
    assert float(full.mean()) == pytest.approx(0.0, abs=0.005)
    assert float(full.var()) * 96 == pytest.approx(1.0, rel=0.05)
    assert float(torch.corrcoef(torch.stack([full.flatten(), other.flatten()]))[0, 1]) < 0.05


@pytest.mark.parametrize("name", VARIANTS)
def test_safetensors_folder_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_file = pytest.importorskip("safetensors.torch").save_file
    config = VARIANTS[name]
    if config.num_heads * config.head_dim != config.hidden_size:
        config = dataclasses.replace(config, hidden_size=72)
    source = RandomWeights(config, seed=5, device=CPU)
    tensors = {key: source.read(key, shape) for key, shape in tensor_shapes(config)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(huggingface_config(config)))
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path), dtype=torch.float32, local_files_only=True
    )
    with torch.inference_mode():
        expected = reference(IDS[None]).logits[0]
        loaded = load_model(str(tmp_path), group=TpGroup.single(CPU), dtype=torch.float32)
        model = loaded.model
        attention = DenseAttention(config.num_layers, model.shape.kv_heads)
        hidden = model.forward(IDS, torch.arange(len(IDS)), attention)
        torch.testing.assert_close(model.logits(hidden), expected, rtol=1e-4, atol=5e-5)
    assert loaded.config == config

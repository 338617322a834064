"""Named models with few and narrow layers, whose heads are those that GPU kernels take."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import torch

from tp_runtime.models.config import ModelConfig, named_config
from tp_runtime.models.convert import huggingface_config, tensor_shapes
from tp_runtime.models.llama import LlamaModel
from tp_runtime.models.partition import Partition
from tp_runtime.models.random_weights import RandomWeights
from tp_runtime.models.weights import ShardReader

if TYPE_CHECKING:
    from pathlib import Path

    from tp_runtime.group import TpGroup

VOCAB = 512


def shrunk_config(name: str, **changes: Any) -> ModelConfig:
    """A named configuration with 4 layers, 2 KV heads, the same head_dim and group size."""
    full = named_config(name)
    small: dict[str, Any] = {
        "num_layers": 4,
        "num_heads": 2 * full.num_heads // full.num_kv_heads,
        "num_kv_heads": 2,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "vocab_size": VOCAB,
        "max_positions": 4096,
    }
    return dataclasses.replace(full, **(small | changes))


def shrunk_model(
    name: str, *, group: TpGroup, dtype: torch.dtype, seed: int = 0, **changes: Any
) -> LlamaModel:
    config = shrunk_config(name, **changes)
    partition = Partition.of(config, rank=group.rank, size=group.size)
    source = RandomWeights(config, seed=seed, device=group.device)
    reader = ShardReader(source, partition, dtype=dtype, device=group.device)
    return LlamaModel(config, partition, reader, group=group, dtype=dtype)


def save_shrunk(name: str, folder: Path) -> None:
    """The model with random weights as Hugging Face stores it, heads as wide as it is."""
    from safetensors.torch import save_file

    full = shrunk_config(name)
    config = shrunk_config(name, hidden_size=full.num_heads * full.head_dim)
    source = RandomWeights(config, seed=5, device=torch.device("cpu"))
    tensors = {key: source.read(key, shape) for key, shape in tensor_shapes(config)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(huggingface_config(config)))

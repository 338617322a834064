"""The decode attention problem of a model, from its configuration alone: no weights are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tp_runtime.errors import ConfigError
from tp_runtime.models.base import ModelShape
from tp_runtime.models.config import ModelConfig, config_from_huggingface, named_config
from tp_runtime.models.gguf_weights import GgufWeights
from tp_runtime.models.loading import resolve_path
from tp_runtime.models.partition import Partition

if TYPE_CHECKING:
    import torch


def model_config(ref: str) -> ModelConfig:
    """What `--model` names.

    Raises:
        ModelNotFound: nothing.
        ModelFormatError, UnsupportedModel: the files are damaged or of another kind.
    """
    path = resolve_path(ref)
    if path is None:
        return named_config(ref.split(":")[1])
    return config_from_huggingface(path) if path.is_dir() else GgufWeights(path).config


def model_shape(config: ModelConfig, *, tp_size: int, dtype: torch.dtype) -> ModelShape:
    """Rank 0's part of a model; every rank's has the same sizes.

    Raises:
        UnsupportedModel: the heads cannot be divided over so many ranks.
    """
    if tp_size < 1:
        raise ConfigError(f"tp_size={tp_size}: expected at least 1")
    part = Partition.of(config, rank=0, size=tp_size)
    return ModelShape(
        num_layers=config.num_layers,
        q_heads=part.q_heads.width,
        kv_heads=part.kv_heads.width,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        vocab_start=part.vocab.start,
        vocab_end=part.vocab.end,
        max_positions=config.max_positions,
        dtype=dtype,
        eos_token_ids=config.eos_token_ids,
    )

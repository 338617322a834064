"""Decoders and where their weights come from."""

from __future__ import annotations

from tp_runtime.models.base import Attention, DecodeModel, ModelShape
from tp_runtime.models.config import ModelConfig
from tp_runtime.models.loading import LoadedModel, load_model

__all__ = ["Attention", "DecodeModel", "LoadedModel", "ModelConfig", "ModelShape", "load_model"]

"""Tensor-parallel decode for one host.

Rank 0 measures and selects decode attention backends, a CPU channel over Unix sockets ships the
plan and small per-step hints to the other ranks, and every rank runs the same steps.

Names are imported when they are first used, so that `import tp_runtime.broadcast` needs no torch.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tp_runtime.async_runner import AsyncRunner
    from tp_runtime.config import RuntimeConfig
    from tp_runtime.engine import Engine, EngineStatistics
    from tp_runtime.errors import TpRuntimeError
    from tp_runtime.graphs import DecodeGraphs
    from tp_runtime.group import TpGroup
    from tp_runtime.hints import ShapeHints, broadcast_tensors
    from tp_runtime.models.base import Attention, DecodeModel, ModelShape, QkNorm
    from tp_runtime.ranks import RankInfo
    from tp_runtime.requests import RequestOutput, TextStream
    from tp_runtime.root_loop import Tokenizer
    from tp_runtime.sampling import SamplingParams
    from tp_runtime.staging import StagingRing

_HOMES = {
    "AsyncRunner": "async_runner",
    "Attention": "models.base",
    "DecodeGraphs": "graphs",
    "DecodeModel": "models.base",
    "Engine": "engine",
    "EngineStatistics": "engine",
    "ModelShape": "models.base",
    "QkNorm": "models.base",
    "RankInfo": "ranks",
    "RequestOutput": "requests",
    "RuntimeConfig": "config",
    "SamplingParams": "sampling",
    "ShapeHints": "hints",
    "StagingRing": "staging",
    "TextStream": "requests",
    "Tokenizer": "root_loop",
    "TpGroup": "group",
    "TpRuntimeError": "errors",
    "broadcast_tensors": "hints",
}

__all__ = [
    "AsyncRunner",
    "Attention",
    "DecodeGraphs",
    "DecodeModel",
    "Engine",
    "EngineStatistics",
    "ModelShape",
    "QkNorm",
    "RankInfo",
    "RequestOutput",
    "RuntimeConfig",
    "SamplingParams",
    "ShapeHints",
    "StagingRing",
    "TextStream",
    "Tokenizer",
    "TpGroup",
    "TpRuntimeError",
    "broadcast_tensors",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

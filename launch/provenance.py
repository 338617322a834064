"""What a result was made with: model, versions and settings, for the JSON of the verbs that run."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tp_runtime.config import ResolvedConfig

DISTRIBUTIONS = ("tp-runtime", "torch", "triton", "flashinfer-python", "nvidia-cudnn-frontend")
"""Those that can change what a run computes, or how fast."""


def provenance(resolved: ResolvedConfig) -> dict[str, Any]:
    """The keys "model", "versions" and "settings" of a result."""
    return {
        "model": resolved.config.model,
        "versions": versions(DISTRIBUTIONS),
        "settings": settings(resolved),
    }


def settings(resolved: ResolvedConfig) -> dict[str, dict[str, Any]]:
    """Every setting by name: its "value" and its "source"."""
    return {
        name: {"value": getattr(resolved.config, name), "source": source}
        for name, source in resolved.sources.items()
    }


def versions(names: Iterable[str]) -> dict[str, str | None]:
    """The version of each distribution; None where it is not installed."""
    return {name: _version(name) for name in names}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

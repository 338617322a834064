"""What a capture made, in words that are equal on all ranks if the graphs are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphDescriptor:
    """What one graph is; no address, which differs between ranks.

    Attributes:
        bucket, variant, q_len: which graph; q_len tokens per row.
        inputs, outputs: (name, shape, dtype). Outputs are empty where nothing was captured.
        details: what the owner of the step function adds, such as backend and table width.
    """

    bucket: int
    variant: int
    q_len: int
    inputs: tuple[tuple[str, tuple[int, ...], str], ...]
    outputs: tuple[tuple[str, tuple[int, ...], str], ...]
    details: tuple[tuple[str, str | int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """What a capture made.

    Attributes:
        graphs: in the order of capture.
        captures: whether these are CUDA graphs; False where the step runs without.
        digest: SHA-256 (hex) of the descriptors and of `captures`; equal on ranks that agree.
        seconds: how long it took.
        device_bytes: device memory that it took, 0 on a CPU.
    """

    graphs: tuple[GraphDescriptor, ...]
    captures: bool
    digest: str
    seconds: float
    device_bytes: int


def signature_of(tensors: Any, name: str = "") -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """(name, shape, dtype) of every tensor in what a step function returned."""
    if isinstance(tensors, Tensor):
        return ((name, tuple(tensors.shape), str(tensors.dtype).removeprefix("torch.")),)
    if isinstance(tensors, Mapping):
        items = sorted(tensors.items())
    elif isinstance(tensors, (list, tuple)):
        items = [(str(index), value) for index, value in enumerate(tensors)]
    else:
        return ()
    found = (signature_of(value, f"{name}.{key}" if name else str(key)) for key, value in items)
    return tuple(entry for entries in found for entry in entries)


def digest_of(graphs: tuple[GraphDescriptor, ...], *, captures: bool) -> str:
    words = [[g.bucket, g.variant, g.q_len, g.inputs, g.outputs, g.details] for g in graphs]
    text = json.dumps({"captures": captures, "graphs": words}, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

"""What a model, the settings and this machine together ask of decode attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tp_runtime.planning import decode_shape
from tp_runtime.selection import DecodeShape, DeviceInfo

if TYPE_CHECKING:
    import torch

    from tp_runtime.config import RuntimeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One rank's part of it.

    Args:
        buckets: batch sizes that get a graph. layers: of the model.
    """

    shape: DecodeShape
    device: torch.device
    info: DeviceInfo
    buckets: tuple[int, ...]
    layers: int


def problem_of(config: RuntimeConfig, model: str, *, tp_size: int) -> Problem:
    """As an engine with these settings would pose it, without reading the weights.

    Raises:
        ConfigError: the settings do not fit the model or the machine.
        ModelError: the model cannot be read, or not be divided over `tp_size` ranks.
    """
    import torch

    from tp_runtime.connection import resolve_device
    from tp_runtime.launch.model_shape import model_config, model_shape
    from tp_runtime.sizing import resolve_sizes

    device = resolve_device(config, 0)
    dtype = config.dtype_on(device.type)
    part = model_shape(model_config(model), tp_size=tp_size, dtype=getattr(torch, dtype))
    sizes = resolve_sizes(config, part, device=device, ranks_on_host=tp_size)
    return Problem(
        shape=decode_shape(part, sizes),
        device=device,
        info=DeviceInfo.of(device),
        buckets=sizes.buckets,
        layers=part.num_layers,
    )

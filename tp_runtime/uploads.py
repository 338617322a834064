"""Small host arrays to the device without waiting for it.

A copy from ordinary memory makes the host wait until the device has caught up with it, which
would end the lead that the host has over the device in steady decode. Here arrays are packed into
one pinned buffer and go in one copy, in stream order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tp_runtime.staging import StagingRing

if TYPE_CHECKING:
    from torch import Tensor

_ALIGNMENT = 16
_FIRST_CAPACITY_BYTES = 1 << 16
_DTYPES: dict[str, torch.dtype] = {
    "int64": torch.int64,
    "int32": torch.int32,
    "float32": torch.float32,
}


class Uploader:
    """Sends arrays from the thread that drives the steps; on a CPU it only copies them.

    Args:
        device: where the arrays go, on the stream that is current at the call.
        depth: how many calls later the tensors of a call are overwritten, in stream order. More
            calls than that ahead of the device, the host waits: a step with prompts makes five.
    """

    def __init__(self, device: torch.device, *, depth: int = 16) -> None:
        self._device = device
        self._depth = depth
        self._capacity_bytes = 0
        self._ring: StagingRing | None = None

    def send(self, *arrays: np.ndarray[Any, Any]) -> tuple[Tensor, ...]:
        """The same arrays on the device.

        Args:
            arrays: int64, int32 or float32, of any shape.

        Returns:
            One tensor for each. On a GPU they are for work that is enqueued now: `depth` calls
            later they hold something else. What is to last is cloned.

        Raises:
            DeadlineExceeded: the device has not taken an earlier copy in time.
        """
        if self._device.type == "cpu":
            return tuple(torch.from_numpy(array.copy()) for array in arrays)
        places, end = [], 0
        for array in arrays:
            places.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        with self._ring_of(end).lease() as lease:
            packed = lease.host.numpy()
            for place, array in zip(places, arrays, strict=True):
                packed[place : place + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
            on_device = lease.mirror
            on_device[:end].copy_(lease.host[:end], non_blocking=True)
            lease.record()
        return tuple(
            on_device[place : place + array.nbytes]
            .view(_DTYPES[array.dtype.name])
            .view(array.shape)
            for place, array in zip(places, arrays, strict=True)
        )

    def _ring_of(self, wanted_bytes: int) -> StagingRing:
        """A ring whose buffers are large enough; the caching allocators keep what is replaced
        until its copies are done."""
        if self._ring is None or wanted_bytes > self._capacity_bytes:
            self._capacity_bytes = max(
                _FIRST_CAPACITY_BYTES, 1 << max(0, wanted_bytes - 1).bit_length()
            )
            self._ring = StagingRing(
                self._depth,
                shape=(self._capacity_bytes,),
                dtype=torch.uint8,
                device=self._device,
                name="uploads",
            )
        return self._ring

"""Tensors that rank 0 has and its peers need, described first and then sent in one piece.

`ShapeHints` goes ahead on the CPU channel, so that every peer can allocate; the contents of device
tensors follow in one packed broadcast of the group. What starts on the CPU and is small rides on
the CPU channel with its hints: a socket is faster there than any collective.

Nothing here waits for a device: shapes come from the tensors' metadata on rank 0 and from the
hints on its peers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import msgpack
import numpy as np
import torch

from tp_runtime.errors import ProtocolError
from tp_runtime.shape_hints import ALIGNMENT, INLINE_BYTES, Place, ShapeHints, TensorHint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = ["Place", "ShapeHints", "TensorHint", "broadcast_tensors"]

_KIND: Final = "tensors"
_VERSION: Final = 1


class HintChannel(Protocol):
    """The part of a CpuTpBroadcaster that hints use."""

    def publish(self, message: Any, /) -> object: ...

    def receive(self) -> Any: ...


class HintGroup(Protocol):
    """The part of a TpGroup that tensors use."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def broadcast(self, t: Tensor, /) -> Tensor: ...

    def broadcast_bytes(self, data: bytes | None, /) -> bytes: ...


def broadcast_tensors(
    named: Mapping[str, Tensor] | None,
    *,
    group: HintGroup,
    channel: HintChannel | None = None,
    row_multiples: Mapping[str, int] | None = None,
    inline_bytes: int = INLINE_BYTES,
) -> dict[str, Tensor]:
    """Give every rank the tensors of rank 0.

    Args:
        named: on rank 0 the tensors, on the group's device or on the CPU; None on its peers.
        group: whose ranks take part; all of them make this call, in the same order.
        channel: joined by the same ranks; without one the hints go by the group.
        row_multiples: on rank 0, names whose first dimension must be a multiple of something.
        inline_bytes: CPU tensors up to this many bytes in all go with the hints.

    Returns:
        The tensors by name. On rank 0 the given ones; on its peers contiguous ones on the same
        kind of device, those of one place sharing one allocation.

    Raises:
        ValueError: the tensors cannot be sent, or a peer passed some. Raised on rank 0 before
            anything is sent: its peers then still wait, so abort the channel or send again.
        ProtocolError: rank 0 sent something else than tensors.
        BroadcastError, TpGroupError: the transport failed.
    """
    if group.rank == 0:
        if named is None:
            raise ValueError("rank 0: expected the tensors to send, got None")
        return _send(dict(named), group, channel, row_multiples, inline_bytes)
    if named is not None:
        raise ValueError(f"rank {group.rank}: only rank 0 passes tensors, peers pass None")
    return _receive(group, channel)


def _send(
    named: dict[str, Tensor],
    group: HintGroup,
    channel: HintChannel | None,
    row_multiples: Mapping[str, int] | None,
    inline_bytes: int,
) -> dict[str, Tensor]:
    hints = ShapeHints.of(
        named, device=group.device, row_multiples=row_multiples, inline_bytes=inline_bytes
    )
    if group.size == 1:
        return named
    inline = [
        _bytes_of(named[name]).numpy().tobytes()
        for name, hint in hints.tensors
        if hint.place is Place.CPU_INLINE
    ]
    ints = hints.to_ints()
    message = {
        "kind": _KIND,
        "version": _VERSION,
        "names": [name for name, _ in hints.tensors],
        "hints": ints,
        "inline": b"".join(inline),
    }
    if channel is not None:
        channel.publish(message)
    else:
        group.broadcast_bytes(msgpack.packb(message | {"hints": ints.tolist()}))
    for place in (Place.DEVICE, Place.CPU):
        offsets, _ = hints.offsets(place)
        if offsets:
            group.broadcast(_pack([named[name] for name in offsets]))
    return named


def _receive(group: HintGroup, channel: HintChannel | None) -> dict[str, Tensor]:
    if channel is not None:
        message = channel.receive()
    else:
        message = _unpacked(group.broadcast_bytes(None), group.rank)
    hints, inline = _checked(message, group.rank)
    tensors: dict[str, Tensor] = {}
    for place in Place:
        offsets, nbytes = hints.offsets(place)
        if not offsets:
            continue
        if place is Place.CPU_INLINE:
            buffer = inline
        else:
            device = group.device if place is Place.DEVICE else torch.device("cpu")
            buffer = group.broadcast(torch.empty(nbytes, dtype=torch.uint8, device=device))
        tensors |= {
            name: _unpack(buffer, offsets[name], hint)
            for name, hint in hints.tensors
            if hint.place is place
        }
    return {name: tensors[name] for name, _ in hints.tensors}


def _unpacked(body: bytes, rank: int) -> Any:
    try:
        return msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(
            f"rank {rank}: expected the hints of tensors, got {len(body)} bytes of something "
            f"else ({error!r}); do all ranks make the same calls in the same order?"
        ) from error


def _checked(message: Any, rank: int) -> tuple[ShapeHints, Tensor]:
    """The hints, and the bytes that came with them laid out like a packed buffer."""
    kind = message.get("kind") if isinstance(message, dict) else type(message).__name__
    if not isinstance(message, dict) or kind != _KIND or message.get("version") != _VERSION:
        raise ProtocolError(
            f"rank {rank}: expected a message of kind {_KIND!r} version {_VERSION}, got {kind!r}; "
            f"do all ranks make the same calls in the same order?"
        )
    names, flat, inline = (message.get(key) for key in ("names", "hints", "inline"))
    if isinstance(flat, np.ndarray):
        flat = flat.tolist()
    if not (
        isinstance(names, list)
        and all(isinstance(name, str) for name in names)
        and isinstance(flat, list)
        and all(type(value) is int for value in flat)
        and isinstance(inline, bytes)
    ):
        raise ProtocolError(f"rank {rank}: the fields of a {_KIND!r} message have wrong types")
    hints = ShapeHints.from_ints(names, flat)
    carried = [hint for _, hint in hints.tensors if hint.place is Place.CPU_INLINE]
    if sum(hint.nbytes for hint in carried) != len(inline):
        raise ProtocolError(
            f"rank {rank}: hints describe {sum(hint.nbytes for hint in carried)} bytes of CPU "
            f"tensors, but {len(inline)} came"
        )
    _, nbytes = hints.offsets(Place.CPU_INLINE)
    buffer = np.zeros(nbytes, dtype=np.uint8)
    source, target = 0, 0
    for hint in carried:
        end = source + hint.nbytes
        buffer[target : target + hint.nbytes] = np.frombuffer(inline[source:end], dtype=np.uint8)
        source, target = end, target + -(-hint.nbytes // ALIGNMENT) * ALIGNMENT
    return hints, torch.from_numpy(buffer)


def _pack(tensors: list[Tensor]) -> Tensor:
    """One uint8 buffer that holds them at 16-byte boundaries, by one concatenation."""
    pieces = []
    for t in tensors:
        raw = _bytes_of(t)
        pieces.append(raw)
        if gap := -raw.shape[0] % ALIGNMENT:
            pieces.append(raw.new_zeros(gap))
    return torch.cat(pieces)


def _unpack(buffer: Tensor, offset: int, hint: TensorHint) -> Tensor:
    """A view of the buffer; the alignment makes the change of type possible."""
    return buffer[offset : offset + hint.nbytes].view(hint.dtype).view(hint.shape)


def _bytes_of(t: Tensor) -> Tensor:
    return t.detach().contiguous().view(-1).view(torch.uint8)

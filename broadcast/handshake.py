"""What must be equal on all ranks before a channel exists."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tp_runtime.broadcast.codec import field

if TYPE_CHECKING:
    from tp_runtime.broadcast.config import BroadcasterConfig

# Compared in this order; the first that differs is named.
_FIELDS: tuple[tuple[str, type], ...] = (
    ("run_id", str),
    ("epoch", int),
    ("group", str),
    ("world_size", int),
    ("max_message_bytes", int),
)
_ADVICE = {
    "run_id": "it belongs to another run",
    "epoch": "it belongs to another restart of the run",
    "group": "it belongs to another tensor-parallel group",
    "world_size": "start all ranks with one world size",
    "max_message_bytes": "give all ranks one configuration",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which channel a process wants to join, and as whom."""

    rank: int
    world_size: int
    run_id: str
    epoch: int
    group: str
    max_message_bytes: int
    token: str

    @classmethod
    def of(cls, config: BroadcasterConfig, *, rank: int, world_size: int) -> Identity:
        return cls(
            rank=rank,
            world_size=world_size,
            run_id=config.run_id,
            epoch=config.epoch,
            group=config.group,
            max_message_bytes=config.max_message_bytes,
            token=config.token,
        )

    def body(self) -> dict[str, Any]:
        """For the wire."""
        names = ("rank", *(name for name, _ in _FIELDS), "token")
        return {name: getattr(self, name) for name in names}

    def difference(self, other: dict[str, Any], *, of: str) -> str | None:
        """The first field in which another rank's body differs, as a sentence; None if none does.

        The token is only compared, never told.

        Raises:
            ProtocolError: a field is missing or of another type.
        """
        if not hmac.compare_digest(self.token.encode(), field(other, "token", str).encode()):
            return f"field token: {of} has another token"
        for name, kind in _FIELDS:
            expected, got = getattr(self, name), field(other, name, kind)
            if expected != got:
                return f"field {name}: expected {expected!r}, {of} has {got!r}; {_ADVICE[name]}"
        return None

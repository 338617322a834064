"""Settings of the channel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from tp_runtime.errors import ConfigError

WaitMode = Literal["latency", "balanced", "efficient"]

MAX_MESSAGE_BYTES = 64 << 20
# The length field of the header is an unsigned 32-bit number.
_LARGEST_MESSAGE_BYTES = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcasterConfig:
    """How long to wait, how to wait, and which run this is. Equal on every rank.

    Args:
        join_timeout_s: time for all ranks to meet, seconds.
        timeout_s: default deadline of every other call, seconds. For `receive` it bounds the
            SILENCE of rank 0, which sends heartbeats while it has nothing to publish.
        wait: what a peer does while it waits. "latency" spins and yields, "balanced" sleeps
            until shortly before the message that rank 0 announced and spins only then,
            "efficient" blocks in the kernel. No mode spins when ranks outnumber cores.
        max_message_bytes: largest encoded message, bytes.
        run_id: name of this run; all ranks of a run agree on it.
        epoch: restart count of the run; a rank of an older epoch is refused.
        group: name of the tensor-parallel group within the run.
        token: shared secret of the run, checked in the handshake; "" asks for none.
        checksum: add a CRC-32 to every frame. Off by default: the kernel copies the bytes from
            one process to the other, so there is no link that could damage them, and it costs
            0.9 us for 3.3 KB. Meant for debugging.

    Raises:
        ConfigError: a value is out of range.
    """

    join_timeout_s: float = 120.0
    timeout_s: float = 30.0
    wait: WaitMode = "balanced"
    max_message_bytes: int = MAX_MESSAGE_BYTES
    run_id: str = ""
    epoch: int = 0
    group: str = ""
    token: str = field(default="", repr=False)
    checksum: bool = False

    def __post_init__(self) -> None:
        for name in ("join_timeout_s", "timeout_s"):
            value = getattr(self, name)
            # `not (value > 0)` also refuses NaN
            if not value > 0:
                raise ConfigError(f"{name}: expected a positive number of seconds, got {value!r}")
        if self.wait not in get_args(WaitMode):
            known = ", ".join(get_args(WaitMode))
            raise ConfigError(f"wait: expected one of {known}, got {self.wait!r}")
        if not 1 <= self.max_message_bytes <= _LARGEST_MESSAGE_BYTES:
            raise ConfigError(
                f"max_message_bytes: expected 1 to {_LARGEST_MESSAGE_BYTES}, "
                f"got {self.max_message_bytes}"
            )
        if self.epoch < 0:
            raise ConfigError(f"epoch: expected 0 or more, got {self.epoch}")

    @property
    def heartbeat_s(self) -> float:
        """Longest silence of rank 0 while it has nothing to publish, seconds."""
        return min(1.0, self.timeout_s / 4)

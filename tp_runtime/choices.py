"""A choice of rank 0 that every rank takes, or none: how products run, how devices sum."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from tp_runtime.errors import BroadcastError, PlanFormatError, PlanMismatch
from tp_runtime.selection.agreement import news_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from tp_runtime.broadcast import CpuTpBroadcaster

T = TypeVar("T")

_MAX_REASON_CHARS = 1000  # an acknowledgement takes a few thousand bytes


def lead_choice(
    channel: CpuTpBroadcaster, kind: str, plan: Any, *, verb: str, timeout_s: float
) -> None:
    """Rank 0: returns when every rank has taken the plan.

    Args:
        kind: of the message, such as "sums".
        plan: as MessagePack takes it.
        verb: what the ranks do by it, for errors, such as "sum as rank 0 chose".

    Raises:
        PlanMismatch: some rank refused; the channel is aborted.
    """
    receipt = channel.confirm({"kind": kind, "plan": plan}, timeout_s=timeout_s)
    if not receipt.committed:
        listed = "; ".join(f"rank {r}: {why}" for r, why in sorted(receipt.refusals.items()))
        error = PlanMismatch(f"not every rank can {verb}: {listed}")
        channel.abort(str(error))
        raise error


def follow_choice(
    channel: CpuTpBroadcaster,
    kind: str,
    read: Callable[[object], T],
    *,
    verb: str,
    timeout_s: float,
    progress: Callable[[str, int, int], None] | None = None,
) -> T:
    """The others: rank 0's plan, once every rank has taken it.

    Args:
        read: makes it of the message; raises PlanFormatError if this rank cannot take it.
        progress: called with what rank 0 announces until then.

    Raises:
        PlanMismatch: this rank or another one refused.
    """
    message = channel.receive(timeout_s=timeout_s)
    while (news := news_in(message)) is not None:
        if progress is not None:
            progress(*news)
        message = channel.receive(timeout_s=timeout_s)
    try:
        if not isinstance(message, dict) or message.get("kind") != kind:
            raise PlanFormatError(f"expected a plan of {kind}, got {type(message).__name__}")
        plan = read(message.get("plan"))
    except PlanFormatError as error:
        # rank 0 ends the channel as soon as it knows, which may overtake its decision
        with suppress(BroadcastError):
            channel.acknowledge(False, str(error)[:_MAX_REASON_CHARS], timeout_s=timeout_s)
        raise PlanMismatch(f"this rank cannot {verb}: {error}") from error
    if not channel.acknowledge(True, timeout_s=timeout_s):
        raise PlanMismatch(f"another rank cannot {verb}; see rank 0's error")
    return plan

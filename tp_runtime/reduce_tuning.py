"""Chooses how the ranks sum: measured by all of them together, decided on rank 0, for every rank.

Without the dynamic selection the static default of `ReducePlan.usual` stays in use, which every
rank derives from the size of the group alone. Graphs carry the plan's digest in their descriptors.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tp_runtime.errors import PlanFormatError, PlanMismatch
from tp_runtime.reduce_plan import NO_PEER_REDUCE, ReducePlan

if TYPE_CHECKING:
    from tp_runtime.broadcast import CpuTpBroadcaster
    from tp_runtime.group import TpGroup

__all__ = ["agree_reduce_plan", "tune_sums"]

log = logging.getLogger(__name__)


def tune_sums(
    channel: CpuTpBroadcaster,
    group: TpGroup,
    *,
    peer_memory: bool = True,
    measured: bool,
    timeout_s: float,
) -> ReducePlan:
    """Choose and use; all ranks call it together, before they capture.

    Args:
        peer_memory: False: NCCL sums everything, also in a group that has peer memory.
        measured: time the ways instead of keeping the default.
        timeout_s: for the ranks that wait for rank 0.

    Raises:
        PlanMismatch: a rank could not take rank 0's plan.
    """
    if not peer_memory:
        group.use_reduce_plan(NO_PEER_REDUCE)
    elif measured and group.peer_reduce is not None:
        from tp_runtime.ops.peer_reduce_measure import choose_sums, measure_sums

        times = measure_sums(group)
        chosen = choose_sums(times) if group.rank == 0 else None
        group.use_reduce_plan(agree_reduce_plan(channel, chosen, timeout_s=timeout_s))
        log.info("sums: %s of %s", group.reduce_plan.to_message(), dict(times))
    return group.reduce_plan


def agree_reduce_plan(
    channel: CpuTpBroadcaster, plan: ReducePlan | None, *, timeout_s: float
) -> ReducePlan:
    """Rank 0's plan, on every rank, after all of them have read it.

    Args:
        plan: of rank 0; None on the others.

    Raises:
        PlanMismatch: some rank could not read it.
    """
    if plan is not None:
        message = {"kind": "sums", "plan": plan.to_message()}
        receipt = channel.confirm(message, timeout_s=timeout_s)
        if not receipt.committed:
            listed = "; ".join(f"rank {r}: {why}" for r, why in sorted(receipt.refusals.items()))
            error = PlanMismatch(f"not every rank can sum as rank 0 chose: {listed}")
            channel.abort(str(error))
            raise error
        return plan
    received = channel.receive(timeout_s=timeout_s)
    problem = ""
    try:
        if not isinstance(received, dict) or received.get("kind") != "sums":
            raise PlanFormatError(f"expected a plan of sums, got {type(received).__name__}")
        plan = ReducePlan.from_message(received.get("plan"))
    except PlanFormatError as error:
        problem = str(error)
    committed = channel.acknowledge(plan is not None, problem, timeout_s=timeout_s)
    if plan is None:
        raise PlanMismatch(f"this rank cannot sum as rank 0 chose: {problem}")
    if not committed:
        raise PlanMismatch("another rank cannot sum as rank 0 chose; see rank 0's error")
    return plan

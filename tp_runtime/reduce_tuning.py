"""Chooses how the ranks sum: measured by all of them together, decided on rank 0, for every rank.

Without the dynamic selection the static default of `ReducePlan.usual` stays in use, which every
rank derives from the size of the group alone. Graphs carry the plan's digest in their descriptors.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tp_runtime.choices import follow_choice, lead_choice
from tp_runtime.reduce_plan import NO_PEER_REDUCE, ReducePlan

if TYPE_CHECKING:
    from tp_runtime.broadcast import CpuTpBroadcaster
    from tp_runtime.group import TpGroup

__all__ = ["agree_reduce_plan", "tune_sums"]

log = logging.getLogger(__name__)

_VERB = "sum as rank 0 chose"


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
    if not peer_memory or group.peer_reduce is None:
        group.use_reduce_plan(NO_PEER_REDUCE)
    elif not measured:
        group.use_reduce_plan(ReducePlan.usual(group.size))
    else:
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
    if plan is None:
        return follow_choice(
            channel, "sums", ReducePlan.from_message, verb=_VERB, timeout_s=timeout_s
        )
    lead_choice(channel, "sums", plan.to_message(), verb=_VERB, timeout_s=timeout_s)
    return plan

"""A plan that `select --save` wrote: read, compared with a run, and cut to its buckets."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING

from tp_runtime.errors import BackendUnavailable, ConfigError
from tp_runtime.selection import PRIORITY_VERSION, BackendPlan, device_check

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tp_runtime.selection import DecodeShape, DeviceInfo, Eligibility


def read_plan(path: Path) -> BackendPlan:
    """Read a saved plan.

    Raises:
        ConfigError: the file cannot be read.
        PlanFormatError: it is no whole plan.
    """
    try:
        return BackendPlan.load(path)
    except OSError as error:
        raise ConfigError(f"plan {path}: cannot be read: {error.strerror or error}") from error


def fitted(
    plan: BackendPlan,
    *,
    shape: DecodeShape,
    device: DeviceInfo,
    buckets: Sequence[int],
    named: bool,
    eligibility: Eligibility,
) -> tuple[BackendPlan, list[str]]:
    """The part of a plan that a run takes, and why the run cannot take it; nothing if it can.

    Args:
        buckets: of the run, ascending; the last is the largest batch.
        named: a person chose them, so that the plan must have each. Else those of the plan serve,
            up to the first that holds the largest batch.
        eligibility: what the settings allow; a plan that uses anything else does not fit.
    """
    problems = [
        f"{field}: expected {mine!r} here, got {theirs!r}"
        for field, mine, theirs in (
            ("device", device.name, plan.device),
            ("priority_version", PRIORITY_VERSION, plan.priority_version),
            *(
                (f"shape.{name}", getattr(shape, name), getattr(plan.shape, name, None))
                for name in shape.__slots__
            ),
        )
        if mine != theirs
    ]
    end = bisect_left(plan.buckets, buckets[-1]) + 1
    wanted = tuple(buckets) if named else plan.buckets[:end]
    if end > len(plan.buckets) or not set(wanted) <= set(plan.buckets):
        asked = f"each of {list(buckets)}" if named else f"one of at least {buckets[-1]}"
        problems.append(f"buckets: expected {asked} here, got {list(plan.buckets)}")
    else:
        entries = tuple(entry for entry in plan.entries if entry.bucket in wanted)
        plan = replace(plan, entries=entries)
    if plan.shape == shape:
        try:
            refusals = device_check(shape, device, eligibility=eligibility)(plan)
        except BackendUnavailable as error:
            return plan, [*problems, str(error)]
        used = {plan.priority[0], *plan.backends}
        problems += [f"{name}: {why}" for name, why in refusals.items() if name in used]
    return plan, problems

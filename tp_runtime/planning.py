"""Decides which decode backend serves which step: measured when asked for, else by priority.

The decision is made on rank 0 alone. What the settings exclude is excluded here, before anything
is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from tp_runtime.errors import BackendUnavailable
from tp_runtime.selection import (
    PRIORITY_VERSION,
    BackendPlan,
    BenchReport,
    BenchRequest,
    DecodeShape,
    DeviceInfo,
    Eligibility,
    available_backends,
    measure_in_child,
    select,
)
from tp_runtime.selection.bench import REFERENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from tp_runtime.config import RuntimeConfig
    from tp_runtime.models.base import ModelShape
    from tp_runtime.sizing import Sizes

SELECTION_TIME_LIMIT_S = 120.0
"""Measuring stops after this; what was measured by then decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A plan and where it came from.

    Args:
        refusals: every backend that takes no part, with the reason.
        report: what was measured; None when nothing was.
    """

    plan: BackendPlan
    refusals: Mapping[str, str]
    report: BenchReport | None


def decode_shape(shape: ModelShape, sizes: Sizes) -> DecodeShape:
    """The decode attention problem that a model poses to one rank."""
    return DecodeShape(
        q_heads=shape.q_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=str(shape.dtype).removeprefix("torch."),
        page_size=sizes.page_size,
        table_width=sizes.table_width,
    )


def eligibility_of(config: RuntimeConfig) -> Eligibility:
    """What the settings allow. Raises ConfigError for a name that is no backend."""
    return Eligibility(pin=config.decode_backend, disabled=frozenset(config.disable_decode_backend))


def decide(
    config: RuntimeConfig,
    shape: DecodeShape,
    device: torch.device,
    *,
    buckets: Sequence[int],
    threads: int,
    time_limit_s: float = SELECTION_TIME_LIMIT_S,
    progress: Callable[[int, int], None] | None = None,
) -> Decision:
    """Measure (when the dynamic selection is on) and select.

    Args:
        threads: torch threads of one rank, on a CPU.
        progress: called with (cells done, cells in all).

    Raises:
        ConfigError: the settings name a backend that does not exist.
        BackendUnavailable: no backend may serve this shape on this device.
    """
    info = DeviceInfo.of(device)
    offers = available_backends(shape, info, eligibility=eligibility_of(config))
    refusals = {name: reason for name, reason in offers if reason is not None}
    priority = [name for name, reason in offers if reason is None]
    if not priority:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
        raise BackendUnavailable(f"no decode backend may serve {shape} on {info.name}: {reasons}")
    report: BenchReport | None = None
    if config.enable_dynamic_decode_backend:
        # the reference reads the whole table: it is raced only when nothing else is left
        candidates = [name for name in priority if name != REFERENCE] or priority
        request = BenchRequest(
            shape=shape,
            device=str(device),
            buckets=tuple(buckets),
            candidates=tuple(candidates),
            threads=threads,
        )
        report = measure_in_child(request, time_limit_s, progress=progress)
        refusals |= report.refusals
        priority = [name for name in priority if name not in report.refusals]
    if report is not None and report.samples:
        plan = select(
            report.samples,
            priority=priority,
            mode=cast("Literal['stable', 'adaptive']", config.selection_mode),
            buckets=buckets,
            priority_version=PRIORITY_VERSION,
            shape=shape,
            device=info.name,
        )
    else:
        plan = BackendPlan.fixed(
            priority, buckets, priority_version=PRIORITY_VERSION, shape=shape, device=info.name
        )
    return Decision(plan=plan, refusals=refusals, report=report)

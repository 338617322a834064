"""Decides which decode backend serves which step: measured when asked for, else by priority.

The decision is made on rank 0 alone. What the settings exclude is excluded here, before anything
is measured. A measured plan is kept, and a later start under the same circumstances takes it.
A plan in a file that the settings name is taken as it is, or refused.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from tp_runtime.caches import cache_directory
from tp_runtime.errors import BackendUnavailable, ConfigError, PlanFormatError, SelectionError
from tp_runtime.saved_plan import fitted, read_plan
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
from tp_runtime.selection.fingerprint import fingerprint_of
from tp_runtime.selection.histogram import LengthHistogram
from tp_runtime.selection.plan_cache import KeptPlan, PlanCache
from tp_runtime.selection.report import disturbed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from tp_runtime.config import RuntimeConfig
    from tp_runtime.models.base import ModelShape
    from tp_runtime.sizing import Sizes

log = logging.getLogger(__name__)

SELECTION_TIME_LIMIT_S = 120.0
"""Measuring stops after this; what was measured by then decides."""

MAX_VARIANTS = 2
MARGIN = 0.05

Source = Literal["fixed priority", "measured", "cached", "from file", "from rank 0"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A plan and where it came from.

    Args:
        refusals: every backend that takes no part, with the reason.
        report: what was measured, now or when the plan was kept; None when nothing was.
        source: of the plan; "from rank 0" on its peers.
        seconds: that deciding took, measuring included.
    """

    plan: BackendPlan
    refusals: Mapping[str, str]
    report: BenchReport | None
    source: Source
    seconds: float = 0.0


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
    layers: int,
    threads: int,
    time_limit_s: float = SELECTION_TIME_LIMIT_S,
    progress: Callable[[str, int, int], None] | None = None,
) -> Decision:
    """Take the plan of a file or the kept one, or measure and select; else go by priority.

    Args:
        layers: of the model; they share the host's planning of a step.
        threads: torch threads of one rank, on a CPU.
        progress: see `measure_in_child`.

    Raises:
        ConfigError: the settings name a backend that does not exist, a file of lengths that is
            none, or a plan that this run cannot take.
        BackendUnavailable: no backend may serve this shape on this device.
    """
    began = time.monotonic()
    info = DeviceInfo.of(device)
    offers = available_backends(shape, info, eligibility=eligibility_of(config))
    refusals = {name: reason for name, reason in offers if reason is not None}
    priority = [name for name, reason in offers if reason is None]
    if not priority:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
        raise BackendUnavailable(f"no decode backend may serve {shape} on {info.name}: {reasons}")
    if config.decode_plan is not None:
        return Decision(
            plan=_from_file(config, config.decode_plan, shape, info, buckets),
            refusals=refusals,
            report=None,
            source="from file",
            seconds=time.monotonic() - began,
        )
    kept: KeptPlan | None = None
    source: Source = "fixed priority"
    if config.enable_dynamic_decode_backend:
        # a step is planned on the host while the one before it runs, if two are in flight
        hidden = config.async_decode and device.type == "cuda"
        choice = _Choice(
            request=_request(config, shape, device, priority, tuple(buckets), threads),
            info=info,
            rule={
                "priority": priority,
                "mode": config.selection_mode,
                "max_variants": MAX_VARIANTS,
                "margin": MARGIN,
                "priority_version": PRIORITY_VERSION,
                "host_share": 0.0 if hidden else 1.0 / layers,
            },
            settings={"pin": config.decode_backend, "disabled": config.disable_decode_backend},
        )
        kept, source = choice.make(time_limit_s, progress, use_cache=config.plan_cache)
    if kept is None:
        plan = BackendPlan.fixed(
            priority, buckets, priority_version=PRIORITY_VERSION, shape=shape, device=info.name
        )
    else:
        plan = kept.plan
        refusals |= kept.report.refusals
    return Decision(
        plan=plan,
        refusals=refusals,
        report=None if kept is None else kept.report,
        source=source if plan.measured else "fixed priority",
        seconds=time.monotonic() - began,
    )


def _from_file(
    config: RuntimeConfig, path: str, shape: DecodeShape, info: DeviceInfo, buckets: Sequence[int]
) -> BackendPlan:
    """The part of a saved plan that this run takes. Raises ConfigError: it cannot take it."""
    advice = (
        "save one by `tp-runtime select --save` with the settings of this run on this device, or "
        "unset decode_plan"
    )
    try:
        whole = read_plan(Path(path))
    except (ConfigError, PlanFormatError) as error:
        raise ConfigError(f"decode_plan={path!r}: {error}; {advice}") from error
    plan, problems = fitted(
        whole,
        shape=shape,
        device=info,
        buckets=buckets,
        named=config.decode_buckets is not None,
        eligibility=eligibility_of(config),
    )
    if problems:
        raise ConfigError(
            f"decode_plan={path!r} does not fit this run: {'; '.join(problems)}; {advice}"
        )
    return plan


def _request(
    config: RuntimeConfig,
    shape: DecodeShape,
    device: torch.device,
    priority: Sequence[str],
    buckets: tuple[int, ...],
    threads: int,
) -> BenchRequest:
    # the reference reads the whole table: it is raced only when nothing else is left
    candidates = [name for name in priority if name != REFERENCE] or priority
    request = BenchRequest(
        shape=shape,
        device=str(device),
        buckets=buckets,
        candidates=tuple(candidates),
        threads=threads,
    )
    if config.length_histogram is None:
        return request
    return LengthHistogram.read(config.length_histogram).added_to(request)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """What is to be measured, and how it decides.

    Args:
        rule: the arguments of `select`; settings: what a person pinned and excluded.
    """

    request: BenchRequest
    info: DeviceInfo
    rule: Mapping[str, Any]
    settings: Mapping[str, Any]

    def make(
        self,
        time_limit_s: float,
        progress: Callable[[str, int, int], None] | None,
        *,
        use_cache: bool,
    ) -> tuple[KeptPlan | None, Source]:
        """The kept plan, or a fresh one, which is then kept; None if nothing could be measured."""
        cache = PlanCache(cache_directory() / "plans")
        fingerprint = self._fingerprint() if use_cache else None
        if fingerprint is not None:
            kept = cache.load(fingerprint)
            if kept is not None:
                return kept, "cached"
        try:
            report = measure_in_child(self.request, time_limit_s, progress=progress)
        except SelectionError as error:
            log.warning("nothing was measured, the fixed priority holds: %s", error)
            return None, "fixed priority"
        fresh = KeptPlan(plan=self._select(report), report=report)
        if not fresh.plan.measured:
            log.warning("nothing was measured, the fixed priority holds: see the refusals")
        # half of the cells, or noise, are no basis for later starts
        sound = fresh.plan.measured and report.complete and not disturbed(fresh.plan)
        if fingerprint is not None and sound:
            cache.store(fingerprint, fresh)
        return fresh, "measured"

    def _fingerprint(self) -> dict[str, Any] | None:
        try:
            return fingerprint_of(self.request, self.info, rule={**self.rule, **self.settings})
        except SelectionError as error:
            log.warning("plans are neither kept nor used again: %s", error)
            return None

    def _select(self, report: BenchReport) -> BackendPlan:
        rule = dict(self.rule)
        priority = [name for name in rule.pop("priority") if name not in report.refusals]
        if not priority:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in report.refusals.items())
            raise BackendUnavailable(
                f"no decode backend that was measured on {self.info.name} may serve: {reasons}"
            )
        mode = cast("Literal['stable', 'adaptive']", rule.pop("mode"))
        return select(
            report.samples,
            priority=priority,
            mode=mode,
            buckets=self.request.buckets,
            shape=self.request.shape,
            device=self.info.name,
            **rule,
        )

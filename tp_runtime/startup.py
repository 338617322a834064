"""Brings one connected rank up: sizes, plan, cache, graphs, in an order that every rank shares.

Every decision is rank 0's and is confirmed over the channel before any rank acts on it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tp_runtime.attention import KvCache
from tp_runtime.device_state import DeviceState
from tp_runtime.errors import ConfigError
from tp_runtime.planning import Decision, decide, decode_shape, eligibility_of
from tp_runtime.reduce_tuning import tune_sums
from tp_runtime.selection import (
    BackendSet,
    DecodeShape,
    DeviceInfo,
    agree,
    agree_alike,
    announce,
    device_check,
)
from tp_runtime.sizing import Sizes, block_bytes, resolve_sizes
from tp_runtime.step_runner import StepRunner
from tp_runtime.tuning import tune

if TYPE_CHECKING:
    from tp_runtime.broadcast import CpuTpBroadcaster
    from tp_runtime.config import RuntimeConfig
    from tp_runtime.graphs import CaptureReport
    from tp_runtime.group import TpGroup
    from tp_runtime.models.base import DecodeModel, ModelShape
    from tp_runtime.step_times import StepTimes

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""(stage, done, total), on rank 0 and on peers alike."""

_NEWS_S = 2.0
"""Between two messages that tell the peers how far rank 0's selection is."""


def share_sizes(
    config: RuntimeConfig, channel: CpuTpBroadcaster, group: TpGroup, model: DecodeModel
) -> Sizes:
    """Rank 0's sizes, on every rank."""
    own = resolve_sizes(config, model.shape, device=group.device, ranks_on_host=group.size)
    if group.rank == 0:
        channel.publish({"num_blocks": own.num_blocks})
        return own
    message = channel.receive(timeout_s=config.join_timeout_s)
    return Sizes(
        max_seq_len=own.max_seq_len,
        page_size=own.page_size,
        block_size=own.block_size,
        num_blocks=message["num_blocks"],
        slots=own.slots,
        buckets=own.buckets,
    )


class _Herald:
    """Shows rank 0's progress, and sends it to the peers every few seconds.

    They wait on the channel, not in a collective. Sending is also how rank 0 learns in the middle
    of a measurement that a peer has died: the error ends it.
    """

    def __init__(self, channel: CpuTpBroadcaster, progress: Progress, *, timeout_s: float) -> None:
        self._channel = channel
        self._progress = progress
        self._timeout_s = timeout_s
        self._stage = ""
        self._next_s = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        self._progress(stage, done, total)
        now = time.monotonic()
        if stage != self._stage or now >= self._next_s:
            self._stage, self._next_s = stage, now + _NEWS_S
            announce(self._channel, stage, done, total, timeout_s=self._timeout_s)


def _herald(
    channel: CpuTpBroadcaster, group: TpGroup, progress: Progress, timeout_s: float
) -> Progress:
    return progress if group.rank else _Herald(channel, progress, timeout_s=timeout_s)


def plan_backends(
    config: RuntimeConfig,
    channel: CpuTpBroadcaster,
    group: TpGroup,
    shape: DecodeShape,
    sizes: Sizes,
    progress: Progress,
    *,
    layers: int,
) -> Decision:
    """Rank 0 decides; every rank checks the plan on its own device and agrees to one.

    Raises:
        BroadcastError: a rank was lost, also while rank 0 measured.
        BackendUnavailable: no backend may serve this model on these devices.
        PlanMismatch: the ranks could not agree.
    """
    decision: Decision | None = None
    if group.rank == 0:
        decision = decide(
            config,
            shape,
            group.device,
            buckets=sizes.buckets,
            layers=layers,
            threads=torch.get_num_threads() if group.device.type == "cpu" else 0,
            progress=_herald(channel, group, progress, config.join_timeout_s),
        )
    check = device_check(shape, DeviceInfo.of(group.device), eligibility=eligibility_of(config))
    plan = agree(
        channel,
        None if decision is None else decision.plan,
        check=check,
        timeout_s=config.join_timeout_s,
        progress=progress,
    )
    if decision is None:
        return Decision(plan=plan, refusals={}, report=None, source="from rank 0")
    return dataclasses.replace(decision, plan=plan)


@dataclass(frozen=True, kw_only=True)
class RankRuntime:
    """One rank with all it needs to run steps, before its graphs are captured."""

    sizes: Sizes
    decision: Decision
    runner: StepRunner

    @property
    def plan_digest(self) -> str | None:
        """None where nothing was measured: the fixed priority needs no agreement on numbers."""
        plan = self.decision.plan
        return plan.digest if plan.measured else None


def build_rank(
    config: RuntimeConfig,
    channel: CpuTpBroadcaster,
    group: TpGroup,
    model: DecodeModel,
    times: StepTimes,
    progress: Progress,
) -> RankRuntime:
    """Cache, plan and step runner of a loaded model; all ranks call it together."""
    sizes = share_sizes(config, channel, group, model)
    shape = decode_shape(model.shape, sizes)
    decision = plan_backends(
        config, channel, group, shape, sizes, progress, layers=model.shape.num_layers
    )
    tune_sums(
        channel,
        group,
        peer_memory=config.all_reduce != "nccl",
        measured=config.enable_dynamic_decode_backend,
        timeout_s=config.join_timeout_s,
    )
    products = tune(
        model,
        channel,
        group,
        most_rows=sizes.slots,
        measured=config.enable_dynamic_decode_backend,
        timeout_s=config.join_timeout_s,
        progress=_herald(channel, group, progress, config.join_timeout_s),
    )
    with torch.inference_mode():
        cache, state = _allocate(model.shape, sizes, group.device)
        runner = StepRunner(
            model=model,
            group=group,
            state=state,
            cache=cache,
            plan=decision.plan,
            backends=BackendSet(shape, group.device),
            buckets=decision.plan.buckets,  # a plan from a file may have others than the sizes
            times=times,
            products=products,
        )
    return RankRuntime(sizes=sizes, decision=decision, runner=runner)


def _allocate(shape: ModelShape, sizes: Sizes, device: torch.device) -> tuple[KvCache, DeviceState]:
    try:
        cache = KvCache(shape, num_pages=sizes.num_pages, page_size=sizes.page_size, device=device)
        state = DeviceState(
            slots=sizes.slots,
            table_width=sizes.table_width,
            pages_per_block=sizes.pages_per_block,
            device=device,
        )
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:
        # what torch raises: TypeError is a size beyond 64 bits
        wanted = sizes.num_blocks * block_bytes(shape, sizes.block_size)
        raise ConfigError(
            f"no memory on {device} for a KV cache of {sizes.num_blocks} blocks "
            f"({wanted / 2**30:.1f} GiB) and {sizes.slots} requests: lower kv_cache_tokens "
            "or max_batch_size"
        ) from error
    return cache, state


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What all ranks captured alike. report: this rank's. rank_reports: what each rank said it
    holds ("rank", "plan_digest", "capture_digest"), on rank 0 only."""

    report: CaptureReport
    rank_reports: tuple[dict[str, Any], ...]


def capture_rank(
    config: RuntimeConfig,
    channel: CpuTpBroadcaster,
    group: TpGroup,
    runtime: RankRuntime,
    progress: Progress,
) -> Captured:
    """Capture on all ranks together and prove that it was the same.

    Raises:
        CaptureError: a graph could not be captured here.
        PlanMismatch: some rank captured something else; names the rank and the field.
    """
    group.barrier()
    runtime.runner.capture(lambda done, total: progress("capture", done, total))
    capture = runtime.runner.drop(
        _dropped_anywhere(channel, group, runtime.runner.dropped, config.join_timeout_s)
    )
    plan = runtime.decision.plan
    digests = {"plan_digest": runtime.plan_digest, "capture_digest": capture.digest}
    held = {
        **digests,
        "buckets": list(plan.buckets),
        "backends": [list(plan.variants(bucket)) for bucket in plan.buckets],
    }
    peers = agree_alike(
        channel,
        "the captured plan",
        held,
        root=group.rank == 0,
        detail=json.dumps(digests),
        timeout_s=config.join_timeout_s,
    )
    reports = [{"rank": 0, **digests}]
    reports += [{"rank": rank, **json.loads(text)} for rank, text in sorted(peers.items())]
    return Captured(
        report=capture,
        rank_reports=tuple(reports) if group.rank == 0 else (),
    )


def _dropped_anywhere(
    channel: CpuTpBroadcaster,
    group: TpGroup,
    mine: dict[tuple[int, int], str],
    timeout_s: float,
) -> dict[tuple[int, int], str]:
    """The graphs that any rank could not capture, so that all go without them together."""
    root = group.rank == 0
    texts = agree_alike(
        channel,
        "the end of the capture",
        {"captured": True},
        root=root,
        detail=json.dumps(list(mine), separators=(",", ":")),
        timeout_s=timeout_s,
    )
    if not root:
        graphs = channel.receive(timeout_s=timeout_s)
        return {(bucket, graph): reason for bucket, graph, reason in graphs}
    dropped = dict(mine)
    for rank, text in sorted(texts.items()):
        for bucket, graph in json.loads(text):
            dropped.setdefault((bucket, graph), f"rank {rank} had no memory to capture it")
    channel.publish([[*graph, reason] for graph, reason in dropped.items()])
    return dropped

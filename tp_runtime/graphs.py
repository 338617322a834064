"""CUDA graphs of a step function, one per (bucket, variant), over one set of static buffers.

Works around any step function: it is called with views of the buffers, cut to the bucket, and
replayed later with whatever the host has written into them. Without a GPU the same function runs
over the same views, only not from a graph; `captures` and the report say so.

Padding is the caller's: before a replay it must reset every row from the batch size to the bucket.
"""

from __future__ import annotations

import logging
import numbers
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor

from tp_runtime.errors import CaptureError, ConfigError
from tp_runtime.graph_report import CaptureReport, GraphDescriptor, digest_of, signature_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "CaptureReport",
    "DecodeGraphs",
    "GraphDescriptor",
    "GraphStatistics",
    "StepFunction",
]

log = logging.getLogger(__name__)

WARM_UPS = 2
"""Eager runs before each capture: libraries initialise and choose their kernels in the first."""


class StepFunction(Protocol):
    """What is captured. It must allocate nothing that outlives it but its outputs, must not wait
    for the device, and must do no harm with the values that the inputs hold during capture."""

    def __call__(self, inputs: dict[str, Tensor], bucket: int, variant: int) -> Any:
        """inputs: views of the static buffers, cut to the bucket. Returns tensors: one, or a dict,
        list or tuple of them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphStatistics:
    """Graphs held now, and replays since the start (static runs where there are no graphs)."""

    graphs: int
    replays: int


@dataclass(frozen=True, slots=True)
class _Buffer:
    """How a static buffer was at capture; a graph has its address burnt in."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    address: int

    @classmethod
    def of(cls, t: Tensor) -> _Buffer:
        return cls(tuple(t.shape), tuple(t.stride()), t.dtype, t.device, t.data_ptr())


class DecodeGraphs:
    """Captures a step function for every bucket and variant, and replays it. One owner thread.

    Args:
        step_fn: see `StepFunction`. Called alike on every rank, so it may use collectives.
        inputs: static buffers, each with one row per request, or per token where q_len > 1, of
            the largest bucket. They are kept; the host writes into them before each replay.
        buckets: batch sizes to capture; sorted and made unique here.
        variants: how many graphs a bucket has, as a mapping or a function; at least 1.
        device: CUDA captures; any other runs the step function as it is.
        q_len: tokens per row.
        describe: adds details to the descriptor of (bucket, variant).

    Raises:
        ConfigError: buckets, variants or buffers do not fit each other.
    """

    def __init__(
        self,
        step_fn: StepFunction,
        *,
        inputs: Mapping[str, Tensor],
        buckets: Sequence[int],
        variants: Callable[[int], int] | Mapping[int, int],
        device: torch.device,
        q_len: int = 1,
        describe: Callable[[int, int], Mapping[str, str | int]] | None = None,
    ) -> None:
        self._step_fn = step_fn
        self._inputs = dict(inputs)
        self._device = device
        self._q_len = q_len
        self._describe = describe
        self._buckets = _checked_buckets(buckets)
        count = variants.get if isinstance(variants, Mapping) else variants
        self._variants = {bucket: _checked_count(bucket, count(bucket)) for bucket in self._buckets}
        self._views = {bucket: self._views_of(bucket) for bucket in self._buckets}
        self._recorded: dict[str, _Buffer] = {}
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph | None] = {}
        self._outputs: dict[tuple[int, int], Any] = {}
        self._dropped: dict[tuple[int, int], str] = {}
        self._report: CaptureReport | None = None
        self._closed = False
        self._replays = 0

    @property
    def captures(self) -> bool:
        """Whether graphs are captured; False: the step function runs over the static buffers."""
        return self._device.type == "cuda"

    @property
    def buckets(self) -> tuple[int, ...]:
        """Ascending."""
        return self._buckets

    def views(self, bucket: int) -> dict[str, Tensor]:
        """The static buffers cut to a bucket, as the step function gets them."""
        return dict(self._views[bucket])

    def capture(
        self,
        progress: Callable[[int, int], None] | None = None,
        *,
        before_each: Callable[[], None] | None = None,
    ) -> CaptureReport:
        """Capture everything, the largest bucket first, so that later graphs fit its memory.

        Call it when weights, cache and process groups exist. A second call returns the same report.

        Args:
            progress: called with (graphs done, graphs in all).
            before_each: called before each graph where several ranks capture together, such as
                their barrier, so that the collectives of one rank do not wait for the slow
                compilation on another.

        A graph for which there is no memory is left out, with a warning; `dropped` names it.

        Raises:
            CaptureError: closed, or the step function cannot be captured for another reason; names
                bucket and variant. Nothing is kept then. Also no memory for the eager run before a
                capture, where `before_each` is given: the other ranks wait in its collectives.
        """
        if self._closed:
            raise CaptureError("capture after close; make a new DecodeGraphs")
        if self._report is not None:
            return self._report
        started = time.monotonic()
        self._recorded = {name: _Buffer.of(t) for name, t in self._inputs.items()}
        order = [(b, v) for b in reversed(self._buckets) for v in range(self._variants[b])]
        if progress is not None:
            progress(0, len(order))
        taken = self._capture_cuda(order, progress, before_each) if self.captures else 0
        if not self.captures:
            self._graphs = dict.fromkeys(order)
            log.info(
                "no CUDA graphs on %s: %d static steps run as they are", self._device, len(order)
            )
            if progress is not None:
                progress(len(order), len(order))
        self._report = self._reported(seconds=time.monotonic() - started, device_bytes=taken)
        return self._report

    @property
    def dropped(self) -> dict[tuple[int, int], str]:
        """(bucket, variant) of graphs that were left out or given up, with the reason."""
        return dict(self._dropped)

    def drop(self, graphs: Mapping[tuple[int, int], str]) -> CaptureReport:
        """Give up graphs, such as those that another rank has no memory for.

        Args:
            graphs: (bucket, variant) -> the reason, which `can_run` gives from then on.

        Returns:
            The report of what is left.

        Raises:
            CaptureError: nothing has been captured.
        """
        if self._report is None:
            raise CaptureError("drop before capture; capture first")
        for key, reason in graphs.items():
            graph = self._graphs.pop(key, None)
            self._outputs.pop(key, None)
            if graph is not None:
                graph.reset()
            self._dropped.setdefault(key, reason)
        self._report = self._reported(
            seconds=self._report.seconds, device_bytes=self._report.device_bytes
        )
        return self._report

    def _reported(self, *, seconds: float, device_bytes: int) -> CaptureReport:
        described = tuple(self._descriptor(bucket, variant) for bucket, variant in self._graphs)
        return CaptureReport(
            graphs=described,
            captures=self.captures,
            digest=digest_of(described, captures=self.captures),
            seconds=seconds,
            device_bytes=device_bytes,
        )

    def can_run(self, step: object) -> tuple[bool, str]:
        """Whether `replay(step)` has a graph for the step, and why not. Total and pure.

        Args:
            step: has batch_size (valid rows), bucket (None for eager) and variant.
        """
        bucket = getattr(step, "bucket", None)
        variant = getattr(step, "variant", None)
        rows = getattr(step, "batch_size", None)
        if self._closed:
            return False, "the graphs are closed"
        if self._report is None:
            return False, "nothing is captured yet"
        if bucket is None:
            return False, "the step names no bucket"
        if rows is None or not (_is_int(bucket) and _is_int(variant) and _is_int(rows)):
            return False, f"not a step: bucket {bucket!r}, variant {variant!r}, batch size {rows!r}"
        if bucket not in self._variants:
            return False, f"bucket {bucket} is not one of {self._buckets}"
        if (bucket, variant or 0) in self._dropped:
            reason = self._dropped[bucket, variant or 0]
            return False, f"bucket {bucket} variant {variant}: {reason}"
        if (bucket, variant) not in self._graphs:
            return (
                False,
                f"bucket {bucket} has variants 0 .. {self._variants[bucket] - 1}, not {variant}",
            )
        if not 1 <= rows <= bucket:
            return False, f"a batch of {rows} does not fit bucket {bucket}"
        return True, ""

    def replay(self, step: object, *, inputs: Mapping[str, Tensor] | None = None) -> Any:
        """Run the step that (bucket, variant) names over what the static buffers hold now.

        Args:
            step: as for `can_run`.
            inputs: what the caller filled, if it wants that checked to be the static buffers.

        Returns:
            What the step function returned at capture, with new values, all rows of the bucket.
            On a GPU the next replay of the same graph overwrites it; nothing waits for the device.

        Raises:
            CaptureError: there is no such graph, or a buffer is not the one that was captured.
        """
        able, reason = self.can_run(step)
        if not able:
            raise CaptureError(f"cannot replay: {reason}; run the step eagerly on all ranks")
        self._check_buffers(self._inputs if inputs is None else inputs)
        bucket: int = step.bucket  # type: ignore[attr-defined]
        variant: int = step.variant  # type: ignore[attr-defined]
        self._replays += 1
        graph = self._graphs[bucket, variant]
        if graph is None:
            return self._step_fn(dict(self._views[bucket]), bucket, variant)
        graph.replay()
        return self._outputs[bucket, variant]

    def statistics(self) -> GraphStatistics:
        return GraphStatistics(graphs=len(self._graphs), replays=self._replays)

    def close(self) -> None:
        """Destroy the graphs. Before the process groups whose collectives they hold. Idempotent."""
        self._closed = True
        self._destroy()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _capture_cuda(
        self,
        order: list[tuple[int, int]],
        progress: Callable[[int, int], None] | None,
        before_each: Callable[[], None] | None,
    ) -> int:
        torch.cuda.synchronize(self._device)
        free_before, _ = torch.cuda.mem_get_info(self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        pool = torch.cuda.graph_pool_handle()
        for done, (bucket, variant) in enumerate(order, start=1):
            recording = False
            try:
                if before_each is not None:
                    before_each()
                self._warm_up(bucket, variant, stream)
                recording = True
                self._record(bucket, variant, stream, pool)
            except RuntimeError as error:
                no_memory = isinstance(error, torch.OutOfMemoryError)
                if no_memory:
                    torch.cuda.empty_cache()
                free, total = torch.cuda.mem_get_info(self._device)
                room = f"{free / 2**30:.2f} of {total / 2**30:.2f} GiB free on {self._device}"
                if no_memory and (recording or before_each is None):
                    reason = f"no memory to capture it, {room}"
                    log.warning("bucket %d variant %d is left out: %s", bucket, variant, reason)
                    log.debug("out of memory: %s", error)
                    self._dropped[bucket, variant] = reason
                else:
                    self._destroy()
                    raise CaptureError(
                        f"bucket {bucket} variant {variant} could not be captured after "
                        f"{done - 1} of {len(order)} graphs, with {room}: {error}"
                    ) from error
            if progress is not None:
                progress(done, len(order))
        torch.cuda.synchronize(self._device)
        free_after, _ = torch.cuda.mem_get_info(self._device)
        return max(0, free_before - free_after)

    def _warm_up(self, bucket: int, variant: int, stream: torch.cuda.Stream) -> None:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    self._step_fn(dict(self._views[bucket]), bucket, variant)
            current.wait_stream(stream)

    def _record(self, bucket: int, variant: int, stream: torch.cuda.Stream, pool: Any) -> None:
        with torch.cuda.device(self._device):
            graph = torch.cuda.CUDAGraph()
            # thread_local: another thread, such as a watcher, may use the device meanwhile
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                outputs = self._step_fn(dict(self._views[bucket]), bucket, variant)
        # kept alive, or a later capture would be given the memory of these outputs
        self._graphs[bucket, variant] = graph
        self._outputs[bucket, variant] = outputs

    def _destroy(self) -> None:
        for graph in self._graphs.values():
            if graph is not None:
                graph.reset()
        self._graphs = {}
        self._outputs = {}

    def _views_of(self, bucket: int) -> dict[str, Tensor]:
        largest = self._buckets[-1]
        views = {}
        for name, buffer in self._inputs.items():
            if buffer.device.type != self._device.type:
                raise ConfigError(f"input {name}: expected {self._device}, got {buffer.device}")
            rows = buffer.shape[0] if buffer.dim() else 0
            if rows not in (largest, largest * self._q_len):
                raise ConfigError(
                    f"input {name}: expected {largest} rows (the largest bucket), or times q_len "
                    f"{self._q_len}, got shape {tuple(buffer.shape)}"
                )
            views[name] = buffer[: bucket * (rows // largest)]
        return views

    def _check_buffers(self, inputs: Mapping[str, Tensor]) -> None:
        if inputs is not self._inputs and inputs.keys() != self._recorded.keys():
            raise CaptureError(
                f"cannot replay: captured with inputs {sorted(self._recorded)}, "
                f"got {sorted(inputs)}"
            )
        for name, recorded in self._recorded.items():
            got = inputs[name]
            if _Buffer.of(got) == recorded:
                continue
            raise CaptureError(
                f"cannot replay: input {name} is not the static buffer that was captured: expected "
                f"{recorded}, got {_Buffer.of(got)}; copy values into the buffer instead"
            )

    def _descriptor(self, bucket: int, variant: int) -> GraphDescriptor:
        details = self._describe(bucket, variant) if self._describe is not None else {}
        return GraphDescriptor(
            bucket=bucket,
            variant=variant,
            q_len=self._q_len,
            inputs=signature_of(self._views[bucket]),
            outputs=signature_of(self._outputs.get((bucket, variant), {})),
            details=tuple(sorted(details.items())),
        )


def _checked_buckets(buckets: Sequence[int]) -> tuple[int, ...]:
    if not buckets or not all(_is_int(bucket) and bucket > 0 for bucket in buckets):
        raise ConfigError(f"buckets: expected positive batch sizes, got {list(buckets)}")
    return tuple(sorted({int(bucket) for bucket in buckets}))


def _checked_count(bucket: int, count: object) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"variants of bucket {bucket}: expected at least 1, got {count!r}")
    return count


def _is_int(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)

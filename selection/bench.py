"""What is measured, and what comes back.

A cell is one batch: a bucket and the KV lengths of its rows. Equal lengths alone would favour
kernels with a fixed split, which lose by factors on real batches, so each mean length is also
measured ragged (log-normal, seeded).
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tp_runtime.errors import SelectionError
from tp_runtime.selection.base import DecodeShape, DeviceInfo
from tp_runtime.selection.isolate import run_isolated
from tp_runtime.selection.registry import FACTORIES, Eligibility, available_backends, foreign
from tp_runtime.selection.rule import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Event = dict[str, Any]

REFERENCE = "torch_reference"
# mean KV lengths, and the most tokens of a cell
_USUAL = {"cpu": ((128, 1024), 8192), "cuda": ((192, 768, 3072, 12288), 1 << 20)}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """A benchmark of decode attention for one rank's shape.

    Args:
        shape: the problem; its table width is the serving one.
        device: torch device string.
        buckets: batch sizes to measure.
        kv_lens: mean KV lengths in tokens; those beyond the shape's maximum are left out. Empty
            for the usual ones of the device, as is a `max_total_kv` of 0.
        sigma: spread of the ragged profile, standard deviation of the log length.
        candidates: backends to race; empty for all usable ones. The reference races only if it is
            named or alone: it reads the whole table, and would take most of the time.
        batches: KV lengths of further batches to measure, such as a user's own; each is a cell of
            the bucket of its size.
        max_total_kv: cells with more tokens are left out, but for each bucket's first.
        layers: KV buffers chained per run, distinct, so that none is in a cache when it is read.
        repeats: runs per candidate and cell, interleaved.
        threads: torch threads while measuring; 0 leaves them alone.
        time_limit_s: a candidate that takes longer in one cell is refused.
        first_cell: where to begin, for going on after a candidate took the process down.
        factories: name to "module:Class", in priority order.
    """

    shape: DecodeShape
    device: str = "cpu"
    buckets: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    kv_lens: tuple[int, ...] = ()
    sigma: float = 0.8
    batches: tuple[tuple[int, ...], ...] = ()
    candidates: tuple[str, ...] = ()
    max_total_kv: int = 0
    layers: int = 3
    repeats: int = 5
    seed: int = 0
    threads: int = 0
    time_limit_s: float = 5.0
    first_cell: int = 0
    factories: Mapping[str, str] = field(default_factory=lambda: dict(FACTORIES))

    def __post_init__(self) -> None:
        lengths, total = _USUAL["cuda" if self.device.startswith("cuda") else "cpu"]
        if not self.kv_lens:
            object.__setattr__(self, "kv_lens", lengths)
        if not self.max_total_kv:
            object.__setattr__(self, "max_total_kv", total)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> BenchRequest:
        data = dict(data, shape=DecodeShape(**data["shape"]))
        for name in ("buckets", "kv_lens", "candidates"):
            data[name] = tuple(data[name])
        data["batches"] = tuple(tuple(batch) for batch in data["batches"])
        return cls(**data)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCell:
    """One batch to measure: int32 KV length of each row."""

    kv_lens: tuple[int, ...]

    @property
    def bucket(self) -> int:
        return len(self.kv_lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """What came back.

    Args:
        samples: one per backend and cell, of backends that were not refused.
        refusals: backend -> why it takes no part.
        seconds: how long it took, start of the child included.
        complete: False if time ran out before the last cell.
    """

    samples: tuple[Sample, ...]
    refusals: Mapping[str, str]
    seconds: float
    complete: bool = True


def cells_of(request: BenchRequest) -> list[BenchCell]:
    """The batches, in a fixed order: small buckets first, equal before ragged."""
    rng = np.random.default_rng(request.seed)
    longest = request.shape.max_kv_len
    means = sorted({min(n, longest) for n in request.kv_lens})
    cells = []
    for bucket in sorted(set(request.buckets)):
        for position, mean in enumerate(means):
            # drawn before a cell may be left out: the limit must not change the others
            drawn = rng.lognormal(-0.5 * request.sigma**2, request.sigma, bucket)
            ragged = np.clip(np.rint(mean * drawn), 1, longest).astype(int)
            if position and bucket * mean > request.max_total_kv:
                continue
            cells.append(BenchCell(kv_lens=(mean,) * bucket))
            if bucket > 1 and int(ragged.sum()) <= max(2 * request.max_total_kv, bucket * mean * 2):
                cells.append(BenchCell(kv_lens=tuple(int(n) for n in ragged)))
    cells += [BenchCell(kv_lens=batch) for batch in request.batches]
    return sorted(cells, key=lambda cell: cell.bucket)  # stable: a bucket's cells stay in order


def candidates_of(request: BenchRequest, device: DeviceInfo) -> tuple[list[str], dict[str, str]]:
    """Names to race in priority order, and the refusals of the others.

    Raises: SelectionError: a candidate is named that does not exist.
    """
    unknown = [name for name in request.candidates if name not in request.factories]
    if unknown:
        raise SelectionError(f"unknown candidates {unknown}; known: {list(request.factories)}")
    listed = available_backends(
        request.shape,
        device,
        eligibility=Eligibility(known=tuple(request.factories)),
        factories=request.factories,
        named=request.candidates,
    )
    asked = request.candidates or tuple(n for n in request.factories if not foreign(n, device))
    usable = [name for name, reason in listed if reason is None and name in asked]
    refusals = {name: reason for name, reason in listed if reason is not None and name in asked}
    if not request.candidates and len(usable) > 1:
        usable = [name for name in usable if name != REFERENCE]
    return usable, refusals


def measure(request: BenchRequest) -> BenchReport:
    """Measure in this process. A backend that crashes takes the process with it.

    Raises: SelectionError: the request makes no sense.
    """
    from tp_runtime.selection.bench_runner import run_cells

    started = time.monotonic()
    events: list[Event] = []
    run_cells(request, events.append)
    return _report(events, started, complete=True)


def measure_in_child(
    request: BenchRequest,
    timeout_s: float = 120.0,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> BenchReport:
    """Measure in a child process, so that a backend that hangs or crashes ends with the child.

    Such a backend is refused by name and the others go on in a new child.

    Args:
        request: what to measure.
        timeout_s: for everything but the compilation of kernels; what was measured until then is
            returned, complete=False.
        progress: called with ("build", kernels done, in all) and ("selection", cells done, in all),
            and at least once a second with what was last told. What it raises ends the measuring.

    Raises: SelectionError: the request makes no sense, or the child cannot be started.
    """
    started = time.monotonic()
    events, complete = run_isolated(
        request.to_dict(),
        cells=len(cells_of(request)),
        time_limit_s=request.time_limit_s,
        timeout_s=timeout_s,
        progress=progress,
    )
    return _report(events, started, complete=complete)


def _report(events: Iterable[Event], started: float, *, complete: bool) -> BenchReport:
    samples: list[Sample] = []
    refusals: dict[str, str] = {}
    for event in events:
        if event["event"] == "samples":
            samples += (Sample(**item) for item in event["samples"])
        elif event["event"] == "refused":
            refusals.setdefault(event["backend"], event["reason"])
    return BenchReport(
        # a backend that failed later is not to be trusted in the cells before
        samples=tuple(s for s in samples if s.backend not in refusals),
        refusals=refusals,
        seconds=time.monotonic() - started,
        complete=complete,
    )

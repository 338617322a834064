"""The plan: which decode attention backends each batch bucket has, and which one a step takes.

A plan is made on rank 0, shipped as canonical bytes, confirmed, and never changed afterwards. Only
rank 0 calls `choose`; the peers replay the variant it names.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from tp_runtime.errors import BackendUnavailable, PlanFormatError, SelectionError
from tp_runtime.regular_file import read_regular
from tp_runtime.selection.atomic_file import replace_file
from tp_runtime.selection.base import DecodeShape
from tp_runtime.selection.cost_model import CostModel, Grid
from tp_runtime.selection.strict_json import (
    MAX_BYTES,
    array,
    canonical,
    integer,
    number,
    object_of,
    parse,
    string,
    strings,
    typed,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

FORMAT = "tp_runtime.decode_plan"
FORMAT_VERSION = 1

Mode = Literal["stable", "adaptive", "fixed"]
_log = math.log


class Choice(NamedTuple):
    """What one step runs: a captured (bucket, variant), or eager where `bucket` is None."""

    bucket: int | None
    variant: int
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """One batch bucket: its backends in variant order, their models, and the models' grid.

    `models` is empty where nothing was measured; the first variant is then the only one.
    """

    bucket: int
    variants: tuple[str, ...]
    models: tuple[CostModel, ...] = ()
    grid: Grid | None = None


@dataclass(frozen=True, kw_only=True)
class BackendPlan:
    """Which backend, when. Immutable; equal plans have equal bytes and equal digests.

    Args:
        priority: every usable backend, first the one for eager steps.
        priority_version: version of the fixed order that `priority` was made from.
        entries: the buckets, ascending.
        mode: how it was decided; "fixed" if nothing was measured.
        margin: gains up to this share kept no extra variant.
        shape: the problem it was measured for, if known.
        device: name of the device it was measured on, if known.
    """

    priority: tuple[str, ...]
    entries: tuple[BucketPlan, ...]
    priority_version: int = 0
    mode: Mode = "fixed"
    margin: float = 0.0
    shape: DecodeShape | None = None
    device: str = ""
    _buckets: list[int] = field(init=False, repr=False, compare=False)
    _choices: list[tuple[Choice, ...]] = field(init=False, repr=False, compare=False)
    _eager: Choice = field(init=False, repr=False, compare=False)
    _bytes: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self)
        put = object.__setattr__  # derived once: choose() runs in every step
        put(self, "_buckets", [entry.bucket for entry in self.entries])
        put(
            self,
            "_choices",
            [
                tuple(Choice(e.bucket, i, name) for i, name in enumerate(e.variants))
                for e in self.entries
            ],
        )
        put(self, "_eager", Choice(None, 0, self.priority[0]))
        put(self, "_bytes", canonical(_to_dict(self)))

    @classmethod
    def fixed(
        cls,
        priority: Sequence[str],
        buckets: Iterable[int],
        *,
        priority_version: int = 0,
        shape: DecodeShape | None = None,
        device: str = "",
    ) -> BackendPlan:
        """A plan that measured nothing: the first of the priority order in every bucket.

        Raises: BackendUnavailable: the priority order is empty.
        """
        if not priority:
            raise BackendUnavailable("no decode backend is usable: the priority order is empty")
        return cls(
            priority=tuple(priority),
            entries=tuple(
                BucketPlan(bucket=bucket, variants=(priority[0],))
                for bucket in sorted(set(buckets))
            ),
            priority_version=priority_version,
            shape=shape,
            device=device,
        )

    @property
    def measured(self) -> bool:
        return self.mode != "fixed"

    @property
    def buckets(self) -> tuple[int, ...]:
        return tuple(self._buckets)

    @property
    def backends(self) -> tuple[str, ...]:
        """Every backend that a captured variant uses, in priority order."""
        used = {name for entry in self.entries for name in entry.variants}
        return tuple(name for name in self.priority if name in used)

    @property
    def digest(self) -> str:
        """sha256 of the canonical bytes, in hex. Equal on every rank, or the ranks differ."""
        return hashlib.sha256(self._bytes).hexdigest()

    def choose(self, *, batch_size: int, total_kv: int, max_kv: int) -> Choice:
        """The captured graph for a step, or eager beyond the largest bucket.

        Args:
            batch_size: valid rows, at least 1.
            total_kv: sum of their KV lengths in tokens; max_kv: the longest.

        A few microseconds of plain Python; the same numbers always give the same choice, and
        equal predictions the earlier variant.
        """
        position = bisect_left(self._buckets, batch_size)
        if position == len(self._buckets):
            return self._eager
        choices = self._choices[position]
        if len(choices) == 1 or total_kv <= 0 or max_kv <= 0:
            return choices[0]
        entry = self.entries[position]
        models = entry.models
        grid = entry.grid
        best = 0
        best_us = math.inf
        if grid is None:
            for variant, model in enumerate(models):
                us = model.base_us(total_kv, max_kv)
                if us < best_us:
                    best, best_us = variant, us
            return choices[best]
        mean = total_kv / entry.bucket
        corner, x, y = grid.locate(_log(mean), _log(max_kv / mean))
        above = corner + grid.ragged_count
        for variant, model in enumerate(models):
            f = model.factors
            low = f[corner]
            low += y * (f[corner + 1] - low)
            high = f[above]
            high += y * (f[above + 1] - high)
            us = (
                model.fixed_us + model.per_token_us * total_kv + model.per_longest_us * max_kv
            ) * (low + x * (high - low))
            if us < best_us:
                best, best_us = variant, us
        return choices[best]

    def variants(self, bucket: int) -> tuple[str, ...]:
        """Backends captured for a bucket, by variant number.

        Raises: SelectionError: the plan has no such bucket.
        """
        position = bisect_left(self._buckets, bucket)
        if position == len(self._buckets) or self._buckets[position] != bucket:
            raise SelectionError(
                f"the plan has no bucket {bucket}; its buckets are {list(self._buckets)}"
            )
        return self.entries[position].variants

    def backend_of(self, bucket: int | None, variant: int) -> str:
        """The backend that a step runs; bucket None is eager.

        Raises: SelectionError: the plan has no such bucket or variant.
        """
        if bucket is None:
            return self.priority[0]
        names = self.variants(bucket)
        if not 0 <= variant < len(names):
            raise SelectionError(
                f"bucket {bucket} has variants 0..{len(names) - 1} {names}, got {variant}"
            )
        return names[variant]

    def __getitem__(self, bucket: int) -> tuple[str, ...]:
        return self.variants(bucket)

    def without(self, refused: Collection[str]) -> BackendPlan:
        """The plan with some backends dropped everywhere.

        A bucket that loses all its variants takes the first backend left in the priority order.

        Raises: BackendUnavailable: nothing is left.
        """
        priority = tuple(name for name in self.priority if name not in refused)
        if not priority:
            raise BackendUnavailable(
                f"every backend of the plan was refused: {', '.join(self.priority)}"
            )
        return replace(
            self,
            priority=priority,
            entries=tuple(_entry_without(e, refused, priority[0]) for e in self.entries),
        )

    def to_bytes(self) -> bytes:
        """Canonical bytes: JSON, sorted keys, no spaces, ASCII."""
        return self._bytes

    @classmethod
    def from_bytes(cls, data: bytes) -> BackendPlan:
        """Read what `to_bytes` wrote, and nothing else.

        Raises: PlanFormatError: truncated, damaged, of another version, or not canonical.
        """
        plan = _from_dict(parse(bytes(data), "plan"))
        if plan.to_bytes() != data:
            raise PlanFormatError("plan: not in canonical form; it was not written by to_bytes()")
        return plan

    def save(self, path: str | Path) -> None:
        """Write a readable JSON file with the digest, replacing `path` in one step."""
        path = Path(path)
        envelope = {"digest": self.digest, "plan": _to_dict(self)}
        text = json.dumps(envelope, sort_keys=True, indent=1, allow_nan=False)
        replace_file(path, text + "\n")

    @classmethod
    def load(cls, path: str | Path) -> BackendPlan:
        """Read a file that `save` wrote.

        Raises: PlanFormatError: not such a file, or changed since. OSError: it cannot be read, is
            no regular file, or is larger than any plan.
        """
        path = Path(path)
        envelope = parse(read_regular(path, most_bytes=MAX_BYTES), str(path))
        if set(envelope) != {"digest", "plan"}:
            raise PlanFormatError(
                f"{path}: expected the fields digest and plan, got {sorted(envelope)}"
            )
        plan = _from_dict(envelope["plan"])
        if plan.digest != envelope["digest"]:
            raise PlanFormatError(
                f"{path}: digest is {envelope['digest']!r}, but the plan in it has "
                f"{plan.digest!r}; delete the file and select again"
            )
        return plan


def _entry_without(entry: BucketPlan, refused: Collection[str], fallback: str) -> BucketPlan:
    kept = [i for i, name in enumerate(entry.variants) if name not in refused]
    if len(kept) == len(entry.variants):
        return entry
    if not kept:
        return BucketPlan(bucket=entry.bucket, variants=(fallback,))
    return BucketPlan(
        bucket=entry.bucket,
        variants=tuple(entry.variants[i] for i in kept),
        models=tuple(entry.models[i] for i in kept) if entry.models else (),
        grid=entry.grid,
    )


def _check(plan: BackendPlan) -> None:
    """Raise PlanFormatError for anything that choose() could not serve."""
    if not plan.priority or len(set(plan.priority)) != len(plan.priority):
        raise PlanFormatError(f"plan.priority: expected distinct names, got {plan.priority!r}")
    last = 0
    for entry in plan.entries:
        where = f"plan.entries[bucket {entry.bucket}]"
        if entry.bucket <= last:
            raise PlanFormatError(f"{where}: buckets must be positive and ascending")
        last = entry.bucket
        if not entry.variants or len(set(entry.variants)) != len(entry.variants):
            raise PlanFormatError(f"{where}: expected distinct variants, got {entry.variants!r}")
        unknown = [name for name in entry.variants if name not in plan.priority]
        if unknown:
            raise PlanFormatError(
                f"{where}: {unknown} are not in the priority order {plan.priority}"
            )
        if entry.models:
            if len(entry.models) != len(entry.variants):
                raise PlanFormatError(
                    f"{where}: {len(entry.variants)} variants, {len(entry.models)} models"
                )
        elif len(entry.variants) > 1 or entry.grid is not None:
            raise PlanFormatError(f"{where}: more than one variant, or a grid, but no model")
        nodes = 0
        if entry.grid is not None:
            grid = entry.grid
            if (
                min(grid.mean_count, grid.ragged_count) < 2
                or min(grid.mean_step, grid.ragged_step) <= 0
            ):
                raise PlanFormatError(
                    f"{where}.grid: needs 2 nodes and a positive step on both axes"
                )
            nodes = grid.mean_count * grid.ragged_count
        for model in entry.models:
            if len(model.factors) != nodes:
                raise PlanFormatError(
                    f"{where}: expected {nodes} factors, got {len(model.factors)}"
                )
            if min(model.fixed_us, model.per_token_us, model.per_longest_us, model.error) < 0.0 or (
                model.factors and min(model.factors) <= 0.0
            ):
                raise PlanFormatError(f"{where}: negative cost in {model!r}")


def _to_dict(plan: BackendPlan) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "priority": list(plan.priority),
        "priority_version": plan.priority_version,
        "mode": plan.mode,
        "margin": plan.margin,
        "shape": None if plan.shape is None else asdict(plan.shape),
        "device": plan.device,
        "entries": [asdict(entry) for entry in plan.entries],
    }


def _from_dict(value: object) -> BackendPlan:
    data = object_of(
        value,
        "plan",
        (
            *("format", "version", "priority", "priority_version"),
            *("mode", "margin", "shape", "device", "entries"),
        ),
    )
    if data["format"] != FORMAT:
        raise PlanFormatError(f"plan.format: expected {FORMAT!r}, got {data['format']!r}")
    if data["version"] != FORMAT_VERSION:
        raise PlanFormatError(
            f"plan.version: expected {FORMAT_VERSION}, got {data['version']!r}; select again"
        )
    if data["mode"] not in get_args(Mode):
        raise PlanFormatError(f"plan.mode: expected one of {get_args(Mode)}, got {data['mode']!r}")
    shape = None
    if data["shape"] is not None:
        shape = typed(DecodeShape, data["shape"], "plan.shape")
    return BackendPlan(
        priority=strings(data["priority"], "plan.priority"),
        priority_version=integer(data["priority_version"], "plan.priority_version"),
        mode=data["mode"],
        margin=number(data["margin"], "plan.margin"),
        shape=shape,
        device=string(data["device"], "plan.device"),
        entries=tuple(
            _entry(item, f"plan.entries[{i}]")
            for i, item in enumerate(array(data["entries"], "plan.entries"))
        ),
    )


def _entry(value: object, where: str) -> BucketPlan:
    data = object_of(value, where, ["bucket", "variants", "models", "grid"])
    grid = None if data["grid"] is None else typed(Grid, data["grid"], f"{where}.grid")
    models = []
    for i, item in enumerate(array(data["models"], f"{where}.models")):
        here = f"{where}.models[{i}]"
        model = object_of(item, here, [f.name for f in fields(CostModel)])
        factors = array(model.pop("factors"), f"{here}.factors")
        models.append(
            CostModel(
                factors=tuple(number(f, f"{here}.factors") for f in factors),
                **{name: number(cost, f"{here}.{name}") for name, cost in model.items()},
            )
        )
    return BucketPlan(
        bucket=integer(data["bucket"], f"{where}.bucket"),
        variants=strings(data["variants"], f"{where}.variants"),
        models=tuple(models),
        grid=grid,
    )

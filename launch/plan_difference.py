"""Where two plans differ, for a person: choices first, then facts, then the fitted numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tp_runtime.launch.output import table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tp_runtime.selection import BackendPlan
    from tp_runtime.selection.cost_model import CostModel
    from tp_runtime.selection.plan import BucketPlan

_COSTS = (
    ("fixed_us", "fixed", 1),
    ("per_token_us", "per 1k tokens", 1000),
    ("per_longest_us", "per 1k of the longest", 1000),
)
"""Words and scales are those of `plan show`."""


def as_text(
    first: BackendPlan,
    second: BackendPlan,
    differences: Sequence[dict[str, Any]],
    *,
    names: tuple[str, str],
) -> str:
    """What `plan diff` prints.

    Args:
        differences: of every field, as `compare` gives them; "equal" if there are none.
        names: of the two plans, such as their files.
    """
    if not differences:
        return "equal"
    facts = [
        (item["field"], _short(item["first"]), _short(item["second"]))
        for item in differences
        if not item["field"].startswith("entries")
    ]
    parts = [
        "\n".join(_choices(first, second, names)) or "every bucket has the same backends",
        table(facts, header=("field", *names)),
        "\n".join(_fitted(first, second)),
    ]
    return "\n\n".join(part for part in parts if part)


def _choices(first: BackendPlan, second: BackendPlan, names: tuple[str, str]) -> Iterator[str]:
    for bucket in sorted({*first.buckets, *second.buckets}):
        left, right = (
            ", ".join(plan.variants(bucket)) if bucket in plan.buckets else None
            for plan in (first, second)
        )
        if left is None or right is None:
            yield f"bucket {bucket}: only in {names[left is None]}, {left or right}"
        elif left != right:
            yield f"bucket {bucket}: {left} -> {right}"


def _fitted(first: BackendPlan, second: BackendPlan) -> Iterator[str]:
    others = {entry.bucket: entry for entry in second.entries}
    for entry in first.entries:
        other = others.get(entry.bucket)
        if other is None:
            continue
        if entry.grid != other.grid and entry.grid is not None and other.grid is not None:
            yield f"bucket {entry.bucket}: the corrections are for other lengths"
        models = _models(other)
        for name, model in _models(entry).items():
            changes = _changes(model, models[name]) if name in models else []
            if changes:
                yield f"bucket {entry.bucket}, cost model of {name}: {', '.join(changes)}"


def _models(entry: BucketPlan) -> dict[str, CostModel]:
    # a plan that measured nothing has none
    return dict(zip(entry.variants, entry.models, strict=False))


def _changes(first: CostModel, second: CostModel) -> list[str]:
    changes = []
    for name, label, scale in _COSTS:
        left, right = getattr(first, name), getattr(second, name)
        if left != right:
            changes.append(f"{label} {scale * left:.4g} -> {scale * right:.4g} us")
    count = len(first.factors)
    if count != len(second.factors):
        changes.append(f"{count} -> {len(second.factors)} factors")
    else:
        ratios = [b / a for a, b in zip(first.factors, second.factors, strict=True) if a != b]
        if ratios:
            most = max(abs(ratio - 1) for ratio in ratios)
            changes.append(f"{len(ratios)} of {count} factors differ, at most {100 * most:.1f} %")
    if first.error != second.error:
        changes.append(f"error {100 * first.error:.1f} -> {100 * second.error:.1f} %")
    return changes


def _short(value: Any) -> str:
    if value is None:
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

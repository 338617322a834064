"""Plans as short aligned text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tp_runtime.selection.bench import BenchReport
    from tp_runtime.selection.plan import BackendPlan
    from tp_runtime.selection.rule import Sample

_RAGGED = 1.05  # longest over mean from which a batch is called ragged

_DISTURBED = 0.5
"""No kernel is this far from a straight line in its tokens; other work on the machine is."""


def plan_table(plan: BackendPlan, samples: Sequence[Sample] = (), *, width: int = 100) -> str:
    """One line per bucket and measured batch: what the plan takes, and what it gains.

    The gain is the measured time of the priority default over that of the choice. Without samples,
    one line per bucket with its variants.
    """
    rows = [("bucket", "mean kv", "max kv", "backend", "us", "gain", "variants")]
    by_cell: dict[tuple[int, int, int], dict[str, float]] = {}
    for s in samples:
        by_cell.setdefault((s.bucket, s.total_kv, s.max_kv), {})[s.backend] = s.median_us
    for bucket in plan.buckets:
        variants = ", ".join(plan.variants(bucket))
        cells = sorted(cell for cell in by_cell if cell[0] == bucket)
        if not cells:
            rows.append((str(bucket), "-", "-", plan[bucket][0], "-", "-", variants))
        for i, (_, total_kv, max_kv) in enumerate(cells):
            times = by_cell[bucket, total_kv, max_kv]
            name = plan.choose(batch_size=bucket, total_kv=total_kv, max_kv=max_kv).backend
            default = next((n for n in plan.priority if n in times), name)
            us = times.get(name)
            mean = total_kv / bucket
            rows.append(
                (
                    str(bucket) if i == 0 else "",
                    f"{mean:.0f}",
                    f"{max_kv}" if max_kv > _RAGGED * mean else "=",
                    name,
                    "-" if us is None else f"{us:.0f}",
                    "-" if us is None or name == default else f"{times[default] / us:.2f}x",
                    variants if i == 0 else "",
                )
            )
    return "\n".join(line[:width] for line in _aligned(rows, right={0, 1, 2, 4, 5}))


def refusal_lines(refusals: Mapping[str, str], *, width: int = 100) -> str:
    """One line per refused backend."""
    rows = [(name, " ".join(reason.split())) for name, reason in refusals.items()]
    return "\n".join(line[:width] for line in _aligned(rows, right=set()))


def selection_report(plan: BackendPlan, report: BenchReport | None, *, width: int = 100) -> str:
    """Table and refusals, then digest, mode, model error and time."""
    parts = [plan_table(plan, report.samples if report else (), width=width)]
    if report is not None and report.refusals:
        parts.append("refused:\n" + refusal_lines(report.refusals, width=width))
    parts.append(f"plan {plan.digest[:12]}, {plan.mode}, eager steps take {plan.priority[0]}")
    notes = []
    errors = [model.error for entry in plan.entries for model in entry.models]
    if errors:
        notes.append(f"model error at most {100 * max(errors):.0f} %")
    if report is not None:
        notes.append(f"{len(report.samples)} samples in {report.seconds:.1f} s")
        if not report.complete:
            notes.append("stopped by the time limit")
    if notes:
        parts.append(", ".join(notes))
    if disturbed(plan):
        parts.append("the measurements were disturbed: measure again on a quiet machine")
    return "\n".join(parts)


def disturbed(plan: BackendPlan) -> bool:
    """Whether the measurements contradict each other, as they do on a machine that was busy."""
    errors = [model.error for entry in plan.entries for model in entry.models]
    return bool(errors) and max(errors) > _DISTURBED


def _aligned(rows: Sequence[Sequence[str]], *, right: set[int]) -> list[str]:
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])
            for i, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]

"""Measurements of a file that `select --json` or benchmarks/selection_regret.py wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tp_runtime.errors import ConfigError, SelectionError
from tp_runtime.regular_file import read_regular
from tp_runtime.selection import PRIORITY, BackendPlan, Sample, select
from tp_runtime.selection.heat_map import HeatMap
from tp_runtime.selection.strict_json import canonical

_MOST_BYTES = 64 << 20


def read_recorded(path: str | Path) -> HeatMap:
    """The heat map of a file.

    Of a regret file the first head shape is taken: the plan is made from the trained lengths, and
    what is shown are the lengths that it did not see.

    Raises: ConfigError: the file cannot be read, or is neither.
    """
    path = Path(path)
    try:
        document = json.loads(read_regular(path, most_bytes=_MOST_BYTES))
    except OSError as error:
        raise ConfigError(
            f"recorded measurements {path}: cannot be read: {error.strerror or error}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"recorded measurements {path}: cannot be read: {error}") from error
    try:
        if "shapes" in document:
            return _of_regret(document)
        return _of_select(document)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, SelectionError) as error:
        raise ConfigError(
            f"recorded measurements {path}: expected the JSON of select or of "
            f"benchmarks/selection_regret.py, got something else ({type(error).__name__}: {error})"
        ) from error


def _of_select(document: dict[str, Any]) -> HeatMap:
    plan = {name: value for name, value in document["plan"].items() if name != "digest"}
    shape = document["shape"]
    return HeatMap(
        title=f"{document['device']}, {shape['q_heads']}/{shape['kv_heads']} heads",
        samples=tuple(Sample(**item) for item in document["samples"]),
        plan=BackendPlan.from_bytes(canonical(plan)),
    )


def _of_regret(document: dict[str, Any]) -> HeatMap:
    one = document["shapes"][0]
    trained = [s for row in one["rows"] if not row["held_out"] for s in _samples(row)]
    shown = [s for row in one["rows"] if row["held_out"] for s in _samples(row)]
    names = [name for name in PRIORITY if any(s.backend == name for s in trained)]
    return HeatMap(
        title=f"{document['device']}, {one['heads']} heads, lengths that the plan did not see",
        samples=tuple(shown),
        plan=select(trained, priority=names),
    )


def _samples(row: dict[str, Any]) -> list[Sample]:
    return [
        Sample(
            backend=name,
            bucket=row["batch_size"],
            total_kv=row["total_kv"],
            max_kv=row["max_kv"],
            median_us=us,
        )
        for name, us in row["median_us"].items()
    ]

"""Fields of a model file, which anybody may have written: checked before they are used."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tp_runtime.errors import ModelFormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


@contextmanager
def blamed_on(place: Path | str) -> Iterator[None]:
    """Puts a file, or a place in it, before what a ModelFormatError says."""
    try:
        yield
    except ModelFormatError as error:
        raise ModelFormatError(f"{place}: {error}") from error


def count(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A field of a model file that is an integer of at least 1; absent and null are the default.

    Raises: ModelFormatError: it is anything else, or missing without a default.
    """
    value = _given(fields, name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelFormatError(f"{name} must be an integer of at least 1, got {value!r}")
    return value


def number(fields: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """The same for a finite number above 0."""
    value = _given(fields, name, default)
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not 0 < found < math.inf:
        raise ModelFormatError(f"{name} must be a finite number above 0, got {value!r}")
    return found


def _given(fields: Mapping[str, Any], name: str, default: object) -> Any:
    value = fields.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelFormatError(f"field {name!r} is missing")
    return value


def token_ids(fields: Mapping[str, Any], name: str) -> list[int]:
    """A field that is a token id, a list of them, or null."""
    value = fields.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(item, int) or isinstance(item, bool) for item in ids):
        raise ModelFormatError(f"{name} must be a token id or a list of them, got {value!r}")
    return ids

"""JSON between processes: written canonically; read with exact fields and types, or refused with
an error that names the place."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from tp_runtime.errors import PlanFormatError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_BYTES = 16 << 20  # far above any real plan; a larger file is not one


def canonical(value: object) -> bytes:
    """Sorted keys, no spaces, ASCII: equal values have equal bytes.

    Raises: PlanFormatError: it holds what JSON cannot say.
    """
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise PlanFormatError(f"not a value of JSON: {error}") from error
    return text.encode("ascii")


def parse(data: bytes, where: str) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise PlanFormatError(f"{where}: {len(data)} bytes, at most {MAX_BYTES} are allowed")
    try:
        value = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise PlanFormatError(f"{where}: truncated or not JSON ({error})") from error
    if not isinstance(value, dict):
        raise PlanFormatError(f"{where}: expected an object, got {type(value).__name__}")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def typed(cls: type[Any], value: object, where: str) -> Any:
    """Build a flat dataclass of str, int, float and optional str, checking every field."""
    data = object_of(value, where, [f.name for f in fields(cls)])
    readers = {"int": integer, "float": number, "str": string}
    for item in fields(cls):
        if str(item.type).endswith("| None") and data[item.name] is None:
            continue
        reader: Any = readers[str(item.type).removesuffix(" | None")]
        data[item.name] = reader(data[item.name], f"{where}.{item.name}")
    return cls(**data)


def object_of(value: object, where: str, names: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != set(names):
        got = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise PlanFormatError(f"{where}: expected the fields {sorted(names)}, got {got}")
    return dict(value)


def array(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise PlanFormatError(f"{where}: expected a list, got {type(value).__name__}")
    return value


def strings(value: object, where: str) -> tuple[str, ...]:
    return tuple(string(item, where) for item in array(value, where))


def texts(value: object, where: str) -> dict[str, str]:
    """An object of any names, each with a string."""
    if not isinstance(value, dict):
        raise PlanFormatError(f"{where}: expected an object, got {type(value).__name__}")
    return {name: string(text, f"{where}.{name}") for name, text in value.items()}


def string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise PlanFormatError(f"{where}: expected a string, got {value!r}")
    return value


def integer(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise PlanFormatError(f"{where}: expected an integer, got {value!r}")
    return value


def number(value: object, where: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise PlanFormatError(f"{where}: expected a finite number, got {value!r}")
    return float(value)

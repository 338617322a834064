"""One setting: what it is called everywhere, what it may be, and the only parsers of its texts."""

from __future__ import annotations

import difflib
import itertools
import math
import re
import types
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

if TYPE_CHECKING:
    from dataclasses import Field

    from tp_runtime.errors import ConfigError

ENV_PREFIX = "TP_RUNTIME_"

Source = Literal["text", "file", "code"]
"""What a value was written in: a flag or variable, the TOML file, or Python."""

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_TWO_63 = 1 << 63


def setting(
    default: Any,
    *,
    help: str,
    env: str | None = None,
    unit: str | None = None,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    aliases: tuple[str, ...] = (),
    placeholder: str | None = None,
    exposed: bool = True,
) -> Any:
    """One row of the table.

    Args:
        default: the value when nobody says anything.
        help: one line for a person.
        env: the variable; None = TP_RUNTIME_ and the field's name in capitals.
        unit: of the number, for the reader.
        choices: the only words allowed.
        minimum: inclusive lower bound of a number, or of each number of a list.
        maximum: inclusive upper bound, as `minimum`.
        above: exclusive lower bound of a number.
        aliases: more spellings of the flag.
        placeholder: what stands for the value in a usage line; None = by its type.
        exposed: False for what only code may set: no flag, variable or key.
    """
    return field(
        default=default,
        metadata={
            "help": help,
            "env": env,
            "unit": unit,
            "choices": choices,
            "minimum": minimum,
            "maximum": maximum,
            "above": above,
            "aliases": aliases,
            "placeholder": placeholder,
            "exposed": exposed,
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting, as the parsers and the documentation see it."""

    name: str
    kind: type
    item: type | None
    optional: bool
    default: Any
    help: str
    env: str
    unit: str | None
    choices: tuple[str, ...]
    minimum: float | None
    maximum: float | None
    above: float | None
    aliases: tuple[str, ...]
    placeholder: str | None
    exposed: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def metavar(self) -> str:
        """What stands for the value in a usage line."""
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        kind = self.item or self.kind
        return self.placeholder or {int: "N", float: "X"}.get(kind, "NAME")

    @property
    def default_text(self) -> str | None:
        """The default for a person, with its unit; None where there is none."""
        if self.default is None or self.default == ():
            return None
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        value = f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        return f"{value} {self.unit}" if self.unit else value

    def expected(self, source: Source) -> str:
        """What a value must be where it was written, for an error message."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        bound = ""
        if self.minimum is not None:
            bound = f" of at least {self.minimum:g}"
        elif self.above is not None:
            bound = f" above {self.above:g}"
        if self.maximum is not None:
            bound += f" and at most {self.maximum:g}"
        if self.item is not None:
            items = f"whole numbers{bound}, ascending" if self.item is int else "names"
            return {
                "text": f"{items}, separated by commas",
                "file": f"an array of {items}",
                "code": f"a tuple or list of {items}",
            }[source]
        return {
            bool: {
                "text": "1, true, yes, on, 0, false, no or off",
                "file": "true or false",
                "code": "True or False",
            }[source],
            int: f"a whole number{bound}",
            float: f"a number{bound}",
            str: "a text that is not empty",
        }[self.kind]

    def problem(self, value: object, source: Source) -> str | None:
        """What was expected instead of this typed value; None when it is sound."""
        sound = self.optional if value is None else self._sound_whole(value)
        return None if sound else self.expected(source)

    def from_code(self, value: object) -> object:
        """A value of Python code in the type that is kept: any sequence may stand for a tuple."""
        if self.item is None or isinstance(value, str | bytes) or not isinstance(value, Sequence):
            return value
        return tuple(value)

    def _sound_whole(self, value: object) -> bool:
        if self.item is None:
            return self._sound(self.kind, value)
        if not isinstance(value, tuple) or not all(self._sound(self.item, v) for v in value):
            return False
        return self.item is str or (
            bool(value) and all(a < b for a, b in itertools.pairwise(value))
        )

    def _sound(self, kind: type, value: object) -> bool:
        if kind is bool or isinstance(value, bool):
            return kind is bool and isinstance(value, bool)
        if kind is str:
            return isinstance(value, str) and (value in (self.choices or (value or None,)))
        if not isinstance(value, int | float if kind is float else int):
            return False
        return (
            _fits(value)
            and (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
        )

    def read(
        self, raw: object, *, where: str, error: type[ConfigError], typed: bool = False
    ) -> object:
        """Turn what a source holds into a sound value.

        Args:
            raw: a text, or a value that already has its type.
            where: the source, for the message: it names the setting.
            error: the class to raise.
            typed: True when the source has types of its own (TOML): a text is then no number.
        """
        source: Source = "file" if typed else "text"
        problem: str | None
        try:
            value = self._parse(raw, typed=typed)
        except ValueError:
            value, problem = raw, self.expected(source)
        else:
            problem = self.problem(value, source)
        if problem is not None:
            given = raw if typed else _as_given(raw)
            raise error(f"{where}={given!r}: expected {problem}{_hint(raw, self)}")
        return value

    def _parse(self, raw: object, *, typed: bool) -> object:
        if self.item is None:
            return parse_text(self.kind, raw) if isinstance(raw, str) and not typed else raw
        if isinstance(raw, str):
            if typed:
                raise ValueError(raw)
            raw = [raw]
        if not isinstance(raw, Sequence):
            raise ValueError(raw)
        if typed or not all(isinstance(part, str) for part in raw):
            return tuple(raw)
        # a repeated flag: each occurrence may itself be a list
        words = [word.strip() for part in raw for word in part.split(",")]
        if words == [""]:
            return ()
        return tuple(parse_text(self.item, word) for word in words)


def parse_bool(text: str) -> bool:
    """The one reader of booleans: 1, true, yes, on, 0, false, no, off, in any case.

    Raises: ValueError.
    """
    word = text.lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(f"{text!r} is not a boolean")


def parse_text(kind: type, text: str) -> object:
    """Read a text as bool, int, float or str. Raises: ValueError."""
    if kind is bool:
        return parse_bool(text)
    if kind is int:
        # int() also takes blanks and "1_000", which no other tool reads in a variable
        if not re.fullmatch(r"[+-]?[0-9]+", text, re.ASCII):
            raise ValueError(text)
        return int(text)
    if kind is float:
        if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text, re.ASCII):
            raise ValueError(text)
        return float(text)
    return text


def row_of(f: Field[Any], hint: Any) -> Row:
    """Read a row off a dataclass field made by `setting`; `hint` is its evaluated type."""
    optional = get_origin(hint) is types.UnionType and type(None) in get_args(hint)
    if optional:
        (hint,) = (arm for arm in get_args(hint) if arm is not type(None))
    item = get_args(hint)[0] if get_origin(hint) is tuple else None
    meta = dict(f.metadata)
    return Row(
        name=f.name,
        kind=tuple if item is not None else hint,
        item=item,
        optional=optional,
        default=None if f.default is MISSING else f.default,
        env=meta.pop("env") or ENV_PREFIX + f.name.upper(),
        **meta,
    )


def nearest(name: str, known: Sequence[str]) -> str:
    """The end of an error message: "; did you mean ...?", or nothing."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else ""


def _fits(value: float) -> bool:
    """A finite float, or an integer of 64 bits at most, as may travel to the other ranks."""
    return -_TWO_63 <= value < _TWO_63 if isinstance(value, int) else math.isfinite(value)


def _as_given(raw: object) -> object:
    """A repeated flag arrives as a list of texts, which the person did not write."""
    if isinstance(raw, list) and raw and all(isinstance(part, str) for part in raw):
        return ",".join(raw)
    return raw


def _hint(raw: object, row: Row) -> str:
    if raw == "" and row.item is None:
        return " (it is empty; unset it for the default)"
    return nearest(raw, row.choices) if isinstance(raw, str) and row.choices else ""

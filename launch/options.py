"""Flags: those of RuntimeConfig, read off its table, and those that every verb has."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
from typing import TYPE_CHECKING, NoReturn

from tp_runtime.config import CONFIG_FILE_VARIABLE, rows
from tp_runtime.launch.exits import UsageError
from tp_runtime.launch.output import STDOUT, JsonTarget
from tp_runtime.logs import LEVELS, parse_level
from tp_runtime.settings import parse_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tp_runtime.settings import Row

LOG_LEVEL_VARIABLE = "TP_RUNTIME_LOG_LEVEL"


class Parser(argparse.ArgumentParser):
    """Raises instead of exiting, and takes no abbreviated flags (a new flag would break them)."""

    def __init__(self, **kwargs: object) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _Formatter)
        super().__init__(**kwargs)  # type: ignore[arg-type]
        # of nested parsers the innermost one wins, which knows the flags that were meant
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see '{self.prog} --help'")

    def flags(self) -> tuple[str, ...]:
        return tuple(sorted(o for o in self._option_string_actions if o.startswith("--")))


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)


def with_dashes(argv: Sequence[str]) -> list[str]:
    """Accept --kv_block_size for --kv-block-size. Values, and all behind "--", stay as they are."""
    words: list[str] = []
    for i, word in enumerate(argv):
        if word == "--":
            return [*words, *argv[i:]]
        match = re.fullmatch(r"(--[A-Za-z][\w-]*)(=.*)?", word, re.DOTALL)
        words.append(match[1].replace("_", "-") + (match[2] or "") if match else word)
    return words


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse, and say for an unknown flag which known one is near.

    Raises:
        UsageError: the command line is wrong.
    """
    args, unknown = parser.parse_known_args(with_dashes(argv))
    if unknown:
        meant: Parser = args.parser
        name = unknown[0].split("=", 1)[0]
        near = difflib.get_close_matches(name, meant.flags(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"unknown argument {unknown[0]!r}{hint}; see '{meant.prog} --help'")
    return args


def add_common(parser: argparse.ArgumentParser) -> None:
    """--json, --log-level, --debug: every verb has them."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write the result as JSON to FILE, or to standard output",
    )
    group.add_argument(
        "--log-level",
        metavar="LEVEL",
        help=f"{', '.join(LEVELS)} (default warning; {LOG_LEVEL_VARIABLE})",
    )
    group.add_argument(
        "--debug", action="store_true", help="log level debug, and tracebacks with errors"
    )


def add_settings(parser: argparse.ArgumentParser, *, only: Sequence[str] | None = None) -> None:
    """One flag for each setting, or for those named. Values stay texts: the config parses them."""
    group = parser.add_argument_group(
        "settings", "flag > environment > file > default; see docs/configuration.md"
    )
    for name, row in rows().items():
        if row.exposed and (only is None or name in only):
            _add_setting(group, row)
    if only is None:
        group.add_argument(
            "--config", metavar="FILE", help=f"TOML file of settings ({CONFIG_FILE_VARIABLE})"
        )


def _add_setting(group: argparse._ArgumentGroup, row: Row) -> None:
    names = (row.flag, *(f"--{alias}" for alias in row.aliases))
    default = "" if row.default_text is None else f"default {row.default_text}; "
    # argparse reads % as a format
    about = f"{row.help} ({default}{row.env})".replace("%", "%%")
    if row.kind is bool:
        group.add_argument(*names, dest=row.name, action=argparse.BooleanOptionalAction, help=about)
    elif row.item is not None:
        group.add_argument(*names, dest=row.name, action="append", metavar=row.metavar, help=about)
    else:
        group.add_argument(*names, dest=row.name, metavar=row.metavar, help=about)


def json_target(args: argparse.Namespace) -> JsonTarget:
    target = JsonTarget(args.json)
    target.check()
    return target


def log_level(args: argparse.Namespace, env: Mapping[str, str] = os.environ) -> int:
    """--debug > --log-level > TP_RUNTIME_LOG_LEVEL > warning. Raises: ConfigError."""
    if args.debug:
        return LEVELS["debug"]
    if args.log_level is not None:
        return parse_level(args.log_level, source="flag --log-level")
    if LOG_LEVEL_VARIABLE in env:
        return parse_level(
            env[LOG_LEVEL_VARIABLE], source=f"environment variable {LOG_LEVEL_VARIABLE}"
        )
    return LEVELS["warning"]


def parse_number(
    kind: type[int] | type[float],
    text: str,
    *,
    flag: str,
    minimum: float | None = None,
    above: float | None = None,
) -> int | float:
    """A number from a flag, by the same parser as the settings.

    Args:
        minimum: inclusive lower bound.  above: exclusive lower bound.

    Raises: UsageError: it is none, or out of range; with a bound it must be finite too.
    """
    expected = "a whole number" if kind is int else "a number"
    if minimum is not None:
        expected += f" of at least {minimum:g}"
    elif above is not None:
        expected += f" above {above:g}"
    try:
        value = parse_text(kind, text)
    except ValueError:
        value = None
    if (
        not isinstance(value, int | float)
        or (minimum is not None and not minimum <= value < math.inf)
        or (above is not None and not above < value < math.inf)
    ):
        raise UsageError(f"flag {flag}={text!r}: expected {expected}")
    return value

"""Where results go: JSON to a file or standard output, aligned text for a person."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tp_runtime.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

STDOUT = "-"


@dataclass(frozen=True, slots=True)
class JsonTarget:
    """What --json asked for; `where` is None (no JSON), "-" (standard output) or a file."""

    where: str | None

    @property
    def on_stdout(self) -> bool:
        """Standard output belongs to the JSON: human text must go elsewhere or nowhere."""
        return self.where == STDOUT

    def check(self) -> None:
        """Find out before a long run whether the file can be written.

        Raises:
            ConfigError: the folder does not exist, or may not be written.
        """
        if self.where is None or self.on_stdout:
            return
        path = Path(self.where)
        if path.is_dir():
            raise ConfigError(f"flag --json: {path} is a folder; expected a file to write")
        folder = path.parent
        if not folder.is_dir():
            raise ConfigError(f"flag --json: folder {folder} does not exist")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise ConfigError(f"flag --json: {path} cannot be written")

    def for_group(self, group: int) -> JsonTarget:
        """The target of another TP group of the same run: groups do not share a file."""
        if group == 0 or self.where is None:
            return self
        return JsonTarget(None if self.on_stdout else f"{self.where}.group{group}")

    def write(self, document: object) -> None:
        if self.where is None:
            return
        text = json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
        if self.on_stdout:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            try:
                Path(self.where).write_text(text, encoding="utf-8")
            except OSError as error:
                raise ConfigError(
                    f"flag --json: {self.where} cannot be written: {error.strerror or error}"
                ) from error


def say(text: str = "", *, end: str = "\n") -> None:
    """Write to standard output and flush, so that a pipe sees it as it grows."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def table(rows: Sequence[Sequence[str]], *, header: Sequence[str] = (), indent: str = "") -> str:
    """Left-aligned columns, two blanks apart, no trailing blanks."""
    lines = [tuple(header), *map(tuple, rows)] if header else [tuple(row) for row in rows]
    if not lines:
        return ""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        (indent + "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))).rstrip()
        for line in lines
    )

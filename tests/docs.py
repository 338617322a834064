"""The parts of docs/api.md that tests look at."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

API = Path(__file__).parents[1] / "docs" / "api.md"

ONE, ONE_OR_TWO, TWO = "", "runs on 1 or 2 ranks", "needs 2 ranks"
MEASURES = "measures in a child process"
"""What the comment before a snippet may say; without one it runs in one process."""

_SNIPPET = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """line: of its first line in the file. ranks: one of the comments above."""

    line: int
    ranks: str
    code: str

    def run(self) -> str:
        """What it prints. A traceback names the file and the line."""
        printed = io.StringIO()
        names: dict[str, Any] = {"__name__": "docs_api"}
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (self.line - 1) + self.code, str(API), "exec"), names)
        return printed.getvalue()


def snippets(*ranks: str) -> list[Snippet]:
    """Those with one of these comments; all of them if none is given."""
    text = API.read_text()
    found = [
        Snippet(line=text.count("\n", 0, m.start(2)) + 1, ranks=m[1] or ONE, code=m[2])
        for m in _SNIPPET.finditer(text)
    ]
    return [snippet for snippet in found if not ranks or snippet.ranks in ranks]


def prose() -> str:
    """The text without its snippets."""
    return _SNIPPET.sub("", API.read_text())

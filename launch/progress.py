"""A one-line progress bar on standard error, for a terminal and rank 0 only."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self, TextIO

_WIDTH = 24
_ERASE = "\r\x1b[K"


class Progress:
    """Call it with (stage, done, total); leaving the context erases the line.

    Args:
        enabled: False makes every call a no-op; so does a stream that is no terminal.
        stream: standard error when None.
    """

    def __init__(self, *, enabled: bool = True, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._enabled = enabled and self._stream.isatty()
        self._shown: tuple[str, int] | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show a stage at `done` of `total`; a total of 0 shows the stage alone."""
        if not self._enabled:
            return
        filled = _WIDTH * min(done, total) // total if total > 0 else 0
        percent = 100 * min(done, total) // total if total > 0 else 0
        if self._shown == (stage, percent):
            return
        self._shown = (stage, percent)
        bar = f" [{'#' * filled}{'.' * (_WIDTH - filled)}] {done}/{total}" if total > 0 else " ..."
        self._stream.write(f"{_ERASE}{stage:<10}{bar}")
        self._stream.flush()

    def clear(self) -> None:
        """Give the line back."""
        if self._shown is not None:
            self._stream.write(_ERASE)
            self._stream.flush()
            self._shown = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.clear()

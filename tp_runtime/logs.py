"""Log records that know their rank. The library attaches no handler; only the command line does.

The root logger is never touched. A host that wants ranks in its own format adds `RankFilter` to its
own handler (a filter on a logger would miss the records of the loggers below it).
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from tp_runtime.errors import ConfigError

if TYPE_CHECKING:
    from typing import TextIO

LOGGER_NAME = "tp_runtime"
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

_FORMAT = "%(asctime)s rank %(rank)s %(levelname)s %(name)s: %(message)s"


class RankFilter(logging.Filter):
    """Adds `record.rank` to each record; lets every record pass."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        # a caller may have said it itself, by extra={"rank": ...}
        if not hasattr(record, "rank"):
            record.rank = self.rank
        return True


def parse_level(text: str, *, source: str) -> int:
    """The number of a level's name, in any case.

    Raises:
        ConfigError: no such level; names the source.
    """
    level = LEVELS.get(text.lower())
    if level is None:
        raise ConfigError(f"{source}: log level {text!r}: expected one of {', '.join(LEVELS)}")
    return level


def configure(level: int, *, rank: int, stream: TextIO | None = None) -> logging.Handler:
    """Send the library's records to a stream. For a command line, not for library code.

    Called again it replaces its own handler and leaves everybody else's.

    Args:
        level: the least level that is shown.
        rank: the global rank, shown in every record.
        stream: standard error when None.
    """
    logger = logging.getLogger(LOGGER_NAME)
    for old in [h for h in logger.handlers if isinstance(h, _CommandLineHandler)]:
        logger.removeHandler(old)
    handler = _CommandLineHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
    handler.addFilter(RankFilter(rank))
    logger.addHandler(handler)
    logger.setLevel(level)
    return handler


class _CommandLineHandler(logging.StreamHandler["TextIO"]):
    """Its own class, so that `configure` can tell its handler from a host's."""

"""How a command ends: its exit status, and one line for the person.

0 done; 1 it failed while running; 2 it was asked for something that cannot be; 130 interrupted.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from pathlib import Path

from tp_runtime.errors import (
    BackendUnavailable,
    ConfigError,
    ModelError,
    RequestError,
    TpRuntimeError,
)

log = logging.getLogger(__name__)

OK = 0
FAILED = 1
USAGE = 2
INTERRUPTED = 130

REPORTED = (TpRuntimeError, OSError, RuntimeError, MemoryError)
"""What is told in one line. Anything else is a defect of ours and keeps its traceback."""


class UsageError(ConfigError):
    """The command line itself is wrong."""


def status_of(error: BaseException) -> int:
    asked = ConfigError | RequestError | ModelError | BackendUnavailable
    return USAGE if isinstance(error, asked) else FAILED


def report(error: BaseException, *, debug: bool) -> int:
    """Tell the person on standard error, in one line; tell torchrun too. Returns the exit status.

    Args:
        debug: print the traceback before the line.
    """
    if debug:
        traceback.print_exception(error)
    # one write, so that lines of several ranks do not mix
    sys.stderr.write(f"{prefix()}error: {one_line(error)}\n")
    sys.stderr.flush()
    _tell_torchrun(one_line(error))
    return status_of(error)


def prefix() -> str:
    """ "tp-runtime: ", with the rank where torchrun gave one."""
    rank = os.environ.get("RANK")
    return f"tp-runtime: rank {rank}: " if rank is not None else "tp-runtime: "


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, TpRuntimeError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _tell_torchrun(text: str) -> None:
    """Leave the message where torchrun looks for it: it shows that of the first rank to fail."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    document = {"message": {"message": text, "extraInfo": extra}}
    try:
        Path(path).write_text(json.dumps(document), encoding="utf-8")
    except OSError as error:
        log.info("torchrun's error file %s cannot be written: %s", path, error)

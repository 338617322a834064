"""How a command ends: its exit status, and one line for the person.

0 done; 1 it failed while running; 2 it was asked for something that cannot be; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback

from tp_runtime.errors import ConfigError, ModelNotFound, RequestError, TpRuntimeError

OK = 0
FAILED = 1
USAGE = 2
INTERRUPTED = 130

REPORTED = (TpRuntimeError, OSError, RuntimeError, MemoryError)
"""What is told in one line. Anything else is a defect of ours and keeps its traceback."""


class UsageError(ConfigError):
    """The command line itself is wrong."""


def status_of(error: BaseException) -> int:
    return USAGE if isinstance(error, ConfigError | RequestError | ModelNotFound) else FAILED


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
    _tell_torchrun(error)
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


def _tell_torchrun(error: BaseException) -> None:
    # torchrun shows the first failing rank's message if it is left in this file
    if not os.environ.get("TORCHELASTIC_ERROR_FILE"):
        return
    if not isinstance(error, Exception) or status_of(error) == USAGE:
        # a usage error is met before torch is imported, and its line says all there is
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)

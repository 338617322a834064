"""Reads a whole file of which only a small one makes sense: never a device or a pipe.

Those have no size to go by: a device may never end, and opening a pipe waits for its writer.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def read_regular(path: Path, *, most_bytes: int) -> bytes:
    """The bytes of a file.

    Raises: OSError: it cannot be read, is no regular file, or holds more than `most_bytes`; the
        text is in `strerror` in each case.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            kind = "a pipe" if stat.S_ISFIFO(mode) else "a device"
            raise OSError(None, f"expected a regular file, got {kind}", str(path))
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(None, f"expected at most {most_bytes} bytes, got more", str(path))
    return data


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # for a pipe's writer, who may never come

"""Where things are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/tp_runtime, or ~/.cache/tp_runtime. It may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tp_runtime"

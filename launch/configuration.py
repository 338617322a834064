"""Writes docs/configuration.md from RuntimeConfig: `python -m tp_runtime.launch.configuration`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tp_runtime.config import OTHER_VARIABLES, rows

if TYPE_CHECKING:
    from tp_runtime.settings import Row

_HEAD = """\
<!-- Written by `python -m tp_runtime.launch.configuration`; a test compares. -->
# Configuration

Each setting is a field of `tp_runtime.RuntimeConfig`, a flag, an environment variable, and a key of
the TOML file named by `--config` or `TP_RUNTIME_CONFIG`. The first of these that says something
wins: flag, environment, file, default. `tp-runtime doctor` prints every value with its source.

A malformed value is an error that names the value, its source and what was expected; so is an
unknown key of the file. An unknown variable that starts with `TP_RUNTIME_` is warned of. Flags may
be written with dashes or underscores. Switches read 1, true, yes, on, 0, false, no, off in any
case. Lists are separated by commas (in the file: an array), and a list's flag may be repeated.

| setting | flag | environment | default | |
|---|---|---|---|---|
"""

_FILE = """
## File

```toml
model = "smollm2"
enable_dynamic_decode_backend = true
disable_decode_backend = ["cpu_rowwise"]
decode_buckets = [1, 2, 4, 8]
```

## Other variables

| environment | |
|---|---|
"""

_FOREIGN = {
    "RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT": (
        "set by torchrun; all of them or none"
    ),
    "OMP_NUM_THREADS": (
        "as TP_RUNTIME_NUM_THREADS, which comes first; with several ranks a 1 does not count, "
        "as torchrun sets it by itself"
    ),
    "XDG_RUNTIME_DIR": (
        "private folder of this user; sockets go into its `tp_runtime`, "
        "else into `/tmp/tp_runtime-<uid>`"
    ),
}


def page() -> str:
    """The whole page."""
    settings = "".join(_line(row) for row in rows().values() if row.exposed)
    others = "".join(
        f"| {name} | {about} |\n" for name, about in (OTHER_VARIABLES | _FOREIGN).items()
    )
    return _HEAD + settings + _FILE + others


def _line(row: Row) -> str:
    flags = [row.flag, *(f"--{alias}" for alias in row.aliases)]
    if row.kind is bool:
        flags = [f"{row.flag}", f"--no-{row.flag[2:]}"]
    shown = ", ".join(f"`{flag}`" for flag in flags)
    about = row.help
    if row.choices:
        about += f" ({', '.join(row.choices)})"
    default = row.default_text or ("unset" if row.default is None else "none")
    return f"| {row.name} | {shown} | {row.env} | {default} | {about} |\n"


if __name__ == "__main__":
    sys.stdout.write(page())

"""`decode` under torchrun, where rank 1 is killed in the first attempt: for CPU and GPU tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.commands import ENV, ROOT, TORCHRUN
from tests.strikes import strike_before

if TYPE_CHECKING:
    from pathlib import Path


def serve_again(folder: Path, device: str) -> dict[str, Any]:
    """What `decode --json` writes after torchrun has started all ranks a second time."""
    out = folder / "out.json"
    done = subprocess.run(
        [
            *(*TORCHRUN, "2", "--max-restarts", "1", "-m", "tests.restarts"),
            *("decode", "--model", "random:tiny", "--device", device, "--prompt", "1 2 3"),
            *("--max-tokens", "40", "--ignore-eos", "--decode-buckets", "1"),
            *("--enable-dynamic-decode-backend", "--json", str(out)),
        ],
        cwd=ROOT,
        env=ENV | {"XDG_CACHE_HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 lost rank 1" in done.stderr
    assert "(cached)" in done.stdout + done.stderr  # of the second attempt; the first did not end
    document: dict[str, Any] = json.loads(out.read_text())
    return document


def main() -> int:
    """The command line, on a rank that may be the one to die."""
    from tp_runtime import planning
    from tp_runtime.launch.__main__ import main as command
    from tp_runtime.ranks import RankInfo
    from tp_runtime.step_plan import StepKind

    info = RankInfo.from_env()
    # other tests on this machine may disturb what is measured, which is not what this is about
    setattr(planning, "disturbed", lambda plan: False)
    if info.tp_rank == 1 and info.restart_count == 0:
        die = partial(os.kill, os.getpid(), signal.SIGKILL)
        strike_before(StepKind.DECODE, die, after_step=10)
    return command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

"""How tests start the command line: where, and with nothing of the caller's own settings."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tp_runtime.ranks import TORCHRUN_VARIABLES

ROOT = Path(__file__).resolve().parents[1]
ENV = {
    name: value
    for name, value in os.environ.items()
    if name not in TORCHRUN_VARIABLES and not name.startswith("TP_RUNTIME_")
} | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")

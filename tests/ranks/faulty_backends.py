"""Backends that fail in the ways a kernel can take a process down. Named by the child's request."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from tp_runtime.selection.backends.cpu_padded import CpuPadded

if TYPE_CHECKING:
    from torch import Tensor

    from tp_runtime.selection.base import PagedKV


class Hangs(CpuPadded):
    """Right in the numeric gate, then waits for good in a larger batch."""

    def forward(self, q: Tensor, kv: PagedKV, out: Tensor) -> None:
        if q.shape[0] > 1:
            time.sleep(3600.0)
        super().forward(q, kv, out)


class Crashes(CpuPadded):
    def forward(self, q: Tensor, kv: PagedKV, out: Tensor) -> None:
        print("a kernel's last words on stdout", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)


class Exits(CpuPadded):
    def prepare_for_capture(self, bucket: int) -> None:
        os._exit(7)

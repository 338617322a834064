"""Decode attention on the CPU with every row padded to the longest.

The fewest operations per layer, and work in proportion to rows times the longest row: best for
short batches of nearly equal lengths.
"""

from __future__ import annotations

import math
from typing import ClassVar

from tp_runtime.selection.backends.cpu_grouped import CpuGrouped


class CpuPadded(CpuGrouped):
    name = "cpu_padded"
    max_padding: ClassVar[float] = math.inf

"""Whether the fused kernels of this package run on a device, and how they are launched."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

import torch

_LEAST_MAJOR = 8  # bfloat16 arithmetic
_DEPENDENT_LAUNCH_MAJOR = 9


def runs_kernels(device: torch.device) -> bool:
    """True where the Triton kernels run; everything else takes the plain torch forms."""
    return device.type == "cuda" and _major(device) >= _LEAST_MAJOR and _has_triton()


def dependent_launch(device: torch.device) -> bool:
    """Whether kernels may start before the one ahead of them ends (from Hopper on).

    A kernel so launched waits for the whole grid ahead of it before it reads or writes anything
    that another kernel touches. As every one of them waits, a kernel also sees what those further
    back wrote.
    """
    return _major(device) >= _DEPENDENT_LAUNCH_MAJOR


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


@lru_cache(maxsize=16)
def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None

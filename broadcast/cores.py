"""How many cores this process may use, which is not how many the machine has."""

from __future__ import annotations

import os
from pathlib import Path


def cores_available() -> int:
    """Cores that this process may use: its affinity, and the CPU quota of its cgroups."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, _quota_cores(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))))


def _quota_cores(membership: Path, mount: Path) -> int:
    """Whole cores that the cgroup (version 2) and those above it allow; large if no limit."""
    unlimited = 1 << 20
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return unlimited
    inside = next((line[3:] for line in lines if line.startswith("0::")), "/")
    folder = mount / inside.lstrip("/")
    cores = unlimited
    while True:
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            quota, period = "max", "1"
        if quota != "max":
            cores = min(cores, int(quota) // int(period))
        if folder in (mount, folder.parent):
            return cores
        folder = folder.parent

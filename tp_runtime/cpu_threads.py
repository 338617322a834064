"""How many CPU threads one rank may use when several share the host."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tp_runtime.broadcast.cores import cores_available
from tp_runtime.errors import EnvError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["cpu_threads_per_rank", "requested_threads", "thread_variable"]


def cpu_threads_per_rank(local_world_size: int) -> int:
    """An equal share of the CPUs, at least one.

    Args:
        local_world_size: ranks on this host.
    """
    return max(1, cores_available() // local_world_size)


def requested_threads(
    env: Mapping[str, str] | None = None, *, local_world_size: int = 1
) -> int | None:
    """The number of threads that the user asked for, or None.

    TP_RUNTIME_NUM_THREADS always counts. OMP_NUM_THREADS counts unless it is the 1 that torchrun
    sets by itself when it starts more than one process.

    Raises:
        EnvError: the variable is not a positive number.
    """
    found = thread_variable(env, local_world_size=local_world_size)
    return None if found is None else found[1]


def thread_variable(
    env: Mapping[str, str] | None = None, *, local_world_size: int = 1
) -> tuple[str, int] | None:
    """The variable that `requested_threads` goes by, with its number. Raises as that does."""
    env = os.environ if env is None else env
    for name in ("TP_RUNTIME_NUM_THREADS", "OMP_NUM_THREADS"):
        text = env.get(name)
        if not text:
            continue
        if name == "OMP_NUM_THREADS":
            text = text.partition(",")[0]  # one number per level of nesting
            if text == "1" and local_world_size > 1:
                continue
        if not text.isdecimal() or int(text) < 1:
            raise EnvError(f"{name}={env[name]!r}: expected a positive number of threads")
        return name, int(text)
    return None

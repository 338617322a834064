"""Which rank this process is, read from the variables that torchrun sets.

Three numberings meet here and must not be mixed up:

- the global rank counts every process of the run (torchrun's RANK);
- the local rank counts the processes of one host and names the device (LOCAL_RANK);
- the TP rank counts the processes that hold shards of one copy of the model. With
  ``--tp-size 2`` on four processes there are two TP groups, and TP rank 0 exists twice.

This module imports no torch, so that it costs nothing to ask.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from tp_runtime.errors import ConfigError, EnvError, TpGroupError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TORCHRUN_VARIABLES", "RankInfo"]

TORCHRUN_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""What torchrun gives every process. Either all of them are set or none is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """The place of this process in the run.

    Attributes:
        rank: global rank, 0 <= rank < world_size.
        world_size: processes in the whole run.
        local_rank: rank on this host; the index of its accelerator.
        local_world_size: processes on this host.
        tp_rank: rank in its tensor-parallel group, 0 <= tp_rank < tp_size.
        tp_size: ranks in one tensor-parallel group.
        tp_group: index of the group: ranks [tp_group * tp_size, (tp_group + 1) * tp_size).
        master_addr: host of the rendezvous store; empty for a single process.
        master_port: port of the rendezvous store; 0 for a single process.
        run_id: name of the run (torchrun's --rdzv-id).
        restart_count: how often torchrun has restarted the ranks.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    tp_rank: int
    tp_size: int
    tp_group: int
    master_addr: str
    master_port: int
    run_id: str
    restart_count: int

    @property
    def tp_ranks(self) -> range:
        """The global ranks of this rank's tensor-parallel group, in TP rank order."""
        first = self.tp_group * self.tp_size
        return range(first, first + self.tp_size)

    @classmethod
    def single(cls) -> Self:
        """The only rank of a run that needs no launcher."""
        return cls(
            rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            tp_rank=0,
            tp_size=1,
            tp_group=0,
            master_addr="",
            master_port=0,
            run_id="",
            restart_count=0,
        )

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, *, tp_size: int | None = None) -> Self:
        """Reads the torchrun variables.

        Args:
            env: the variables; the process's own by default.
            tp_size: ranks in one tensor-parallel group; by default all ranks form one.

        Returns:
            The place of this process. Without any torchrun variable it is a single rank.

        Raises:
            EnvError: a variable is missing, malformed, or contradicts another.
            ConfigError: ``tp_size`` is not positive or does not divide WORLD_SIZE.
            TpGroupError: the group of this rank would span hosts.
        """
        env = os.environ if env is None else env
        if tp_size is not None and tp_size < 1:
            raise ConfigError(f"tp_size={tp_size}: expected a positive number of ranks")
        missing = [name for name in TORCHRUN_VARIABLES if not env.get(name)]
        if len(missing) == len(TORCHRUN_VARIABLES):
            if tp_size is not None and tp_size > 1:
                raise EnvError(
                    f"tp_size={tp_size} needs {tp_size} processes, but this one was started alone "
                    f"(RANK and WORLD_SIZE are not set); start it with "
                    f"torchrun --nproc-per-node {tp_size} ..."
                )
            return cls.single()
        if missing:
            present = [name for name in TORCHRUN_VARIABLES if name not in missing]
            raise EnvError(
                f"{', '.join(missing)} not set although {', '.join(present)} "
                f"{'is' if len(present) == 1 else 'are'}; torchrun sets all of "
                f"{', '.join(TORCHRUN_VARIABLES)}: start with torchrun, or unset them all "
                f"for a single rank"
            )

        world_size = _integer(env, "WORLD_SIZE", low=1)
        rank = _integer(env, "RANK", low=0, high=world_size - 1)
        local_world_size = _integer(env, "LOCAL_WORLD_SIZE", low=1, high=world_size)
        local_rank = _integer(env, "LOCAL_RANK", low=0, high=local_world_size - 1)
        if rank < local_rank:
            raise EnvError(
                f"RANK={rank} is smaller than LOCAL_RANK={local_rank}: ranks must be numbered "
                f"host by host, as torchrun does"
            )
        size = world_size if tp_size is None else tp_size
        if world_size % size:
            raise ConfigError(
                f"tp_size={size} does not divide WORLD_SIZE={world_size}: "
                f"start a multiple of {size} processes, or change --tp-size"
            )
        info = cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            tp_rank=rank % size,
            tp_size=size,
            tp_group=rank // size,
            master_addr=env["MASTER_ADDR"],
            master_port=_integer(env, "MASTER_PORT", low=1, high=65535),
            run_id=env.get("TORCHELASTIC_RUN_ID", ""),
            restart_count=(
                _integer(env, "TORCHELASTIC_RESTART_COUNT", low=0)
                if env.get("TORCHELASTIC_RESTART_COUNT")
                else 0
            ),
        )
        info._require_one_host()
        return info

    def _require_one_host(self) -> None:
        """Refuses a group with members elsewhere: its channel and shared memory are local.

        torchrun numbers ranks host by host, so the ranks here are one range that this rank's
        own two numbers give, whatever the other hosts look like.
        """
        first = self.rank - self.local_rank
        here = range(first, first + self.local_world_size)
        away = [rank for rank in self.tp_ranks if rank not in here]
        if away:
            raise TpGroupError(
                f"tensor-parallel group {self.tp_group} (global ranks {_span(self.tp_ranks)}) "
                f"spans hosts: {socket.gethostname()} runs ranks {_span(here)}, but "
                f"{'rank' if len(away) == 1 else 'ranks'} {', '.join(map(str, away))} "
                f"{'runs' if len(away) == 1 else 'run'} on another host; choose a --tp-size that "
                f"divides the {self.local_world_size} processes of each host"
            )


def _integer(env: Mapping[str, str], name: str, *, low: int, high: int | None = None) -> int:
    text = env[name]
    expected = f"an integer of at least {low}" if high is None else f"an integer in {low}..{high}"
    try:
        value = int(text)
    except ValueError:
        raise EnvError(f"{name}={text!r}: expected {expected}") from None
    if value < low or (high is not None and value > high):
        raise EnvError(f"{name}={text!r}: expected {expected}")
    return value


def _span(ranks: range) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"

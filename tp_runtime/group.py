"""The collectives of one tensor-parallel group, the same on CPU and GPU.

On the GPU they run on the current stream: small sums through memory that the devices map from
each other (:mod:`tp_runtime.ops.peer_reduce`), the rest through NCCL. On the CPU they go through
shared memory (:mod:`tp_runtime.shared_reduce`), or through gloo where that is not possible. Every
wait of the host is bounded, and a rank that has ended is named at once.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, cast

import torch

from tp_runtime.cpu_threads import cpu_threads_per_rank, requested_threads
from tp_runtime.device_collectives import DeviceCollectives
from tp_runtime.errors import ChannelClosed, DeadlineExceeded, PeerLost, TpGroupError
from tp_runtime.host_collectives import HostCollectives
from tp_runtime.liveness import PeerWatch, watch_peers
from tp_runtime.process_group import (
    await_ranks,
    connect_store,
    make_gloo,
    make_nccl,
    set_nccl_defaults,
)
from tp_runtime.reduce_plan import NO_PEER_REDUCE, ReducePlan
from tp_runtime.shared_reduce import REDUCED_DTYPES, SharedReduce, SharedReduceStatistics

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

    from tp_runtime.ops.peer_reduce import PeerReduce
    from tp_runtime.process_group import Collectives
    from tp_runtime.ranks import RankInfo

log = logging.getLogger(__name__)

__all__ = ["GroupStatistics", "TpGroup", "cpu_threads_per_rank"]


_DEATH_POLL_S = 0.0001
_DEATH_SHOWS_S = 0.2  # from the reset of a dead peer's socket to the end of its process


_groups: weakref.WeakSet[TpGroup] = weakref.WeakSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """What a group has done since it was made.

    Attributes:
        device: collectives on the group's accelerator; in a graph those of its capture.
        peer: those of them that went through peer memory and not through NCCL.
        gloo: collectives of CPU tensors through gloo, or through the host's own group.
        shared: those through shared memory; None where there is none.
    """

    device: int
    peer: int
    gloo: int
    shared: SharedReduceStatistics | None


class TpGroup:
    """One rank's member of a tensor-parallel group.

    Made by :meth:`create`, :meth:`single` or :meth:`from_process_group`. Every rank calls the
    same collectives in the same order, one thread at a time; :meth:`fail` is for any thread. A
    forked child may not use it, and does nothing to it by closing it.

    Attributes:
        rank: TP rank, 0 <= rank < size.
        size: ranks in the group.
        device: where the tensors of this rank live; CPU tensors are taken as well.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        cpu: Collectives | None = None,
        accelerator: Collectives | None = None,
        owned: bool = False,
        shared_memory: bool = True,
        peer_memory: bool = False,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._timeout_s = timeout_s
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._watch: PeerWatch | None = None
        self._shared: SharedReduce | None = None
        self._on_host: HostCollectives | None = None
        self._on_device: DeviceCollectives | None = None
        if cpu is not None:
            self._on_host = HostCollectives(
                cpu,
                rank=rank,
                timeout_s=timeout_s,
                owned=owned,
                failure=lambda: self._failure,
                explained=self._explained,
                fail=self.fail,
            )
        if accelerator is not None:
            self._on_device = DeviceCollectives(
                accelerator, rank=rank, device=device, owned=owned, explained=self._explained
            )
        _groups.add(self)
        if size > 1:
            self._watch = watch_peers(self._exchange, rank=rank)
            if self._on_device is not None and self._watch is not None:
                self._on_device.open_peer_memory(
                    self._exchange, size=size, timeout_s=timeout_s, wanted=peer_memory
                )
            if shared_memory and self._watch is not None:
                self._shared = SharedReduce.open(
                    self._exchange, rank=rank, size=size, timeout_s=timeout_s, watch=self._watch
                )

    # ---- making one --------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        info: RankInfo,
        *,
        device: torch.device,
        timeout_s: float = 120.0,
        shared_memory: bool = True,
        peer_memory: bool = False,
        failure: Callable[[], Exception | None] | None = None,
    ) -> Self:
        """Meets the other ranks of this rank's tensor-parallel group.

        Args:
            info: the place of this rank.
            device: ``cpu``, or this rank's own ``cuda:<local rank>``.
            timeout_s: bounds the meeting, and later every wait of the host for a peer.
            shared_memory: False keeps CPU tensors on gloo.
            peer_memory: True lets small sums of the devices go through memory that they map from
                each other, where that works; else all are left to NCCL.
            failure: asked while waiting for the others to come; what it gives is raised.

        Raises:
            TpGroupError: the group was not formed in time, or the store's port is not ours.
        """
        if device.type == "cpu":
            asked = requested_threads(local_world_size=info.local_world_size)
            torch.set_num_threads(asked or cpu_threads_per_rank(info.local_world_size))
        if info.tp_size == 1:
            return cls.single(device)
        store = connect_store(info, timeout_s=timeout_s, failure=failure)
        await_ranks(store, info, timeout_s=timeout_s, failure=failure)
        cpu = make_gloo(store, info, timeout_s=timeout_s)
        accelerator = None
        if device.type != "cpu":
            accelerator = make_nccl(store, info, device, timeout_s=timeout_s)
        return cls(
            rank=info.tp_rank,
            size=info.tp_size,
            device=device,
            timeout_s=timeout_s,
            cpu=cpu,
            accelerator=accelerator,
            owned=True,
            shared_memory=shared_memory,
            peer_memory=peer_memory,
        )

    @classmethod
    def single(cls, device: torch.device) -> Self:
        """A group of one rank, in which every collective gives back its argument."""
        return cls(rank=0, size=1, device=device, timeout_s=0.0)

    @classmethod
    def from_process_group(
        cls,
        pg: dist.ProcessGroup,
        *,
        device: torch.device | None = None,
        timeout_s: float = 120.0,
        peer_memory: bool = False,
    ) -> Self:
        """Works on a group that the host program owns, and leaves it open at the end.

        Args:
            pg: a group of torch.distributed; its ranks become the TP ranks. Every rank of it
                makes this call.
            device: by default the current accelerator if the group serves one, else the CPU.
            timeout_s: bounds every wait of the host for a peer.
            peer_memory: as for :meth:`create`.
        """
        kinds = {kind.type for kind in pg._device_types}
        if device is None:
            device = _served_device(pg, kinds)
        if device.type not in kinds:
            raise TpGroupError(
                f"the process group serves {', '.join(sorted(kinds))}, but the device of rank "
                f"{pg.rank()} is {device}: pass a group that serves {device.type}"
            )
        set_nccl_defaults()
        return cls(
            rank=pg.rank(),
            size=pg.size(),
            device=device,
            timeout_s=timeout_s,
            cpu=cast("Collectives", pg) if "cpu" in kinds else None,
            accelerator=cast("Collectives", pg) if device.type != "cpu" else None,
            peer_memory=peer_memory,
        )

    # ---- collectives -------------------------------------------------------------------------

    def all_reduce(self, t: torch.Tensor) -> torch.Tensor:
        """Sums ``t`` over the ranks, in place, and returns it.

        Every rank gets the same bits. Through shared memory and through peer memory the sum is
        taken in rank order. On a GPU this only launches the work: see :meth:`raise_if_failed`.

        Raises:
            PeerLost: a rank ended or failed the group.
            DeadlineExceeded: a rank that lives did not come in time.
            TpGroupError: the transport failed for another reason.
        """
        if self.size == 1:
            return t
        shared = self._shared
        if shared is not None and t.device.type == "cpu" and t.dtype in REDUCED_DTYPES:
            return shared.all_reduce(t) if t.numel() else t
        if not t.numel():
            return t
        if t.device.type != "cpu":
            return self._on_device_of(t).all_reduce(t)
        return self._on_host_of(t).all_reduce(t)

    def all_reduce_norm(
        self, t: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As :meth:`all_reduce`; the norm of the sum comes with it where that is one launch.

        Args:
            t: [rows, width]; changed in place.
            weight: [width], of the norm.
            eps: added to the mean square.

        Returns:
            t, and rms_norm(t, weight, eps) as :mod:`tp_runtime.ops.norm` defines it, or None on
            every rank where the sum does not go through peer memory.

        Raises:
            PeerLost, DeadlineExceeded, TpGroupError: as :meth:`all_reduce`.
        """
        if self._on_device is not None and t.device.type != "cpu":
            both = self._on_device_of(t).all_reduce_norm(t, weight, eps)
            if both is not None:
                return both
        return self.all_reduce(t), None

    def all_gather(self, t: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, [size, *t.shape]. All have the same shape and dtype.

        Raises:
            PeerLost, DeadlineExceeded, TpGroupError: as :meth:`all_reduce`.
        """
        if self.size == 1:
            return t.unsqueeze(0)
        out = t.new_empty((self.size, *t.shape))
        if not t.numel():
            return out
        if t.device.type != "cpu":
            return self._on_device_of(t).all_gather(t, out)
        if self._shared is not None:
            return self._shared.all_gather(t, out)
        return self._on_host_of(t).all_gather(t, out)

    def broadcast(self, t: torch.Tensor) -> torch.Tensor:
        """Copies ``t`` of TP rank 0 into that of the others, in place, and returns it.

        Raises:
            PeerLost, DeadlineExceeded, TpGroupError: as :meth:`all_reduce`.
        """
        if self.size == 1 or not t.numel():
            return t
        if t.device.type != "cpu":
            return self._on_device_of(t).broadcast(t)
        if self._shared is not None:
            return self._shared.broadcast(t)
        return self._on_host_of(t).broadcast(t)

    def barrier(self) -> None:
        """Returns when all ranks have called it. Work on their devices may still be under way.

        Raises:
            PeerLost, DeadlineExceeded, TpGroupError: as :meth:`all_reduce`.
        """
        if self.size == 1:
            return
        if self._shared is not None:
            self._shared.barrier()
        else:
            self._host_side(self.all_reduce, torch.zeros(1))

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """The bytes of TP rank 0, on every rank.

        Args:
            data: what to send on rank 0; ignored on the others.

        Raises:
            TpGroupError: rank 0 has nothing to send.
            PeerLost, DeadlineExceeded: as :meth:`all_reduce`.
        """
        if self.rank == 0 and data is None:
            raise TpGroupError("broadcast_bytes: TP rank 0 must give the bytes, got None")
        if self.size == 1:
            return data or b""
        sent = (data or b"") if self.rank == 0 else b""
        length = int(self._host_side(self.broadcast, torch.tensor([len(sent)])).item())
        if length == 0:
            return b""
        body = bytearray(sent) if self.rank == 0 else bytearray(length)
        got = self._host_side(self.broadcast, torch.frombuffer(body, dtype=torch.uint8))
        return got.numpy().tobytes()

    # ---- failure and end ---------------------------------------------------------------------

    def set_timeout(self, timeout_s: float) -> None:
        """How long a wait of the host for a peer may take from now on.

        Forming a group and loading a model take longer than any step may.
        """
        self._timeout_s = timeout_s
        if self._shared is not None:
            self._shared.set_timeout(timeout_s)
        if self._on_host is not None:
            self._on_host.set_timeout(timeout_s)
        if self._on_device is not None:
            self._on_device.set_timeout(timeout_s)

    def fail(self, cause: Exception) -> None:
        """Ends every wait of this group with ``cause``, now and later. From any thread.

        Peers that share memory with this rank get PeerLost at once; others at their deadline.
        Collectives that the device waits in end too, with results that mean nothing (ask
        :meth:`raise_if_failed`); in a host program's own NCCL group the host has to end them.
        """
        with self._lock:
            if self._failure is None:
                self._failure = cause
        if self._shared is not None:
            self._shared.fail(cause)
        if self._on_device is not None:
            self._on_device.stop()

    def raise_if_failed(self) -> None:
        """To be asked before results that came off the device are used.

        A sum through peer memory whose peer is gone ends all the same, with numbers that mean
        nothing, so that the device is never stuck.

        Raises:
            PeerLost: a peer ended while this rank's device waited for it.
            DeadlineExceeded: a peer that lives did not come in time.
            Exception: what :meth:`fail` was given.
        """
        if self._failure is not None:
            raise self._failure
        if not self.gave_up:
            return
        dead = None if self._watch is None else self._watch.dead()
        if dead is None:
            late = DeadlineExceeded(
                f"TP rank {self.rank}: the device waited longer than {self._timeout_s:g} s for a "
                "peer in a sum: is a rank stopped, or do the ranks run different steps?"
            )
            self.fail(late)
            raise late
        reason = "its process has ended"
        lost = PeerLost(
            f"TP rank {self.rank} lost TP rank {dead} in a sum: {reason}; look at its output",
            rank=dead,
            reason=reason,
        )
        self.fail(lost)
        raise lost

    @property
    def gave_up(self) -> bool:
        """Whether a sum of the device has ended without its peer. From any thread."""
        return self._on_device is not None and self._on_device.gave_up

    # ---- how devices sum ---------------------------------------------------------------------

    @property
    def peer_reduce(self) -> PeerReduce | None:
        """The sums through peer memory; None, on every rank, where the devices share none."""
        return None if self._on_device is None else self._on_device.peer_reduce

    @property
    def reduce_plan(self) -> ReducePlan:
        """What goes through peer memory and how; what graphs hold depends on it."""
        return NO_PEER_REDUCE if self._on_device is None else self._on_device.plan

    def use_reduce_plan(self, plan: ReducePlan) -> None:
        """Sum as the plan says from here on; the same plan on all ranks at the same point.

        Raises: TpGroupError: the plan wants peer memory, and there is none.
        """
        if any(plan.program_bytes) and self.peer_reduce is None:
            raise TpGroupError(
                f"TP rank {self.rank} shares no device memory with its peers, but the plan of sums "
                "uses it"
            )
        if self._on_device is not None:
            self._on_device.plan = plan

    def statistics(self) -> GroupStatistics:
        """How many collectives went which way so far."""
        return GroupStatistics(
            device=0 if self._on_device is None else self._on_device.count,
            peer=0 if self._on_device is None else self._on_device.peer_count,
            gloo=0 if self._on_host is None else self._on_host.count,
            shared=None if self._shared is None else self._shared.statistics(),
        )

    def close(self) -> None:
        """Leaves the group; a group of the host program stays open. Idempotent.

        Graphs that hold collectives of this group must be gone before.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._failure is None:
                self._failure = ChannelClosed(f"TP rank {self.rank}: the group is closed")
        if self._shared is not None:
            self._shared.close()
        if self._watch is not None:
            self._watch.close()
        if self._on_device is not None:
            self._on_device.close()
        if self._on_host is not None:
            self._on_host.close()

    def _abandon(self) -> None:
        """In a forked child, to which nothing of it belongs, neither threads nor shared memory."""
        ends = (self._on_host, self._shared, self._on_device, self._watch)
        for end in ends:  # nor may their memory be collected: gloo's end waits for its threads
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(end))
        self._on_host = self._shared = self._on_device = self._watch = None
        self._lock = threading.Lock()
        self._closed = True
        self._failure = TpGroupError(
            f"TP rank {self.rank}: a forked child may not use the group of process {os.getppid()}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- how -----------------------------------------------------------------------------------

    def _on_device_of(self, t: torch.Tensor) -> DeviceCollectives:
        """The collectives of the tensor's device. Raises: the group failed, or has no such ones."""
        self.raise_if_failed()
        if self._on_device is None:
            raise TpGroupError(
                f"TP rank {self.rank}: got a tensor on {t.device}, but the group is on "
                f"{self.device}"
            )
        return self._on_device

    def _on_host_of(self, t: torch.Tensor) -> HostCollectives:
        """The collectives of CPU tensors. Raises: the group failed, or has no such ones."""
        if self._failure is not None:
            raise self._failure
        if self._on_host is None:
            raise TpGroupError(
                f"TP rank {self.rank}: got a tensor on {t.device}, but the process group serves "
                f"{self.device.type} only"
            )
        return self._on_host

    def _explained(self, error: RuntimeError) -> Exception:
        """What a failed transport means: what ended it, or a peer that ended."""
        if self._failure is not None:
            return self._failure
        deadline = time.monotonic() + _DEATH_SHOWS_S
        dead = None
        while self._watch is not None and dead is None and time.monotonic() < deadline:
            dead = self._watch.dead()
            time.sleep(_DEATH_POLL_S)
        first = str(error).strip().partition("\n")[0]
        if dead is None:
            cause: Exception = TpGroupError(
                f"TP rank {self.rank}: a collective failed ({first}); look at the other ranks"
            )
        else:
            reason = "its process has ended"
            cause = PeerLost(
                f"TP rank {self.rank} lost TP rank {dead}: {reason} ({first}); look at its output",
                rank=dead,
                reason=reason,
            )
        self.fail(cause)
        return cause

    def _host_side(
        self, collective: Callable[[torch.Tensor], torch.Tensor], t: torch.Tensor
    ) -> torch.Tensor:
        """Runs a collective on a CPU tensor, through the device if the group serves only that."""
        if self._on_host is not None or self._shared is not None:
            return collective(t)
        return collective(t.to(self.device)).cpu()

    def _exchange(self, row: torch.Tensor) -> torch.Tensor:
        return self._host_side(self.all_gather, row)


def _after_fork_in_child() -> None:
    for group in list(_groups):
        group._abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _served_device(pg: dist.ProcessGroup, kinds: set[str]) -> torch.device:
    """The current GPU where the group has a backend made for it; gloo only copies for one."""
    if "cuda" in kinds and torch.cuda.is_available():
        gpu = torch.device("cuda", torch.cuda.current_device())
        if pg._get_backend(gpu).name() != "gloo":
            return gpu
    return torch.device("cpu")

"""The collectives of a group's GPUs: small sums through peer memory, all else through NCCL.

They are launched on the current stream, may be captured in a graph, and no host waits in them. So
one whose peer is gone shows later: NCCL's ends when it is aborted, a sum through peer memory gives
up by itself, and the numbers mean nothing (:attr:`DeviceCollectives.gave_up`).
"""

from __future__ import annotations

import ctypes
import logging
import threading
from typing import TYPE_CHECKING

import torch

from tp_runtime.ops.peer_reduce import WORKSPACE_MARK, PeerReduce, workspace_bytes
from tp_runtime.peer_memory import PeerMemory
from tp_runtime.process_group import (
    in_place,
    start_all_gather,
    start_all_reduce,
    start_broadcast,
)
from tp_runtime.reduce_plan import NO_PEER_REDUCE, ReducePlan

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

    from tp_runtime.process_group import Collectives

__all__ = ["DeviceCollectives"]

log = logging.getLogger(__name__)

_TRIAL_S = 30.0  # for the first sums; ranks compile the kernel at different speeds
_ABORT_S = 10.0  # for NCCL to give up, once the graphs that hold its collectives are gone
_START_S = 0.1  # for a collective that is being started, which takes microseconds


class DeviceCollectives:
    """One rank's end. Every rank launches the same collectives in the same order, from one thread.

    Args:
        nccl: serves `device`: NCCL's group, or one of a host program that contains it.
        rank: TP rank of this process.
        device: of this rank.
        owned: NCCL is aborted by :meth:`stop` and shut down by :meth:`close`.
        explained: what to raise when NCCL fails with an error, or was stopped.

    Attributes:
        count: collectives launched so far; in a graph those of its capture.
        peer_count: those of them that went through peer memory.
        plan: what goes through peer memory and how; what graphs hold depends on it.
    """

    def __init__(
        self,
        nccl: Collectives,
        *,
        rank: int,
        device: torch.device,
        owned: bool,
        explained: Callable[[RuntimeError], Exception],
    ) -> None:
        self.count = 0
        self.peer_count = 0
        self._nccl = nccl
        self._rank = rank
        self._device = device
        self._owned = owned
        self._explained = explained
        self._memory: PeerMemory | None = None
        self._peer: PeerReduce | None = None
        self.plan = NO_PEER_REDUCE
        self._starting = threading.Lock()
        self._stopping = threading.Lock()
        self._stopped = False
        self._abort: threading.Thread | None = None

    # ---- peer memory -------------------------------------------------------------------------

    def open_peer_memory(
        self,
        exchange: Callable[[torch.Tensor], torch.Tensor],
        *,
        size: int,
        timeout_s: float,
        wanted: bool,
    ) -> None:
        """Maps the peers' memory on all ranks or on none, and only if the sums come out right.

        Args:
            exchange: as `PeerMemory.open` takes it.
            size: ranks in the group; they run on one host.
            timeout_s: how long a sum waits for a peer.
            wanted: by this rank; it calls this also if not.
        """
        refusal = None if wanted else "turned off"
        if refusal is None and not PeerReduce.serves(self._device):
            refusal = f"{self._device} runs no Triton kernels"
        memory = PeerMemory.open(
            exchange,
            rank=self._rank,
            size=size,
            device=self._device,
            nbytes=workspace_bytes(size),
            value=WORKSPACE_MARK,
            refusal=refusal,
        )
        if memory is None:
            return
        plan = ReducePlan.usual(size)
        with torch.cuda.device(self._device):
            peer = PeerReduce(memory, timeout_s=min(timeout_s, _TRIAL_S))
            problem = peer.try_out(program_bytes=plan.for_bytes(1))
        if not bool(exchange(torch.tensor([int(problem is None)])).all()):
            why = problem or "it failed on another rank"
            log.warning("TP rank %d leaves all sums to NCCL: %s", self._rank, why)
            memory.close()
            return
        peer.set_timeout(timeout_s)
        self._memory, self._peer, self.plan = memory, peer, plan

    @property
    def peer_reduce(self) -> PeerReduce | None:
        """The sums through peer memory; None, on every rank, where the devices share none."""
        return self._peer

    def set_timeout(self, timeout_s: float) -> None:
        """How long a sum through peer memory waits; NCCL's waits end when it is aborted."""
        if self._peer is not None:
            self._peer.set_timeout(timeout_s)

    @property
    def gave_up(self) -> bool:
        """Whether a sum ended without its peer: results from then on mean nothing."""
        return self._peer is not None and self._peer.gave_up

    # ---- collectives, as those of TpGroup ----------------------------------------------------

    def all_reduce(self, t: torch.Tensor) -> torch.Tensor:
        peer = self._peer
        program_bytes = 0 if peer is None else self.plan.for_bytes(t.nbytes)
        if peer is not None and program_bytes and peer.takes(t):
            self.count += 1
            self.peer_count += 1
            return peer.all_reduce(t, program_bytes=program_bytes)
        return in_place(t, lambda dense: self._start(lambda: start_all_reduce(self._nccl, dense)))

    def all_reduce_norm(
        self, t: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """None, with nothing done, where it is not one launch."""
        peer = self._peer
        if (
            peer is None
            or not self.plan.for_bytes(t.nbytes)
            or not peer.takes_rows(t)
            or weight.dtype != t.dtype
        ):
            return None
        self.count += 1
        self.peer_count += 1
        return peer.all_reduce_norm(t, weight, eps)

    def all_gather(self, t: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        dense = t.contiguous().view(-1)
        self._start(lambda: start_all_gather(self._nccl, out.view(-1), dense))
        return out

    def broadcast(self, t: torch.Tensor) -> torch.Tensor:
        return in_place(t, lambda dense: self._start(lambda: start_broadcast(self._nccl, dense)))

    def _start(self, start: Callable[[], dist.Work | None]) -> None:
        self.count += 1
        try:
            with self._starting:
                if self._stopped:
                    raise RuntimeError("the collectives of the device were stopped")
                # Makes the current stream wait, not the host; may be captured in a graph.
                work = start()
                if work is not None:  # nothing to wait for on the current stream itself
                    work.wait()
        except RuntimeError as error:
            raise self._explained(error) from error

    # ---- end ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ends every wait of the device, now and later. From any thread; waits for nothing.

        The collectives of a host program's own NCCL are left to the host program.
        """
        if self._peer is not None:
            self._peer.stop()
        with self._stopping:
            if self._stopped:
                return
            self._stopped = True
        if self._owned:
            # in its own thread: after it has ended the kernels, NCCL waits for the graphs that hold
            # its collectives, and those belong to whoever asks us to stop
            self._abort = threading.Thread(target=self._give_up, name="tp-nccl-abort", daemon=True)
            self._abort.start()

    def _give_up(self) -> None:
        # an aborted group's end waits for a thread of torch that asks rank 0, which may be stopped
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._nccl))
        # NCCL holds a lock of torch's while it waits for graphs to go: who was about to start a
        # collective would wait for that lock, and never come to destroy them. Nobody is after this.
        if self._starting.acquire(timeout=_START_S):
            self._starting.release()
        try:
            self._nccl.abort()
        except RuntimeError as error:  # why the group failed has been told; this comes on top
            log.warning("TP rank %d: NCCL did not end in good order: %s", self._rank, error)

    def close(self) -> None:
        """Ends the mappings and, where it is owned, NCCL. Graphs that hold collectives are gone."""
        if self._memory is not None and not self._stopped:
            # once stopped the device may still be at work; the mappings end with the process
            torch.cuda.synchronize(self._device)
            self._memory.close()
        if self._abort is not None:
            self._abort.join(_ABORT_S)
            if self._abort.is_alive():
                log.warning(
                    "TP rank %d: NCCL has not given up after %g s: are all graphs destroyed?",
                    self._rank,
                    _ABORT_S,
                )
        elif self._owned:
            self._nccl.shutdown()

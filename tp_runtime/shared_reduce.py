"""Small collectives over shared memory for ranks on the CPUs of one host.

A decode step on the CPU reduces a few hidden rows many times. Over loopback sockets that costs
more than the arithmetic, so here every rank writes its addend into memory that all of them map,
says so in one word, and sums what all have written, in rank order: the results of all ranks are
equal bit by bit.

Layout of the memory, for ``size`` ranks::

    size lines of 128 bytes      words of 64 bits: epoch, status, rank that was lost + 1
    size texts of 384 bytes      why a rank failed the group
    2 x size slots               addends; even epochs use the first half, odd ones the second

One operation is one epoch. A rank writes its slot, then its epoch word, then waits until every
epoch word has come this far, and reads. Two halves are enough: a rank that writes in epoch e + 2
has seen every rank begin e + 1, and each of them had then finished reading what e left.
This needs stores that become visible in program order, as on x86-64, and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import platform
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch

from tp_runtime.errors import ChannelClosed, DeadlineExceeded, PeerLost
from tp_runtime.shared_memory import share_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from tp_runtime.liveness import PeerWatch

__all__ = ["REDUCED_DTYPES", "SharedReduce", "SharedReduceStatistics"]

log = logging.getLogger(__name__)

REDUCED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.int64})
"""What ``all_reduce`` sums."""

_LINE_BYTES = 128  # two cache lines: the adjacent-line prefetcher joins pairs
_LINE_WORDS = _LINE_BYTES // 8
_TEXT_BYTES = 384
_EPOCH, _STATUS, _LOST = 0, 1, 2
_ALIVE, _FAILED, _CLOSED = 0, 1, 2

_CHECK_EVERY = 32  # turns of the waiting loop between two looks at the clock
_LIVENESS_S = 0.003
_SPIN_S = 0.005  # longer waits are not part of a decode step, and sleep
_SLEEP_S = 0.0002
_MAX_VIEWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedReduceStatistics:
    """What went through the shared memory since the group was made.

    Attributes:
        operations: epochs; a tensor larger than a slot takes several.
        long_waits: operations that waited for a peer longer than 5 ms.
        slot_bytes: size of one slot.
    """

    operations: int
    long_waits: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class _Views:
    """Tensors over the slots of one half, for one dtype and shape."""

    mine: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    stacked: torch.Tensor  # [size, *shape]


class SharedReduce:
    """One rank's end of the memory. Made by :meth:`open`; used by one thread at a time."""

    def __init__(
        self,
        memory: mmap.mmap,
        *,
        rank: int,
        size: int,
        slot_bytes: int,
        timeout_s: float,
        watch: PeerWatch,
    ) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("Q")
        self._rank = rank
        self._size = size
        self._slot_bytes = slot_bytes
        self._timeout_s = timeout_s
        self._watch = watch
        self._own = rank * _LINE_WORDS
        self._peers = tuple(peer * _LINE_WORDS for peer in range(size) if peer != rank)
        self._epoch = 0
        self._long_waits = 0
        self._failure: Exception | None = None
        self._closed = False
        self._views: dict[tuple[torch.dtype, torch.Size], tuple[_Views, _Views]] = {}

    @classmethod
    def open(
        cls,
        exchange: Callable[[torch.Tensor], torch.Tensor],
        *,
        rank: int,
        size: int,
        timeout_s: float,
        watch: PeerWatch,
        slot_bytes: int = 1024 * 1024,
    ) -> SharedReduce | None:
        """Maps the memory on all ranks, or on none of them.

        Args:
            exchange: all-gather of an int64 row [n] to [size, n], called twice on every rank.
            rank: TP rank of this process.
            size: ranks in the group, two or more.
            timeout_s: how long an operation waits for a peer that lives.
            watch: tells which peer has ended.
            slot_bytes: largest addend that takes one epoch; a multiple of 4096.

        Returns:
            None on every rank if any rank cannot map the memory.
        """
        nbytes = _data_offset(size) + 2 * size * slot_bytes
        if platform.machine() not in ("x86_64", "AMD64"):
            log.info("%s does not order stores: no collectives over memory", platform.machine())
            nbytes = 0
        memory = share_memory(exchange, rank=rank, nbytes=nbytes)
        if memory is None:
            return None
        return cls(
            memory, rank=rank, size=size, slot_bytes=slot_bytes, timeout_s=timeout_s, watch=watch
        )

    # ---- operations: every rank calls the same ones in the same order ----------------------

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums in place, in rank order; any shape, a dtype of ``REDUCED_DTYPES``.

        The half types are summed in float32 and rounded once.

        Raises:
            PeerLost: a peer ended, closed or failed the group.
            DeadlineExceeded: a peer that lives did not come within ``timeout_s``.
        """
        if tensor.nbytes > self._slot_bytes:
            self._in_chunks(tensor, self.all_reduce)
            return tensor
        views = self._views.get((tensor.dtype, tensor.shape)) or self._make_views(tensor)
        epoch = self._epoch + 1
        half = views[epoch & 1]
        half.mine.copy_(tensor)
        self._meet(epoch)
        slots = half.slots
        if len(slots) == 2:
            torch.add(slots[0], slots[1], out=tensor)
        elif tensor.dtype is torch.float32 or tensor.dtype is torch.int64:
            torch.add(slots[0], slots[1], out=tensor)
            for slot in slots[2:]:
                tensor.add_(slot)
        else:
            total = slots[0].float()
            for slot in slots[1:]:
                total.add_(slot)
            tensor.copy_(total)
        return tensor

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Puts the tensors of all ranks into ``out`` [size, *tensor.shape], of the same dtype."""
        if tensor.nbytes > self._slot_bytes:
            flat, rows = tensor.reshape(-1), out.view(self._size, -1)
            step = self._slot_bytes // tensor.element_size()
            for start in range(0, flat.numel(), step):
                part = flat[start : start + step]
                rows[:, start : start + step] = self.all_gather(
                    part, part.new_empty((self._size, part.numel()))
                )
            return out
        views = self._views.get((tensor.dtype, tensor.shape)) or self._make_views(tensor)
        epoch = self._epoch + 1
        half = views[epoch & 1]
        half.mine.copy_(tensor)
        self._meet(epoch)
        return out.copy_(half.stacked)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies the tensor of TP rank 0 into those of the others, in place."""
        if tensor.nbytes > self._slot_bytes:
            self._in_chunks(tensor, self.broadcast)
            return tensor
        views = self._views.get((tensor.dtype, tensor.shape)) or self._make_views(tensor)
        epoch = self._epoch + 1
        half = views[epoch & 1]
        if self._rank == 0:
            half.mine.copy_(tensor)
        self._meet(epoch)
        if self._rank != 0:
            tensor.copy_(half.slots[0])
        return tensor

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self._meet(self._epoch + 1)

    def fail(self, cause: Exception) -> None:
        """Ends the wait of this rank and of all its peers, now and later. From any thread."""
        if self._failure is not None or self._closed:
            return
        self._failure = cause
        lost = cause.rank if isinstance(cause, PeerLost) else self._rank
        text = f"{type(cause).__name__}: {cause}".encode()[: _TEXT_BYTES - 1]
        start = self._size * _LINE_BYTES + self._rank * _TEXT_BYTES
        with contextlib.suppress(ValueError):  # closed by another thread in this moment
            self._memory[start : start + len(text) + 1] = text + b"\0"
            self._words[self._own + _LOST] = lost + 1
            self._words[self._own + _STATUS] = _FAILED  # last: peers read the rest after it

    def set_timeout(self, timeout_s: float) -> None:
        """How long an operation waits from now on for a peer that lives."""
        self._timeout_s = timeout_s

    def statistics(self) -> SharedReduceStatistics:
        """How much went through the memory so far."""
        return SharedReduceStatistics(
            operations=self._epoch, long_waits=self._long_waits, slot_bytes=self._slot_bytes
        )

    def close(self) -> None:
        """Tells the peers, and unmaps the memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._failure is None:
            self._failure = ChannelClosed(f"TP rank {self._rank}: the group is closed")
            self._words[self._own + _STATUS] = _CLOSED
        self._views.clear()
        self._words.release()
        with contextlib.suppress(BufferError):  # a view is in use: unmapped when it is gone
            self._memory.close()

    # ---- views of the memory ---------------------------------------------------------------

    def _make_views(self, tensor: torch.Tensor) -> tuple[_Views, _Views]:
        if self._failure is not None:  # closed: there is no memory to look at
            raise self._failure
        if len(self._views) >= _MAX_VIEWS:  # prompts of many lengths: made again when needed
            self._views.clear()
        made = (self._half(0, tensor), self._half(1, tensor))
        self._views[tensor.dtype, tensor.shape] = made
        return made

    def _half(self, half: int, like: torch.Tensor) -> _Views:
        start = _data_offset(self._size) + half * self._size * self._slot_bytes
        pitch = self._slot_bytes // like.element_size()
        # Tensors of inference mode could not be written outside it.
        with torch.inference_mode(False):
            whole = torch.frombuffer(
                self._memory, dtype=like.dtype, count=self._size * pitch, offset=start
            ).view(self._size, pitch)
            stacked = whole[:, : like.numel()].view(self._size, *like.shape)
            slots = tuple(row[: like.numel()].view(like.shape) for row in whole)
        return _Views(slots[self._rank], slots, stacked)

    def _in_chunks(
        self, tensor: torch.Tensor, operation: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        flat = tensor.reshape(-1)  # a copy if the tensor is not contiguous
        for part in torch.split(flat, self._slot_bytes // tensor.element_size()):
            operation(part)
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))

    # ---- waiting ---------------------------------------------------------------------------

    def _meet(self, epoch: int) -> None:
        """Says that this rank has come to ``epoch`` and waits until all have."""
        if self._failure is not None:
            raise self._failure
        self._epoch = epoch
        words = self._words
        words[self._own] = epoch
        for peer in self._peers:
            if words[peer] < epoch:
                self._wait(peer, epoch)

    def _wait(self, peer: int, epoch: int) -> None:
        words, give_way, look_every = self._words, os.sched_yield, _CHECK_EVERY
        started = next_look = 0.0
        turns = 0
        while words[peer] < epoch:
            give_way()
            turns += 1
            if turns % look_every:
                continue
            now = time.monotonic()
            if not started:
                started, next_look = now, now + _LIVENESS_S
            self._raise_if_failed(peer, epoch)
            if now < next_look:
                continue
            next_look = now + _LIVENESS_S
            self._raise_if_lost(peer, epoch)
            waited = now - started
            if waited > self._timeout_s:
                self._end(self._late(peer, epoch, waited))
            if waited > _SPIN_S and look_every > 1:
                # No part of a decode step any more: leave the CPU to those who work.
                self._long_waits += 1
                give_way, look_every = _doze, 1

    def _late(self, peer: int, epoch: int, waited_s: float) -> DeadlineExceeded:
        rank = peer // _LINE_WORDS
        return DeadlineExceeded(
            f"TP rank {self._rank} waited {waited_s:.1f} s for TP rank {rank} in operation "
            f"{epoch} of the group, where it has not come (it is at {self._words[peer]}): is it "
            "stopped, or do the ranks run different steps?",
            rank=rank,
        )

    def _raise_if_failed(self, peer: int, epoch: int) -> None:
        if self._failure is not None:
            raise self._failure
        for other in self._peers:
            status = self._words[other + _STATUS]
            if status == _ALIVE:
                continue
            rank = other // _LINE_WORDS
            if status == _FAILED:
                lost = self._words[other + _LOST] - 1
                reason = self._text(rank)
                self._end(
                    PeerLost(f"TP rank {rank} failed the group: {reason}", rank=lost, reason=reason)
                )
            # One that left in good order may have come to this epoch first; see its word again.
            if other == peer and self._words[peer] < epoch:
                reason = "it closed the group"
                self._end(
                    PeerLost(
                        f"TP rank {rank} is not there for operation {epoch}: {reason}",
                        rank=rank,
                        reason=reason,
                    )
                )

    def _raise_if_lost(self, peer: int, epoch: int) -> None:
        for dead in self._watch.all_dead():
            line = dead * _LINE_WORDS
            # it may have come here before it ended, or have left in good order
            if (
                self._words[line] >= epoch
                if line == peer
                else self._words[line + _STATUS] == _CLOSED
            ):
                continue
            reason = "its process has ended"
            self._end(
                PeerLost(
                    f"TP rank {self._rank} waited for TP rank {dead} in operation {epoch}, but "
                    f"{reason}; look at its output",
                    rank=dead,
                    reason=reason,
                )
            )

    def _end(self, error: Exception) -> NoReturn:
        self.fail(error)
        raise error

    def _text(self, rank: int) -> str:
        start = self._size * _LINE_BYTES + rank * _TEXT_BYTES
        text: bytes = self._memory[start : start + _TEXT_BYTES]
        return text.partition(b"\0")[0].decode(errors="replace")


def _doze() -> None:
    time.sleep(_SLEEP_S)


def _data_offset(size: int) -> int:
    used = size * (_LINE_BYTES + _TEXT_BYTES)
    return -(-used // mmap.PAGESIZE) * mmap.PAGESIZE

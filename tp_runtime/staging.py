"""Host buffers for copies that the host does not wait for, each with an event of its own.

A buffer may be used again when it was given back and its event has passed, never because enough
other calls were made since. On a GPU the buffers are pinned; on a CPU they are plain memory, there
is nothing to wait for, and the same calls work.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from tp_runtime.errors import DeadlineExceeded, TpRuntimeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_POLL_S = 0.00005
_REMEMBERED_WAITS = 8
_SURE_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingStatistics:
    """Counted since the ring was made, but for `in_use`.

    Attributes:
        slots: buffers of the ring.
        in_use: buffers that are leased now.
        leases: leases given out.
        waits: leases that had to wait for a buffer or for its event.
        waited_s: how long, in all.
    """

    slots: int
    in_use: int
    leases: int
    waits: int
    waited_s: float


class _Buffer:
    __slots__ = ("event", "host", "mirror", "recorded")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self.host = torch.zeros(shape, dtype=dtype, pin_memory=on_cuda)
        self.mirror = torch.zeros(shape, dtype=dtype, device=device) if on_cuda else None
        self.event: torch.cuda.Event | None = None
        if on_cuda:
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.recorded = False

    def passed(self) -> bool:
        if self.event is None or not self.recorded:
            return True
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class StagingLease:
    """A buffer of a ring, for one copy. Leaving its context gives it back, unless handed over."""

    __slots__ = ("_buffer", "_handed_over", "_ring", "_rows")

    def __init__(self, ring: StagingRing, buffer: _Buffer) -> None:
        self._ring = ring
        self._buffer: _Buffer | None = buffer
        self._rows = buffer.host.shape[0] if buffer.host.dim() else 0
        self._handed_over = False

    @property
    def host(self) -> Tensor:
        """The host buffer. Raises TpRuntimeError after release."""
        return self._held().host

    @property
    def mirror(self) -> Tensor:
        """A buffer of the same shape on the device; on a CPU it is the host buffer."""
        buffer = self._held()
        return buffer.host if buffer.mirror is None else buffer.mirror

    def record(self, stream: torch.cuda.Stream | None = None) -> None:
        """Say that work which uses the buffer was enqueued on this stream (default: current)."""
        buffer = self._held()
        if buffer.event is not None:
            buffer.event.record(stream or torch.cuda.current_stream(self._ring.device))
            buffer.recorded = True

    def read(self, check: Callable[[], None] = lambda: None) -> list[int] | list[float]:
        """Wait for the copy that `StagingRing.stage` enqueued, give the buffer back, return values.

        Args:
            check: asked while waiting; what it raises ends the wait.

        Raises:
            DeadlineExceeded: the device did not get there in time. The buffer stays out.
            TpRuntimeError: released already.
        """
        buffer = self._held()
        device = self._ring.device
        # on a thread that has used no GPU yet, asking the event would make a context on GPU 0
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._ring._wait_for_copy(buffer, check)
        values: list[int] | list[float] = buffer.host[: self._rows].tolist()
        self.release()
        return values

    def hand_over(self) -> None:
        """From here on another owner calls `read` or `release`, on any thread."""
        self._handed_over = True

    def release(self) -> None:
        """Give the buffer back; it is used again after its event. Idempotent."""
        self._ring._take_back(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._handed_over:
            self.release()

    def _held(self) -> _Buffer:
        if self._buffer is None:
            raise TpRuntimeError(f"{self._ring.name}: a staging buffer was used after its release")
        return self._buffer


class StagingRing:
    """A fixed number of host buffers of one shape, leased one at a time, the longest idle first.

    Args:
        slots: buffers; with n steps in flight, n + 1 never wait.
        shape: of each buffer; the first dimension counts rows.
        dtype: of each buffer.
        device: CUDA pins the buffers and gives each an event; any other does not.
        timeout_s: longest wait for a buffer.
        name: in messages.
    """

    def __init__(
        self,
        slots: int,
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        timeout_s: float = 30.0,
        name: str = "staging ring",
    ) -> None:
        if slots < 1:
            raise TpRuntimeError(f"{name}: expected at least one slot, got {slots}")
        self.device = device
        self.timeout_s = timeout_s
        self.name = name
        self._slots = slots
        self._shape = tuple(shape)
        self._dtype = dtype
        self._changed = threading.Condition()
        self._idle = deque(_Buffer(self._shape, dtype, device) for _ in range(slots))
        self._leases = self._waits = 0
        self._waited_s = 0.0
        self._last_waits_s = deque([0.0], maxlen=_REMEMBERED_WAITS)

    def lease(self) -> StagingLease:
        """Take a buffer; use it as a context manager. Any thread.

        Raises:
            DeadlineExceeded: all buffers stayed leased, or the device did not pass an event of one.
        """
        started = time.monotonic()
        with self._changed:
            waited = not self._idle
            if not self._changed.wait_for(lambda: self._idle, self.timeout_s):
                raise DeadlineExceeded(
                    f"{self.name}: all {self._slots} buffers are leased and none came back in "
                    f"{self.timeout_s} s; is a reader stuck, or a lease never released?"
                )
            buffer = self._idle.popleft()
        while not buffer.passed():
            waited = True
            if time.monotonic() - started > self.timeout_s:
                with self._changed:
                    self._idle.append(buffer)
                raise DeadlineExceeded(
                    f"{self.name}: the device has not finished with a buffer after "
                    f"{self.timeout_s} s; look for a hung kernel or collective"
                )
            time.sleep(_POLL_S)
        buffer.recorded = False
        with self._changed:
            self._leases += 1
            self._waits += waited
            self._waited_s += time.monotonic() - started if waited else 0.0
        return StagingLease(self, buffer)

    def stage(self, source: Tensor) -> StagingLease:
        """Start a copy of a device tensor to the host, in the order of the current stream.

        The host waits for nothing here, and `source` may be overwritten by work that is enqueued on
        the current stream afterwards.

        Args:
            source: at most as many rows as the buffers have; the other dimensions and the dtype
                are those of the buffers.

        Returns:
            A lease that the reader ends by `read` or `release`, on any thread.

        Raises:
            TpRuntimeError: the source does not fit the buffers.
            DeadlineExceeded: as for `lease`.
        """
        rows = source.shape[0] if source.dim() else -1
        fits = self._shape and 0 <= rows <= self._shape[0] and source.shape[1:] == self._shape[1:]
        if not fits or source.dtype != self._dtype:
            raise TpRuntimeError(
                f"{self.name}: expected at most {self._shape} of {self._dtype}, "
                f"got {tuple(source.shape)} of {source.dtype}"
            )
        with self.lease() as lease:
            lease._rows = rows
            # not on a side stream, which would cost the host four calls more, and the device
            # only the time of a few bytes
            lease.host[:rows].copy_(source, non_blocking=True)
            lease.record()
            lease.hand_over()
        return lease

    def _wait_for_copy(self, buffer: _Buffer, check: Callable[[], None]) -> None:
        """Poll the event, but sleep first through most of what the last waits had in common: each
        poll takes the interpreter from the thread that drives the steps."""
        started = time.monotonic()
        pause_s = _SURE_SHARE * min(self._last_waits_s)
        while not buffer.passed():
            check()
            if time.monotonic() - started > self.timeout_s:
                raise DeadlineExceeded(
                    f"{self.name}: a copy to the host is not done after "
                    f"{self.timeout_s} s; look for a hung kernel or collective"
                )
            time.sleep(max(pause_s, _POLL_S))
            pause_s = 0.0
        self._last_waits_s.append(time.monotonic() - started)

    def statistics(self) -> StagingStatistics:
        with self._changed:
            return StagingStatistics(
                slots=self._slots,
                in_use=self._slots - len(self._idle),
                leases=self._leases,
                waits=self._waits,
                waited_s=self._waited_s,
            )

    def _take_back(self, lease: StagingLease) -> None:
        with self._changed:
            buffer, lease._buffer = lease._buffer, None
            if buffer is not None:
                self._idle.append(buffer)
                self._changed.notify()

"""One worker thread with one task slot, beside the thread that drives the steps.

Two steps are in flight: one runs on the device while the worker harvests the one before it. There
is no queue on purpose: a worker that falls behind holds the driver back, and never runs further
and further behind it.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from tp_runtime.errors import DeadlineExceeded, TpRuntimeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tp_runtime.leases import Lease

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncRunnerStatistics:
    """Counted since the runner was made.

    Attributes:
        launched: tasks accepted.
        failed: tasks that raised.
        blocked_s: seconds that launch and sync waited for a task.
    """

    launched: int
    failed: int
    blocked_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    run: Callable[[], object]
    context: contextvars.Context
    inference: bool
    lease: Lease | None
    after: torch.cuda.Event | None


class AsyncRunner:
    """Runs tasks one after another on a thread of its own.

    On a GPU the thread has its own stream, current while a task runs; `sync` makes the work that
    the task enqueued there visible to the caller's stream without waiting for the device. Tasks
    see the caller's context variables and inference mode.

    Args:
        device: where the tasks work. CUDA is touched only if it is a CUDA device.
        name: of the thread, and in messages.
        timeout_s: longest wait for a task in launch, sync and close; None waits without end.
    """

    def __init__(
        self, *, device: torch.device, name: str = "async", timeout_s: float | None = 120.0
    ) -> None:
        self._device = device
        self._name = name
        self._timeout_s = timeout_s
        self._stream: torch.cuda.Stream | None = None
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._changed = threading.Condition()
        self._task: _Task | None = None  # queued or running
        self._error: BaseException | None = None
        self._closing = False
        self._launched = self._failed = 0
        self._blocked_s = 0.0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def launch(
        self,
        fn: Callable[[], object],
        *,
        lease: Lease | None = None,
        after: torch.cuda.Event | None = None,
    ) -> None:
        """Start a task. Blocks until the task before it is done.

        Args:
            fn: what to run. It must take a snapshot of what its caller goes on changing.
            lease: taken over if the task is accepted, and returned when it ends, however it ends.
            after: the runner's stream waits for this event before the task's work.

        Raises:
            BaseException: what the task before it raised; then `fn` is not run, and the runner can
                be used again.
            DeadlineExceeded: the task before it did not end in time; `fn` is not run.
            TpRuntimeError: the runner is closed, or called from its own task.
        """
        task = _Task(
            run=fn,
            context=contextvars.copy_context(),
            inference=torch.is_inference_mode_enabled(),
            lease=lease,
            after=after,
        )
        with self._changed:
            self._wait_idle()
            self._raise_stored()
            if self._closing:
                raise TpRuntimeError(f"{self._name}: launch after close; make a new AsyncRunner")
            self._task = task
            self._launched += 1
            if lease is not None:
                lease.hand_over()
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        """Whether every task that was launched is done."""
        with self._changed:
            return self._task is None

    def sync(self, stream: torch.cuda.Stream | None = None) -> None:
        """Wait until the task is done; a no-op if none was launched.

        On a GPU this waits for the task's host code only. Work that the task enqueued is ordered
        before what is enqueued on `stream` afterwards, also if the task raised.

        Args:
            stream: by default the caller's current one. Not used on a CPU.

        Raises:
            BaseException: what the task raised, once; the runner can be used again.
            DeadlineExceeded: the task did not end in time.
            TpRuntimeError: called from the runner's own task.
        """
        with self._changed:
            self._wait_idle()
            if self._event is not None and self._launched:
                waiting = stream or torch.cuda.current_stream(self._device)
                waiting.wait_event(self._event)
            self._raise_stored()

    def close(self) -> None:
        """End the thread; a task that was accepted still runs first. Idempotent, never raises.

        What that task raises, and nobody will ask for any more, is logged as an error.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is threading.current_thread():
            log.error("%s: closed from its own task; the thread ends after it", self._name)
            return
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            log.error("%s: its task did not end in %s s; left behind", self._name, self._timeout_s)
            return
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            log.error("%s: a task failed and nobody asked: %r", self._name, error, exc_info=error)

    def statistics(self) -> AsyncRunnerStatistics:
        with self._changed:
            return AsyncRunnerStatistics(
                launched=self._launched, failed=self._failed, blocked_s=self._blocked_s
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _wait_idle(self) -> None:
        """Wait for the slot to be empty; the lock is held."""
        if self._thread is threading.current_thread():
            raise TpRuntimeError(
                f"{self._name}: launch or sync from its own task would wait for itself"
            )
        if self._task is None:
            return
        started = time.monotonic()
        done = self._changed.wait_for(lambda: self._task is None, self._timeout_s)
        self._blocked_s += time.monotonic() - started
        if not done:
            raise DeadlineExceeded(
                f"{self._name}: its task is still running after {self._timeout_s} s; "
                f"if it waits for the device, look for a hung kernel or collective"
            )

    def _raise_stored(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._task is not None or self._closing)
                task = self._task
            if task is None:
                return
            error = self._run(task)
            lease = task.lease
            del task  # what the task holds is freed before anybody is told that it is done
            if lease is not None:
                lease.release()
            with self._changed:
                self._task = None
                self._error = error
                self._failed += error is not None
                self._changed.notify_all()
            del error, lease

    def _run(self, task: _Task) -> BaseException | None:
        try:
            task.context.run(self._run_on_stream, task)
        except BaseException as error:  # noqa: BLE001 - kept for the next launch or sync to raise
            return error
        return None

    def _run_on_stream(self, task: _Task) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(task.inference))
            if self._stream is not None and self._event is not None:
                stack.enter_context(torch.cuda.device(self._device))
                stack.enter_context(torch.cuda.stream(self._stream))
                if task.after is not None:
                    self._stream.wait_event(task.after)
                # recorded also after a failure: what was enqueued before it is still running
                stack.callback(self._event.record, self._stream)
            task.run()

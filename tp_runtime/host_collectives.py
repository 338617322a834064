"""The collectives of a group's CPU tensors through gloo, where there is no shared memory.

The transport waits in threads of its own. The calling thread only looks whether it is done, so that
a failure from another thread and a dead peer end the wait.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from tp_runtime.errors import DeadlineExceeded
from tp_runtime.process_group import (
    in_place,
    start_all_gather,
    start_all_reduce,
    start_broadcast,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    import torch.distributed as dist

    from tp_runtime.process_group import Collectives

__all__ = ["HostCollectives"]

_POLLS_BEFORE_SLEEP = 200
_POLL_S = 0.0001


class HostCollectives:
    """One rank's end. Every rank makes the same calls in the same order, from one thread.

    Args:
        gloo: serves CPU tensors: gloo's group, or one of a host program that contains it.
        rank: TP rank of this process.
        timeout_s: bounds every wait.
        owned: the group is shut down by :meth:`close`.
        failure: what ended the group of ranks so far; asked while waiting, and raised.
        explained: what to raise when the transport fails with an error.
        fail: told what ends the group here.

    Attributes:
        count: collectives begun so far.
    """

    def __init__(
        self,
        gloo: Collectives,
        *,
        rank: int,
        timeout_s: float,
        owned: bool,
        failure: Callable[[], Exception | None],
        explained: Callable[[RuntimeError], Exception],
        fail: Callable[[Exception], None],
    ) -> None:
        self.count = 0
        self._gloo = gloo
        self._rank = rank
        self._timeout_s = timeout_s
        self._owned = owned
        self._failure = failure
        self._explained = explained
        self._fail = fail

    def set_timeout(self, timeout_s: float) -> None:
        """How long a wait may take from now on."""
        self._timeout_s = timeout_s

    # ---- collectives, as those of TpGroup ----------------------------------------------------

    def all_reduce(self, t: torch.Tensor) -> torch.Tensor:
        return in_place(t, lambda dense: self._run(lambda: start_all_reduce(self._gloo, dense)))

    def all_gather(self, t: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        dense = t.contiguous().view(-1)
        self._run(lambda: start_all_gather(self._gloo, out.view(-1), dense))
        return out

    def broadcast(self, t: torch.Tensor) -> torch.Tensor:
        return in_place(t, lambda dense: self._run(lambda: start_broadcast(self._gloo, dense)))

    def _run(self, start: Callable[[], dist.Work | None]) -> None:
        """Start a collective and wait for it in bounds."""
        self.count += 1
        try:
            work = start()
            if work is not None:
                self._wait(work)
        except RuntimeError as error:
            cause = self._explained(error)
            if cause is error:
                raise
            raise cause from error

    def _wait(self, work: dist.Work) -> None:
        started = time.monotonic()
        polls = 0
        while not work.is_completed():
            polls += 1
            if polls < _POLLS_BEFORE_SLEEP:
                os.sched_yield()
                continue
            time.sleep(_POLL_S)
            failure = self._failure()
            if failure is not None:
                raise failure
            waited = time.monotonic() - started
            if waited > self._timeout_s:
                late = DeadlineExceeded(
                    f"TP rank {self._rank} waited {waited:.1f} s in collective {self.count}: "
                    f"is a rank stopped, or do the ranks run different steps?"
                )
                self._fail(late)
                raise late
        work.wait()

    # ---- end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Shut the group down, where it is owned. To be called once; nothing is run after it."""
        if self._owned:
            self._gloo.shutdown()
        del self._gloo  # its threads end now, not when whoever refers to this is collected

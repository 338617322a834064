"""The channel as its users see it, and what all three kinds of rank share."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, NoReturn, Self

from tp_runtime.broadcast.config import BroadcasterConfig
from tp_runtime.broadcast.control import clip
from tp_runtime.broadcast.deadline import Deadline
from tp_runtime.broadcast.failure import FailureLatch
from tp_runtime.broadcast.handshake import Identity
from tp_runtime.broadcast.statistics import BroadcasterStatistics, Counters, PeerStatistics
from tp_runtime.errors import (
    BroadcastError,
    ChannelClosed,
    ConfigError,
    PeerLost,
    ProtocolError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from tp_runtime.broadcast.codec import Message

log = logging.getLogger(__name__)

# When a data connection ends, the watch is about to learn why; it is given this long to say it.
CAUSE_S = 0.1
# close() from another thread waits this long for the owner to leave the call it interrupts.
_OWNER_LEAVES_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """How a confirmed message ended.

    Args:
        sequence: number of the message on the channel.
        committed: no rank refused; every rank was told so.
        refusals: reason by rank, of the ranks that refused.
        details: what each peer answered, by rank, refusals included.
    """

    sequence: int
    committed: bool
    refusals: dict[int, str]
    details: dict[int, str]


class CpuTpBroadcaster(ABC):
    """A one-to-all channel between the ranks of one tensor-parallel group on one host.

    Rank 0 publishes, the peers receive: ordered, framed, each message once. After a failure the
    channel is over on every rank, and every later call raises the same cause. A wrong call
    (wrong thread, wrong rank, a message that may not travel) raises ProtocolError before anything
    was sent and is no failure of the channel.

    `publish`, `confirm`, `receive`, `acknowledge` belong to the thread that joined. `abort`,
    `statistics`, `fileno`, `failure` and `close` may be called by any.
    """

    def __init__(self, *, rank: int, world_size: int, config: BroadcasterConfig) -> None:
        self.rank = rank
        self.world_size = world_size
        self.config = config
        self._latch = FailureLatch()
        self._counters = Counters()
        self._sequence = 0
        self._message_sent_ns = 0
        self._owner = get_ident()
        self._pid = os.getpid()
        self._forked = False
        self._in_call = False
        self._closed = False
        # Held while a failure is told to the others, so that nobody closes the sockets meanwhile.
        # Reentrant: a signal handler of the same thread may abort, too.
        self._ending = threading.RLock()
        _CHANNELS.add(self)

    @staticmethod
    def join(
        *,
        rank: int,
        world_size: int,
        address: str | Path,
        config: BroadcasterConfig | None = None,
    ) -> CpuTpBroadcaster:
        """Meet the other ranks; returns when all are there.

        Args:
            rank: of this process in the group, 0 to world_size - 1. Rank 0 listens.
            world_size: ranks in the group. 1: no socket, no thread.
            address: a file that exists while the ranks join; its folder must exist.

        Raises:
            ConfigError: rank, world size or address make no sense.
            HandshakeRefused: a field differs, the rank is taken, or another run listens there.
            DeadlineExceeded: ranks did not come within `config.join_timeout_s`.
            PeerLost: a rank died meanwhile.
        """
        from tp_runtime.broadcast.join_peer import join_group
        from tp_runtime.broadcast.join_root import admit_peers
        from tp_runtime.broadcast.peer import PeerBroadcaster
        from tp_runtime.broadcast.progress import Progress, make_page
        from tp_runtime.broadcast.root import RootBroadcaster

        config = BroadcasterConfig() if config is None else config
        if world_size < 1:
            raise ConfigError(f"world_size: expected 1 or more, got {world_size}")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank: expected 0 to {world_size - 1}, got {rank}")
        deadline = Deadline(config.join_timeout_s)
        identity = Identity.of(config, rank=rank, world_size=world_size)
        if rank == 0:
            links, page = {}, make_page(world_size)
            try:
                progress = Progress(page, world_size=world_size)
                if world_size > 1:
                    links = admit_peers(
                        address, identity=identity, page=page, config=config, deadline=deadline
                    )
            finally:
                os.close(page)
            return RootBroadcaster(links, progress=progress, world_size=world_size, config=config)
        membership = join_group(address, identity=identity, config=config, deadline=deadline)
        return PeerBroadcaster(membership, rank=rank, world_size=world_size, config=config)

    # what rank 0 does ------------------------------------------------------------------------

    def publish(
        self, message: Message, *, timeout_s: float | None = None, next_s: float | None = None
    ) -> None:
        """Send a message to every peer. Rank 0 only.

        Args:
            timeout_s: how long the peers' buffers may stay full, seconds.
            next_s: expected time to the next message, seconds; peers sleep until shortly before.
                None: the recent cadence.

        Raises:
            ProtocolError: not rank 0, not the owner thread, or the message may not travel.
            DeadlineExceeded: a peer took nothing for that long.
            PeerLost: a peer died, left, or aborted.
            ChannelClosed: after `close`.
        """
        raise ProtocolError(f"rank {self.rank}: only rank 0 may publish; peers receive")

    def confirm(self, message: Message, *, timeout_s: float | None = None) -> Receipt:
        """Send a message, wait for every peer's answer, tell all the decision. Rank 0 only.

        No rank acts on a message that any rank refused. A refusal is a result, not a failure.

        Raises: as `publish`; DeadlineExceeded also when an answer did not come in time.
        """
        raise ProtocolError(f"rank {self.rank}: only rank 0 may confirm; peers acknowledge")

    # what peers do ---------------------------------------------------------------------------

    def receive(self, *, timeout_s: float | None = None) -> Message:
        """Take the next message. Peers only.

        Args:
            timeout_s: longest SILENCE of rank 0, seconds. While it lives it is not silent.

        Raises:
            ProtocolError: rank 0, not the owner thread, or a confirmed message was not
                acknowledged (the channel stays usable); or bytes from rank 0 that the protocol
                does not allow (the channel has failed).
            DeadlineExceeded: rank 0 was silent.
            PeerLost: a rank died, left, or aborted.
            ChannelClosed: rank 0 closed the channel and all its messages were received.
        """
        raise ProtocolError("rank 0: only peers may receive; rank 0 publishes")

    def acknowledge(self, ok: bool, detail: str = "", *, timeout_s: float | None = None) -> bool:
        """Answer a confirmed message and wait for rank 0's decision. Peers only.

        Args:
            ok: this rank can do what the message says.
            detail: reason of a refusal, or anything rank 0 wants to know; at most 128 KiB.
            timeout_s: time for the decision, seconds. None: what rank 0 gave the others to answer.

        Returns:
            True if the message is committed on every rank, False if no rank may act on it.

        Raises: as `receive`.
        """
        raise ProtocolError("rank 0: only peers may acknowledge; rank 0 confirms")

    def rehearse_with(self, rehearsal: Callable[[Message], object]) -> None:
        """What this peer does with a message first, to be repeated while it spins for the next.

        A model has put that code out of the caches meanwhile, so the first use of it is slow. It is
        called by `receive` with the message taken last, now and then. On rank 0 nothing happens.

        Args:
            rehearsal: has no effect, takes microseconds, and raises nothing.
        """
        return

    # what all do -----------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """End the channel on every rank: all raise PeerLost with this rank and reason.

        Thread-safe; does nothing if the channel is over already.

        Raises:
            ProtocolError: in a forked child.
        """
        self._refuse_forked()
        reason = clip(reason)
        error = PeerLost(
            f"rank {self.rank} aborted the channel: {reason}", rank=self.rank, reason=reason
        )
        self._fail(error)

    @property
    def failure(self) -> BroadcastError | None:
        """The cause that every call raises; None while the channel works. Thread-safe."""
        with self._latch.changed:  # `fileno` is readable a moment before the error is in place
            return self._latch.error

    def fileno(self) -> int:
        """An epoll descriptor that is readable only when the channel failed; -1 once closed."""
        return self._latch.watch_fd

    @property
    @abstractmethod
    def pids(self) -> tuple[int, ...]:
        """Process of each rank, by rank; 0 where it is in another pid namespace."""

    @property
    def message_sent_ns(self) -> int:
        """When the message that `receive` gave last was sent, on the host's monotonic clock; 0
        before the first and on rank 0."""
        return self._message_sent_ns

    def statistics(self) -> BroadcasterStatistics:
        """Counters since the join. Thread-safe; a peer's lag by what it took and has not accounted.

        That is nothing when the thread that joined asks, and less than 64 messages for another.
        """
        if get_ident() == self._owner and not self._in_call:
            self._settle()
        counters = self._counters
        return BroadcasterStatistics(
            rank=self.rank,
            world_size=self.world_size,
            sequence=self._sequence,
            messages=counters.messages,
            body_bytes=counters.body_bytes,
            large_messages=counters.large_messages,
            confirms=counters.confirms,
            refused=counters.refused,
            heartbeats=counters.heartbeats,
            waits=counters.waits,
            misses=counters.misses,
            spun_s=counters.spun_s,
            latency_us=tuple(counters.latency_us),
            peers=self._peer_statistics(),
        )

    def close(self) -> None:
        """Leave in good order. Idempotent, never raises for a broken channel.

        Rank 0: what was published is delivered, then peers raise ChannelClosed. A peer: rank 0
        raises PeerLost at its next message, nobody before.
        """
        if self._closed or self._forked:
            return
        self._closed = True
        if self._latch.error is None and not self._interrupts_owner():
            self._farewell()
        closed = ChannelClosed(f"rank {self.rank}: the channel was closed by this rank")
        self._latch.set(closed, failed=False)
        self._await_owner()
        self._stop_watch()
        with self._ending:
            self._release()
            self._latch.close()
        _CHANNELS.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The others must not take an error here for a good end.
        if error is not None and not isinstance(error, BroadcastError):
            self.abort(f"{type(error).__name__}: {error}")
        self.close()

    def __repr__(self) -> str:
        state = "open" if self._latch.error is None else type(self._latch.error).__name__
        return f"<{type(self).__name__} rank {self.rank} of {self.world_size}, {state}>"

    # shared by the kinds of rank -------------------------------------------------------------

    @abstractmethod
    def _tell(self, error: BroadcastError) -> None:
        """Tell the others about a failure, as far as that is possible without waiting."""

    @abstractmethod
    def _farewell(self) -> None:
        """Say good-bye in good order; raises nothing."""

    def _settle(self) -> None:
        """Do the book-keeping that was put off."""
        return

    def _peer_statistics(self) -> tuple[PeerStatistics, ...]:
        return ()

    @abstractmethod
    def _stop_watch(self) -> None:
        """End the watch thread."""

    @abstractmethod
    def _release(self) -> None:
        """Close all descriptors; must also work in a forked child, so it takes no lock."""

    def _enter(self) -> None:
        """Refuse a wrong caller, and raise the cause if the channel is over."""
        if self._forked:
            self._refuse_forked()
        if get_ident() != self._owner:
            raise ProtocolError(
                f"rank {self.rank}: this call belongs to the thread that joined; "
                f"{threading.current_thread().name} may call abort, statistics, fileno, close"
            )
        if self._latch.error is not None:
            self._latch.check()

    def _refuse_forked(self) -> None:
        if self._forked:
            raise ProtocolError(
                f"rank {self.rank}: the channel belongs to process {self._pid}, "
                "a forked child may not use it; join from the child instead"
            )

    def _fail(self, error: BroadcastError, *, tell: bool = True) -> BroadcastError:
        """End the channel with this cause; returns the first cause, which may be another."""
        with self._ending:
            first = self._latch.error
            if first is not None:
                return first
            if tell:
                self._tell(error)
            if self._latch.set(error, failed=True):
                log.warning("channel failed: %s", error)
            return self._latch.error or error

    def _raise_failed(self, error: BroadcastError, *, tell: bool = True) -> NoReturn:
        raise self._fail(error, tell=tell).with_traceback(None)

    def _await_cause(self) -> None:
        """Give the watch a moment to say why a connection ended, and raise that."""
        with self._latch.changed:
            self._latch.changed.wait_for(lambda: self._latch.error is not None, CAUSE_S)
        self._latch.check()

    def _interrupts_owner(self) -> bool:
        return self._in_call and get_ident() != self._owner

    def _await_owner(self) -> None:
        """Before descriptors are closed, the owner must have left the call that it is in."""
        deadline = Deadline(_OWNER_LEAVES_S)
        while self._interrupts_owner() and not deadline.expired():
            time.sleep(0.001)

    def _abandon(self) -> None:
        self._forked = True
        self._owner = 0  # no thread: every call goes the way that looks at everything
        self._latch.release()
        self._release()


_CHANNELS: weakref.WeakSet[CpuTpBroadcaster] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """A child must neither take messages nor keep the connections of its parent open."""
    for channel in list(_CHANNELS):
        channel._abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)

"""Rank 0's side of the join: admit the right ranks, refuse all others, go on meanwhile."""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tp_runtime.broadcast.codec import field
from tp_runtime.broadcast.control import ControlPort, clip
from tp_runtime.broadcast.link import Link
from tp_runtime.broadcast.rendezvous import Listener
from tp_runtime.broadcast.sockets import Credentials, PacketSocket, close_all, open_pidfd
from tp_runtime.broadcast.wire import Kind
from tp_runtime.errors import BroadcastError, DeadlineExceeded, PeerLost, ProtocolError

if TYPE_CHECKING:
    from tp_runtime.broadcast.config import BroadcasterConfig
    from tp_runtime.broadcast.deadline import Deadline
    from tp_runtime.broadcast.handshake import Identity

log = logging.getLogger(__name__)

# Connections that have not said who they are. A stranger who opens many pushes out its own.
_MAX_CANDIDATES = 64


@dataclass(slots=True)
class _Candidate:
    port: ControlPort
    who: Credentials

    def __str__(self) -> str:
        return f"pid {self.who.pid} (uid {self.who.uid})"


def admit_peers(
    path: str | Path,
    *,
    identity: Identity,
    page: int,
    config: BroadcasterConfig,
    deadline: Deadline,
) -> dict[int, Link]:
    """Listen until every rank has joined; then the file and the listener are gone.

    Args:
        page: descriptor of the `Progress` memory that every peer gets.

    Returns:
        A link for each rank 1 .. world_size - 1.

    Raises:
        DeadlineExceeded: ranks are missing; names them and whoever was refused.
        PeerLost: a rank that had joined died before the group was complete.
        HandshakeRefused: the address is in use.
    """
    listener = Listener(path, backlog=identity.world_size + 16, timeout_s=deadline.remaining_s())
    with select.epoll() as epoll:
        join = _Join(listener, epoll, identity=identity, page=page, config=config, path=Path(path))
        try:
            join.run(deadline)
        except BaseException as error:
            join.give_up(error)
            raise
        finally:
            join.dismiss_candidates()
            listener.close()
    return join.links


class _Join:
    def __init__(
        self,
        listener: Listener,
        epoll: select.epoll,
        *,
        identity: Identity,
        page: int,
        config: BroadcasterConfig,
        path: Path,
    ) -> None:
        self.links: dict[int, Link] = {}
        self._candidates: dict[int, _Candidate] = {}
        self._joined: dict[int, int] = {}
        self._refusals: list[str] = []
        self._listener = listener
        self._epoll = epoll
        self._identity = identity
        self._page = page
        self._config = config
        self._path = path
        epoll.register(listener.sock.fileno(), select.EPOLLIN)

    def run(self, deadline: Deadline) -> None:
        while len(self.links) < self._identity.world_size - 1:
            if deadline.expired():
                raise self._too_late(deadline)
            asked_s, started_s = deadline.remaining_s(), time.monotonic()
            events = self._epoll.poll(asked_s)
            deadline.woke(slept_from_s=started_s, asked_s=asked_s)
            for descriptor, _ in events:
                if descriptor == self._listener.sock.fileno():
                    self._accept()
                elif descriptor in self._candidates:
                    self._hear(descriptor)
                elif descriptor in self._joined:
                    self._hear_joined(self._joined[descriptor])
        self._announce()

    def _accept(self) -> bool:
        """Take one connection; False if nobody waits."""
        try:
            sock, _ = self._listener.sock.accept()
        except OSError as error:
            # the other side may have gone again before it was accepted
            log.debug("accept: %s", error)
            return False
        port = ControlPort(
            PacketSocket(sock),
            epoch=self._config.epoch,
            checksum=self._config.checksum,
            check_epoch=False,
        )
        candidate = _Candidate(port, port.packets.credentials())
        if candidate.who.uid != os.geteuid():
            self._refuse(candidate, f"uid: expected {os.geteuid()}, {candidate} is of another user")
            return True
        if len(self._candidates) >= _MAX_CANDIDATES:
            oldest = next(iter(self._candidates))
            self._refuse(self._forget(oldest), "it did not say who it is, and others are waiting")
        self._candidates[port.fileno()] = candidate
        self._epoll.register(port.fileno(), select.EPOLLIN)
        return True

    def _hear(self, descriptor: int) -> None:
        candidate = self._candidates[descriptor]
        try:
            kind, body, descriptors = candidate.port.receive()
            close_all(descriptors)
            if kind is not Kind.HELLO:
                raise ProtocolError(f"kind: expected HELLO, got {kind.name}")
            rank = field(body, "rank", int)
            refusal = self._objection(rank, body)
        except BlockingIOError:
            return
        except (EOFError, OSError):
            # a probe, or a process that died before it said who it is
            self._forget(descriptor).port.close()
            return
        except ProtocolError as error:
            self._refuse(self._forget(descriptor), str(error))
            return
        if refusal is not None:
            self._refuse(self._forget(descriptor), refusal)
            return
        del self._candidates[descriptor]
        self._welcome(rank, candidate)

    def _objection(self, rank: int, body: dict[str, Any]) -> str | None:
        difference = self._identity.difference(body, of=f"rank {rank}")
        if difference is not None:
            return difference
        size = self._identity.world_size
        if not 1 <= rank < size:
            return f"field rank: expected 1 to {size - 1}, got {rank}"
        if rank in self.links:
            return f"field rank: rank {rank} has joined already (pid {self.links[rank].pid})"
        return None

    def _welcome(self, rank: int, candidate: _Candidate) -> None:
        """Make the data connection and hand the peer its end of it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        data = PacketSocket(ours, receive_bytes=4096)
        body = {**self._identity.body(), "rank": rank, "token": self._identity.token}
        try:
            with theirs:
                candidate.port.send(Kind.WELCOME, body, [theirs.fileno(), self._page])
            pidfd = open_pidfd(candidate.who.pid)
        except OSError as error:
            # gone between its HELLO and our answer: it never was a member
            log.warning("rank %d (%s) left while it was welcomed: %s", rank, candidate, error)
            data.close()
            candidate.port.close()
            return
        candidate.port.check_epoch = True
        self._joined[candidate.port.fileno()] = rank
        self.links[rank] = Link(
            rank=rank, pid=candidate.who.pid, pidfd=pidfd, data=data, control=candidate.port
        )
        log.debug("rank %d joined (%s)", rank, candidate)

    def _hear_joined(self, rank: int) -> None:
        """A rank that waits for the others has nothing to say but good-bye."""
        link = self.links[rank]
        reason = "died or gave up while the group was joining"
        try:
            frame = link.control.receive()
            close_all(frame.descriptors)
            if frame.kind is Kind.ABORT:
                reason = f"gave up: {field(frame.body, 'reason', str)}"
            else:
                reason = f"sent {frame.kind.name} while the group was joining"
        except BlockingIOError:
            return
        except (EOFError, OSError):
            pass
        except ProtocolError as error:
            reason = f"sent bytes that the protocol does not allow ({error})"
        missing = self._missing()
        others = f", when ranks {missing} had not joined" if missing else ""
        raise PeerLost(
            f"rank 0: rank {rank} (pid {link.pid}) {reason}{others}; start the run again",
            rank=rank,
            reason=reason,
        )

    def _announce(self) -> None:
        """Tell everybody who is there: all pids, and a pidfd of each."""
        pids = [os.getpid()] + [self.links[rank].pid for rank in sorted(self.links)]
        own = open_pidfd(os.getpid())
        try:
            held = {0: own} | {rank: link.pidfd for rank, link in self.links.items()}
            ranks = sorted(rank for rank, pidfd in held.items() if pidfd >= 0)
            for rank, link in self.links.items():
                body = {"pids": pids, "pidfd_ranks": ranks}
                try:
                    link.control.send(Kind.READY, body, [held[rank] for rank in ranks])
                except OSError as error:
                    reason = f"died while the group was joining ({error.strerror})"
                    raise PeerLost(
                        f"rank 0: rank {rank} (pid {link.pid}) {reason}", rank=rank, reason=reason
                    ) from None
        finally:
            if own >= 0:
                os.close(own)

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._identity.world_size) if rank not in self.links]

    def _too_late(self, deadline: Deadline) -> DeadlineExceeded:
        missing = self._missing()
        refused = f"; refused meanwhile: {'; '.join(self._refusals[-5:])}" if self._refusals else ""
        return DeadlineExceeded(
            f"rank 0: ranks {missing} did not join at {self._path} within "
            f"{deadline.timeout_s:g} s{refused}",
            rank=missing[0],
        )

    def _forget(self, descriptor: int) -> _Candidate:
        self._epoll.unregister(descriptor)
        return self._candidates.pop(descriptor)

    def _refuse(self, candidate: _Candidate, why: str) -> None:
        log.warning("refused %s at %s: %s", candidate, self._path, why)
        self._refusals.append(why)
        candidate.port.try_send(Kind.REFUSED, {"message": clip(why)})
        candidate.port.close()

    def dismiss_candidates(self) -> None:
        """Answer everybody who still waits, so that no one waits for its deadline."""
        for _ in range(self._identity.world_size + _MAX_CANDIDATES):
            if not self._accept():
                break
        for descriptor in list(self._candidates):
            complete = f"field rank: the group of {self._identity.world_size} is complete or gone"
            self._refuse(self._forget(descriptor), complete)

    def give_up(self, error: BaseException) -> None:
        """Tell those who had joined why there will be no group."""
        rank = getattr(error, "rank", None)
        told = isinstance(error, BroadcastError)
        reason = getattr(error, "reason", str(error)) if told else f"{type(error).__name__}"
        for link in self.links.values():
            body = {"rank": 0 if rank is None else rank, "reason": clip(reason)}
            link.control.try_send(Kind.ABORT, body)
            link.close()

"""A peer's side of the join: find rank 0, be checked, check it, wait for the others."""

from __future__ import annotations

import os
import select
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tp_runtime.broadcast.codec import field
from tp_runtime.broadcast.control import ControlFrame, ControlPort
from tp_runtime.broadcast.link import Link, Sibling
from tp_runtime.broadcast.progress import Progress
from tp_runtime.broadcast.rendezvous import connect
from tp_runtime.broadcast.sockets import PacketSocket, close_all
from tp_runtime.broadcast.wire import Kind
from tp_runtime.errors import DeadlineExceeded, HandshakeRefused, PeerLost, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tp_runtime.broadcast.config import BroadcasterConfig
    from tp_runtime.broadcast.deadline import Deadline
    from tp_runtime.broadcast.handshake import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What a peer has after the join."""

    root: Link
    progress: Progress
    siblings: dict[int, Sibling]

    def close(self) -> None:
        self.root.close()
        for sibling in self.siblings.values():
            sibling.close()
        self.progress.close()


def join_group(
    path: str | Path, *, identity: Identity, config: BroadcasterConfig, deadline: Deadline
) -> Membership:
    """Join as rank `identity.rank`; returns when all ranks have joined.

    Raises:
        HandshakeRefused: rank 0 refused this rank, or this rank refuses rank 0; names the field.
        DeadlineExceeded: rank 0 did not listen, or did not complete the group, in time.
        PeerLost: rank 0 or another rank died meanwhile.
    """
    rank = identity.rank
    packets = PacketSocket(connect(path, rank=rank, deadline=deadline))
    port = ControlPort(packets, epoch=config.epoch, checksum=config.checksum, check_epoch=False)
    held: list[int] = []
    try:
        who = packets.credentials()
        if who.uid != os.geteuid():
            raise HandshakeRefused(
                f"rank {rank}: uid: the listener at {path} is of uid {who.uid}, "
                f"this process is uid {os.geteuid()}"
            )
        _hello(port, identity, path)
        welcome = _expect(port, Kind.WELCOME, rank=rank, path=path, deadline=deadline)
        held += welcome.descriptors
        _check_welcome(welcome, identity)
        port.check_epoch = True
        ready = _expect(port, Kind.READY, rank=rank, path=path, deadline=deadline)
        held += ready.descriptors
        return _membership(port, welcome, ready, identity)
    except BaseException:
        close_all(held)
        port.close()
        raise


def _hello(port: ControlPort, identity: Identity, path: str | Path) -> None:
    try:
        port.send(Kind.HELLO, identity.body())
    except (BrokenPipeError, ConnectionResetError):
        # Rank 0 has answered and gone already; its answer is in our queue and is read next.
        return
    except OSError as error:
        raise HandshakeRefused(f"rank {identity.rank}: HELLO to {path}: {error}") from None


def _expect(
    port: ControlPort, kind: Kind, *, rank: int, path: str | Path, deadline: Deadline
) -> ControlFrame:
    while True:
        try:
            frame = port.receive()
        except BlockingIOError:
            _wait(port, kind, rank=rank, path=path, deadline=deadline)
            continue
        except (EOFError, OSError):
            raise PeerLost(
                f"rank {rank}: rank 0 at {path} died or gave up before the group was complete",
                rank=0,
                reason="died or gave up while the group was joining",
            ) from None
        except ProtocolError as error:
            raise HandshakeRefused(f"rank {rank}: rank 0 at {path}: {error}") from None
        if frame.kind is kind:
            return frame
        close_all(frame.descriptors)
        if frame.kind is Kind.REFUSED:
            why = field(frame.body, "message", str)
            raise HandshakeRefused(f"rank {rank} was refused by rank 0 at {path}: {why}")
        if frame.kind is Kind.ABORT:
            lost, reason = field(frame.body, "rank", int), field(frame.body, "reason", str)
            raise PeerLost(
                f"rank {rank}: the group at {path} was given up because of rank {lost}: {reason}",
                rank=lost,
                reason=reason,
            )
        raise HandshakeRefused(f"rank {rank}: expected {kind.name}, rank 0 sent {frame.kind.name}")


def _wait(
    port: ControlPort, kind: Kind, *, rank: int, path: str | Path, deadline: Deadline
) -> None:
    if deadline.expired():
        what = "answer" if kind is Kind.WELCOME else "complete the group"
        raise DeadlineExceeded(
            f"rank {rank}: rank 0 at {path} did not {what} within {deadline.timeout_s:g} s", rank=0
        )
    poll = select.poll()
    poll.register(port.fileno(), select.POLLIN)
    asked_s, started_s = deadline.remaining_s(), time.monotonic()
    poll.poll(asked_s * 1000)
    deadline.woke(slept_from_s=started_s, asked_s=asked_s)


def _check_welcome(welcome: ControlFrame, identity: Identity) -> None:
    difference = identity.difference(welcome.body, of="rank 0")
    if difference is not None:
        raise HandshakeRefused(f"rank {identity.rank} refuses rank 0: {difference}")
    got = field(welcome.body, "rank", int)
    if got != identity.rank:
        raise HandshakeRefused(f"field rank: expected {identity.rank}, rank 0 welcomed {got}")
    if len(welcome.descriptors) != 2:
        raise HandshakeRefused(
            f"rank {identity.rank}: WELCOME with {len(welcome.descriptors)} descriptors, expected 2"
        )


def _membership(
    port: ControlPort, welcome: ControlFrame, ready: ControlFrame, identity: Identity
) -> Membership:
    pids = field(ready.body, "pids", list)
    ranks = field(ready.body, "pidfd_ranks", list)
    size = identity.world_size
    if len(pids) != size or not all(type(pid) is int for pid in pids):
        raise HandshakeRefused(f"field pids: expected {size} integers, got {pids!r}")
    known = all(type(rank) is int and 0 <= rank < size for rank in ranks)
    if not known or len(set(ranks)) != len(ranks) or len(ranks) != len(ready.descriptors):
        raise HandshakeRefused(
            f"field pidfd_ranks: {ranks!r} with {len(ready.descriptors)} descriptors"
        )
    data_end, page = welcome.descriptors
    _check_pollable(ready.descriptors, identity.rank)
    sock = _data_socket(data_end, identity.rank)
    try:
        progress = Progress(page, world_size=size)
    except ProtocolError as error:
        sock.detach()
        raise HandshakeRefused(f"rank {identity.rank} refuses rank 0: {error}") from None
    pidfds = dict(zip(ranks, ready.descriptors, strict=True))
    unneeded = [page, *(pidfds.pop(rank) for rank in ranks if rank == identity.rank)]
    data = PacketSocket(sock)
    root = Link(rank=0, pid=pids[0], pidfd=pidfds.pop(0, -1), data=data, control=port)
    siblings = {
        rank: Sibling(rank=rank, pid=pids[rank], pidfd=pidfds.get(rank, -1))
        for rank in range(1, size)
        if rank != identity.rank
    }
    close_all(unneeded)
    return Membership(root=root, progress=progress, siblings=siblings)


def _check_pollable(descriptors: Sequence[int], rank: int) -> None:
    """A pidfd can be waited for; a file, for instance, cannot."""
    with select.epoll() as epoll:
        for descriptor in descriptors:
            try:
                epoll.register(descriptor, select.EPOLLIN)
            except OSError as error:
                raise HandshakeRefused(
                    f"rank {rank} refuses rank 0: READY brought what is no pidfd ({error})"
                ) from None


def _data_socket(descriptor: int, rank: int) -> socket.socket:
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError as error:
        raise HandshakeRefused(
            f"rank {rank} refuses rank 0: WELCOME brought no socket ({error})"
        ) from None
    if (sock.family, sock.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
        sock.detach()
        raise HandshakeRefused(
            f"rank {rank} refuses rank 0: expected a Unix packet socket in WELCOME, "
            f"got {sock.family!r}, {sock.type!r}"
        )
    return sock

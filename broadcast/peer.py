"""Every other rank: receives, answers, and notices when rank 0 or a sibling is gone."""

from __future__ import annotations

import contextlib
import functools
import select
import socket
import time
from threading import get_ident
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from tp_runtime.broadcast.broadcaster import CAUSE_S, CpuTpBroadcaster
from tp_runtime.broadcast.codec import Message, decode, field
from tp_runtime.broadcast.control import MAX_TEXT_BYTES, ControlFrame, clip
from tp_runtime.broadcast.cores import cores_available
from tp_runtime.broadcast.deadline import Deadline
from tp_runtime.broadcast.inbox import Inbox
from tp_runtime.broadcast.pace import Pace
from tp_runtime.broadcast.patience import LONGEST_S, Patience
from tp_runtime.broadcast.region import RegionReader
from tp_runtime.broadcast.sockets import close_all, process_state, read_memfd
from tp_runtime.broadcast.watch import Watch
from tp_runtime.broadcast.wire import (
    FUTURE_NS,
    HEADER_BYTES,
    MEMFD_MARK,
    OFFSET,
    PLAIN_HEADER,
    Header,
    Kind,
    parse_frame,
    plain_first,
)
from tp_runtime.errors import (
    BroadcastError,
    ChannelClosed,
    DeadlineExceeded,
    PeerLost,
    ProtocolError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tp_runtime.broadcast.config import BroadcasterConfig
    from tp_runtime.broadcast.join_peer import Membership

Taken = TypeVar("Taken")

unpack_plain_header = PLAIN_HEADER.unpack_from
# Rank 0 names who kept everybody waiting; its word is waited for a little longer than its promise.
_VERDICT_S = 0.25
# A longer message costs more to rehearse than cold caches do.
_REHEARSED_BYTES = 4096
# A peer that never waits does its book-keeping after so many messages.
_MOST_ARRIVALS = 64
# A peer that leaves waits this long for rank 0 to have told the others.
_BYE_S = 1.0


class PeerBroadcaster(CpuTpBroadcaster):
    """See `CpuTpBroadcaster`."""

    def __init__(
        self, membership: Membership, *, rank: int, world_size: int, config: BroadcasterConfig
    ) -> None:
        super().__init__(rank=rank, world_size=world_size, config=config)
        self._membership = membership
        self._root = membership.root
        self._siblings = membership.siblings
        self._progress = membership.progress
        self._region: RegionReader | None = None
        self._unanswered = 0
        self._promised_s = 0.0
        # Written by the watch too; a float is replaced whole.
        self._heard_s = time.monotonic()
        self._closing = False
        self._bye_ok = False
        data = self._root.data
        self._take = functools.partial(data.sock.recv_into, data.buffer, 0, socket.MSG_TRUNC)
        self._first = plain_first(config.epoch)
        self._most_plain_bytes = min(len(data.buffer) - HEADER_BYTES, config.max_message_bytes)
        self._pace = Pace(config.wait, may_spin=cores_available() >= world_size)
        # Send time, arrival, announced interval and length of messages not yet accounted.
        self._blocks = self._pace.mode == "efficient"
        self._half_s = min(config.timeout_s / 2, LONGEST_S)
        self._arrivals: list[tuple[int, int, int, int]] = []
        self._rehearsal: Callable[[Message], object] | None = None
        pidfds = {s.rank: s.pidfd for s in self._siblings.values()}
        with contextlib.ExitStack() as undo:
            undo.callback(self._latch.release)
            undo.callback(membership.close)
            self._inbox = Inbox(
                data.fileno(),
                pace=self._pace,
                latch=self._latch,
                rehearse=self._rehearse,
                counters=self._counters,
            )
            undo.callback(self._inbox.close)
            self._poll = self._inbox.poll
            self._watch = Watch(
                self,
                ports={0: self._root.control},
                pidfds={0: self._root.pidfd, **pidfds},
                tick_s=None,
                name=f"tp-broadcast-watch-{rank}",
            )
            self._watch.start()
            undo.pop_all()

    @property
    def pids(self) -> tuple[int, ...]:
        known = {0: self._root.pid, self.rank: self._pid}
        known |= {sibling.rank: sibling.pid for sibling in self._siblings.values()}
        return tuple(known[rank] for rank in range(self.world_size))

    # receive and acknowledge -----------------------------------------------------------------

    def receive(self, *, timeout_s: float | None = None) -> Message:
        # With `_open` one straight line from the packet to the message. A step of the model has
        # put this code and its data out of the caches, so each function and object on the way costs
        # microseconds, and this rank waits. Book-keeping is done while waiting for the next one.
        if get_ident() != self._owner or self._latch.error is not None or self._unanswered:
            self._refuse_receive()
        self._in_call = True
        try:
            started_s = 0.0
            if self._blocks:
                # Half of the timeout: rank 0 need not be asked for a sign of life until then.
                started_s = monotonic()
                self._poll(self._half_s if timeout_s is None else min(timeout_s / 2, LONGEST_S), 2)
            try:
                size = self._take()
            except BlockingIOError:
                size = -1
            except OSError as error:
                size = self._take_after(error, self._take)
            if size < 0:
                size = self._await(self._take, timeout_s, silence=True, blocked_from_s=started_s)
            return self._open(size, self._sequence + 1, timeout_s)
        except ProtocolError as error:
            self._blame(error)
        finally:
            self._in_call = False

    def _open(self, size: int, sequence: int, timeout_s: float | None) -> Message:
        """The message in the packet of `size` bytes that lies in the buffer."""
        now_ns, packet = monotonic_ns(), self._root.data.view
        first, length, interval_us, got, sent_ns = unpack_plain_header(packet)
        if (
            first != self._first
            or length != size - HEADER_BYTES
            or length > self._most_plain_bytes
            or got != sequence
            or sent_ns > now_ns + FUTURE_NS
        ):
            return self._open_other(size, now_ns, timeout_s)
        message = decode(packet[HEADER_BYTES:size])
        self._sequence = self._progress.words[self.rank] = sequence
        self._message_sent_ns = sent_ns
        arrivals = self._arrivals
        arrivals.append((sent_ns, now_ns, interval_us, length))
        if len(arrivals) >= _MOST_ARRIVALS:
            self._settle()
        return message

    def _rehearse(self) -> None:
        """Open the message taken last once more; it still lies in the buffer.

        A step of the model has put that code and its data out of the caches; they come back here,
        while there is time, and not when the next message is there.
        """
        first, length, _, sequence, _ = unpack_plain_header(self._root.data.view)
        if first == self._first and sequence == self._sequence and length <= _REHEARSED_BYTES:
            message = self._open(HEADER_BYTES + length, sequence, None)
            self._arrivals.clear()
            if self._rehearsal is not None:
                self._rehearsal(message)

    def rehearse_with(self, rehearsal: Callable[[Message], object]) -> None:
        self._rehearsal = rehearsal

    def _refuse_receive(self) -> None:
        self._enter()
        if self._unanswered:
            raise ProtocolError(
                f"rank {self.rank}: message {self._unanswered} is to be confirmed; "
                "call acknowledge before the next receive"
            )

    def acknowledge(self, ok: bool, detail: str = "", *, timeout_s: float | None = None) -> bool:
        self._enter()
        sequence = self._unanswered
        if not sequence:
            raise ProtocolError(
                f"rank {self.rank}: nothing to acknowledge; only a message that rank 0 sent "
                "with confirm is acknowledged, once, after receive returned it"
            )
        if len(detail.encode("utf-8", "replace")) > MAX_TEXT_BYTES:
            raise ProtocolError(f"detail: at most {MAX_TEXT_BYTES} bytes, got {len(detail)} chars")
        if timeout_s is None:
            timeout_s = max(self._promised_s, self.config.timeout_s) + _VERDICT_S
        deadline = Deadline(timeout_s)
        self._send_answer({"sequence": sequence, "ok": bool(ok), "detail": detail}, deadline)
        self._unanswered = 0
        kind, body = self._decision(deadline.remaining_s())
        if kind is not Kind.DECISION or field(body, "sequence", int) != sequence:
            self._raise_garbage(f"{kind.name} instead of the decision on {sequence}")
        committed: bool = field(body, "committed", bool)
        if committed and not ok:
            self._raise_garbage(f"commit of message {sequence}, which this rank refused")
        self._counters.confirms += 1
        self._counters.refused += not committed
        return committed

    def _send_answer(self, body: dict[str, Any], deadline: Deadline) -> None:
        port = self._root.control
        while True:
            try:
                port.send(Kind.ACK, body)
            except BlockingIOError:
                if deadline.expired():
                    self._raise_late(deadline.timeout_s, "did not take the acknowledgement")
                poll = select.poll()
                poll.register(port.fileno(), select.POLLOUT)
                poll.register(self._latch.wake_fd, select.POLLIN)
                poll.poll(min(deadline.remaining_s(), 3600.0) * 1000)
                self._latch.check()
            except OSError as error:
                self._raise_root_gone(f"its connection broke ({error.strerror})")
            else:
                return

    def _decision(self, timeout_s: float) -> tuple[Kind, Message]:
        self._in_call = True
        try:
            size = self._await(self._take, timeout_s, silence=False)
            header, body = self._frame(size, monotonic_ns(), timeout_s)
            return header.kind, body
        except ProtocolError as error:
            self._blame(error)
        finally:
            self._in_call = False

    # taking frames off the data socket -------------------------------------------------------

    def _open_other(self, size: int, now_ns: int, timeout_s: float | None) -> Message:
        """The message in a packet that is not a plain frame."""
        header, message = self._frame(size, now_ns, timeout_s)
        if header.kind is Kind.CONFIRM:
            self._unanswered = self._sequence
            self._promised_s = header.interval_us / 1e6
        elif header.kind is not Kind.MESSAGE:
            self._raise_garbage(f"{header.kind.name} without a question")
        return message

    def _frame(self, size: int, now_ns: int, timeout_s: float | None) -> tuple[Header, Message]:
        """A frame of any kind; anything wrong with it fails the channel."""
        if not size:
            self._raise_end()
        packet = self._root.data.packet(size)
        header, body = parse_frame(
            packet, sequence=self._sequence + 1, epoch=self.config.epoch, now_ns=now_ns
        )
        if header.kind > Kind.CLOSE:
            raise ProtocolError(f"{header.kind.name} frame on the data socket")
        if header.length > self.config.max_message_bytes:
            raise ProtocolError(
                f"message of {header.length} bytes, max_message_bytes is "
                f"{self.config.max_message_bytes}"
            )
        message = None
        if header.kind is not Kind.CLOSE:
            message = self._outside(header, body, timeout_s) if header.outside else decode(body)
        self._sequence = self._progress.words[self.rank] = header.sequence
        if header.kind in (Kind.MESSAGE, Kind.CONFIRM):
            # The interval of a confirm is a promise of its decision, not the time to the next one.
            announced_us = header.interval_us if header.kind is Kind.MESSAGE else 0
            self._message_sent_ns = header.sent_ns
            self._arrivals.append((header.sent_ns, now_ns, announced_us, header.length))
        self._heard_s = max(self._heard_s, now_ns / 1e9)
        if header.kind is Kind.CLOSE:
            self._raise_closed()
        return header, message

    def _settle(self) -> None:
        """The book-keeping of the messages taken since the last time."""
        arrivals, counters, pace = self._arrivals, self._counters, self._pace
        if not arrivals:
            return
        self._inbox.spun_until(arrivals[0][1] / 1e9)
        counters.waits += len(arrivals) if self._blocks else 0
        for sent_ns, now_ns, interval_us, length in arrivals:
            counters.messages += 1
            counters.body_bytes += length
            counters.count_latency(now_ns - sent_ns)
            if pace.mode != "efficient":
                pace.observe(sent_s=sent_ns / 1e9, interval_s=interval_us / 1e6)
        self._heard_s = max(self._heard_s, arrivals[-1][1] / 1e9)
        arrivals.clear()

    def _await(
        self,
        take: Callable[[], Taken],
        timeout_s: float | None,
        *,
        silence: bool,
        blocked_from_s: float = 0.0,
    ) -> Taken:
        """What `take` gives as soon as it gives something.

        Args:
            blocked_from_s: when the caller began to wait for it in the kernel; 0: not yet.
        """
        self._settle()
        timeout_s = self.config.timeout_s if timeout_s is None else timeout_s
        patience = Patience(
            timeout_s,
            heard_s=(lambda: self._heard_s) if silence else None,
            ask=self._ask_root,
            from_s=blocked_from_s or None,
        )
        if blocked_from_s:
            patience.woke(slept_from_s=blocked_from_s, asked_s=min(timeout_s / 2, LONGEST_S))
        try:
            taken = self._inbox.wait(take, patience)
        except OSError as error:
            return self._take_after(error, take)
        if taken is None:
            self._raise_late(patience.timeout_s, "was silent" if silence else "did not decide")
        return taken

    def _take_after(self, error: OSError, take: Callable[[], Taken]) -> Taken:
        """What the connection still gives after an error."""
        taken = None
        if isinstance(error, ConnectionResetError):
            # Rank 0 closed with unread packets of ours. That is reported once and hides what it
            # had sent before; those packets are still in the queue.
            with contextlib.suppress(OSError):
                taken = take()
        if taken is None:
            self._raise_root_gone(f"its connection broke ({error.strerror})")
        return taken

    def _ask_root(self) -> None:
        self._root.control.try_send(Kind.PING)

    def _outside(self, header: Header, body: memoryview, timeout_s: float | None) -> Message:
        """The message of a frame whose body is in a memfd or a region."""
        offset = OFFSET.unpack(body)[0] if header.in_region else 0
        descriptors = self._descriptors(timeout_s) if header.with_memfd else []
        try:
            if header.in_region and descriptors:
                fresh = RegionReader(descriptors[0])
                self._close_region()
                self._region = fresh
            if not header.in_region:
                with (
                    read_memfd(descriptors[0], header.length) as mapped,
                    memoryview(mapped) as view,
                ):
                    message = decode(view)
            elif self._region is None:
                raise ProtocolError("a body in a region before any region was passed")
            else:
                message = self._region.read(offset, header.length, sequence=header.sequence)
        finally:
            close_all(descriptors)
        self._counters.large_messages += 1
        return message

    def _descriptors(self, timeout_s: float | None) -> list[int]:
        """The one descriptor that follows a frame."""
        take = self._root.data.receive_with_descriptors
        packet, descriptors = self._await(take, timeout_s, silence=True)
        if packet == MEMFD_MARK and len(descriptors) == 1:
            return descriptors
        close_all(descriptors)
        if not packet:
            self._raise_end()
        raise ProtocolError(
            f"large body: expected one descriptor, got {len(descriptors)} and {len(packet)} bytes"
        )

    def _close_region(self) -> None:
        if self._region is not None:
            self._region.close()

    # ends ------------------------------------------------------------------------------------

    def _raise_end(self) -> NoReturn:
        """The data connection ended without a CLOSE frame."""
        self._raise_root_gone("died (its connection ended)")

    def _raise_root_gone(self, reason: str) -> NoReturn:
        changed = self._latch.changed
        with changed:
            changed.wait_for(lambda: self._latch.error is not None or self._closing, CAUSE_S)
        self._latch.check()
        if self._closing:
            self._raise_closed()
        self._raise_failed(self._lost(0, self._root.pid, reason))

    def _raise_closed(self) -> NoReturn:
        self._settle()
        self._latch.set(
            ChannelClosed(
                f"rank {self.rank}: rank 0 closed the channel after {self._counters.messages} "
                "messages, all of them received"
            ),
            failed=False,
        )
        self._latch.check()
        raise ChannelClosed(f"rank {self.rank}: the channel was closed by this rank")

    def _blame(self, error: ProtocolError) -> NoReturn:
        """A frame that is not allowed ends the channel; what ended it already is raised again."""
        if self._latch.error is error:
            raise error
        self._raise_garbage(str(error))

    def _raise_garbage(self, what: str) -> NoReturn:
        self._raise_failed(ProtocolError(f"rank {self.rank}: rank 0 sent: {what}"))

    def _raise_late(self, timeout_s: float, what: str) -> NoReturn:
        root = self._root
        self._raise_failed(
            DeadlineExceeded(
                f"rank {self.rank}: rank 0 (pid {root.pid}, {process_state(root.pid)}) {what} for "
                f"{timeout_s:g} s; last message received was {self._sequence}",
                rank=0,
            )
        )

    def _lost(self, rank: int, pid: int, reason: str) -> PeerLost:
        return PeerLost(
            f"rank {self.rank} lost rank {rank} (pid {pid}): {reason}; "
            f"last message received was {self._sequence}",
            rank=rank,
            reason=reason,
        )

    # what the watch hears --------------------------------------------------------------------

    def on_frame(self, rank: int, frame: ControlFrame) -> None:
        close_all(frame.descriptors)
        try:
            if frame.kind is Kind.HEARTBEAT:
                self._counters.heartbeats += 1
                self._heard_s = time.monotonic()
            elif frame.kind is Kind.ABORT:
                lost, reason = field(frame.body, "rank", int), field(frame.body, "reason", str)
                told = (
                    f"rank {lost} was lost, rank 0 says: {reason}" if lost else f"rank 0: {reason}"
                )
                told = f"rank {self.rank} was told to stop: {told}"
                self._fail(PeerLost(told, rank=lost, reason=reason), tell=False)
            elif frame.kind is Kind.LEFT:
                sibling = self._siblings.get(field(frame.body, "rank", int))
                if sibling is not None:
                    sibling.left = True
            elif frame.kind in (Kind.CLOSING, Kind.BYE_OK):
                with self._latch.changed:
                    self._closing |= frame.kind is Kind.CLOSING
                    self._bye_ok |= frame.kind is Kind.BYE_OK
                    self._latch.changed.notify_all()
            else:
                raise ProtocolError(f"rank 0 may not send {frame.kind.name}")
        except ProtocolError as error:
            self.on_garbage(rank, error)

    def on_garbage(self, rank: int, error: ProtocolError) -> None:
        self._fail(ProtocolError(f"rank {self.rank}: rank 0 sent: {error}"))

    def on_hang_up(self, rank: int) -> None:
        if self._closing:
            return
        self._fail(self._lost(0, self._root.pid, "died (its connection ended)"), tell=False)

    def on_exit(self, rank: int) -> None:
        reason = "died (its process ended)"
        if self._closing:
            if rank == 0:
                # a child may hold its connection: what is in it is read, more will not come
                self._root.data.shutdown()
        elif rank == 0:
            self._fail(self._lost(0, self._root.pid, reason), tell=False)
        elif not self._siblings[rank].left:
            self._fail(self._lost(rank, self._siblings[rank].pid, reason))

    def on_tick(self) -> None:
        """Peers have nothing to send unasked."""

    def is_over(self) -> bool:
        return self._latch.error is not None

    # the end ---------------------------------------------------------------------------------

    def _tell(self, error: BroadcastError) -> None:
        culprit = getattr(error, "rank", None)
        reason = getattr(error, "reason", str(error))
        body = {"rank": self.rank if culprit is None else culprit, "reason": clip(reason)}
        self._root.control.try_send(Kind.ABORT, body)
        self._root.shutdown()

    def _farewell(self) -> None:
        """Say good-bye and wait until the others know it."""
        if self._closing or not self._root.control.try_send(Kind.BYE):
            return
        changed = self._latch.changed
        with changed:
            changed.wait_for(
                lambda: self._bye_ok or self._closing or self._latch.error is not None, _BYE_S
            )

    def _stop_watch(self) -> None:
        self._watch.stop()

    def _release(self) -> None:
        self._watch.release()
        self._inbox.close()
        self._close_region()
        self._membership.close()

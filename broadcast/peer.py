"""Every other rank: receives, answers, and notices when rank 0 or a sibling is gone."""

from __future__ import annotations

import contextlib
import select
import time
from typing import TYPE_CHECKING, Any, NoReturn

from tp_runtime.broadcast.broadcaster import CAUSE_S, CpuTpBroadcaster
from tp_runtime.broadcast.codec import Message, decode, field
from tp_runtime.broadcast.control import MAX_TEXT_BYTES, ControlFrame, clip
from tp_runtime.broadcast.cores import cores_available
from tp_runtime.broadcast.deadline import Deadline
from tp_runtime.broadcast.inbox import Inbox
from tp_runtime.broadcast.pace import Pace
from tp_runtime.broadcast.sockets import close_all, process_state, read_memfd
from tp_runtime.broadcast.watch import Watch
from tp_runtime.broadcast.wire import (
    HEADER_BYTES,
    MEMFD_MARK,
    Header,
    Kind,
    PlainFrames,
    parse_frame,
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

# Rank 0 names who kept everybody waiting; its word is waited for a little longer than its promise.
_VERDICT_S = 0.25
# A longer message costs more to rehearse than cold caches do; cut to this size it is not decoded.
_REHEARSED_BYTES = 4096
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
        self._unanswered = 0
        self._promised_s = 0.0
        # Written by the watch too; a float is replaced whole.
        self._heard_s = time.monotonic()
        self._closing = False
        self._bye_ok = False
        self._plain = PlainFrames(epoch=config.epoch, most_bytes=config.max_message_bytes)
        self._pace = Pace(config.wait, may_spin=cores_available() >= world_size)
        self._rehearsed_bytes = 0
        # Send time, arrival and announced interval of the message taken last, not yet accounted.
        self._arrival: tuple[int, int, int] | None = None
        pidfds = {s.rank: s.pidfd for s in self._siblings.values()}
        with contextlib.ExitStack() as undo:
            undo.callback(self._latch.release)
            undo.callback(membership.close)
            self._inbox = Inbox(
                self._root.data,
                pace=self._pace,
                wake_fd=self._latch.wake_fd,
                check=self._latch.check,
                rehearse=self._rehearse,
                counters=self._counters,
            )
            undo.callback(self._inbox.close)
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
        self._enter()
        if self._unanswered:
            raise ProtocolError(
                f"rank {self.rank}: message {self._unanswered} is to be confirmed; "
                "call acknowledge before the next receive"
            )
        if timeout_s is None:
            timeout_s = self.config.timeout_s
        kind, interval_us, message = self._next(timeout_s, silence=True)
        if kind is Kind.CONFIRM:
            self._unanswered = self._sequence
            self._promised_s = interval_us / 1e6
        elif kind is not Kind.MESSAGE:
            self._raise_garbage(f"{kind.name} without a question")
        self._counters.messages += 1
        return message

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
        kind, _, body = self._next(deadline.remaining_s(), silence=False)
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
                    self._raise_late(deadline, "did not take the acknowledgement")
                poll = select.poll()
                poll.register(port.fileno(), select.POLLOUT)
                poll.register(self._latch.wake_fd, select.POLLIN)
                poll.poll(min(deadline.remaining_s(), 3600.0) * 1000)
                self._latch.check()
            except OSError as error:
                self._raise_root_gone(f"its connection broke ({error.strerror})")
            else:
                return

    # taking frames off the data socket -------------------------------------------------------

    def _next(self, timeout_s: float, *, silence: bool) -> tuple[Kind, int, Message]:
        """Kind, announced interval and content of the next frame.

        Anything wrong with it fails the channel.
        """
        if self._arrival is not None:
            self._account(*self._arrival)
        self._in_call = True
        try:
            packet = self._take(timeout_s, silence=silence)
            if not packet:
                self._raise_end()
            now_ns = time.monotonic_ns()
            sequence = self._sequence + 1
            times = self._plain.times(packet, sequence=sequence, now_ns=now_ns)
            if times is None:
                return self._unusual(packet, now_ns, timeout_s)
            sent_ns, interval_us = times
            message = decode(packet[HEADER_BYTES:])
            self._took(sequence, sent_ns, now_ns, interval_us, len(packet) - HEADER_BYTES)
            self._rehearsed_bytes = min(len(packet), _REHEARSED_BYTES)
            return Kind.MESSAGE, interval_us, message
        except ProtocolError as error:
            if self._latch.error is error:
                raise
            self._raise_garbage(str(error))
        finally:
            self._in_call = False

    def _rehearse(self) -> None:
        """Go the way of a message with the one taken last, which still lies in the buffer.

        A step of the model has put this code and its data out of the caches; they come back here,
        while there is time, and not when the next message is there.
        """
        packet = self._root.data.packet(self._rehearsed_bytes)
        if self._plain.times(packet, sequence=self._sequence, now_ns=time.monotonic_ns()):
            decode(packet[HEADER_BYTES:])

    def _unusual(
        self, packet: memoryview, now_ns: int, timeout_s: float
    ) -> tuple[Kind, int, Message]:
        """Every frame that is not the plain message of a step."""
        header, body = parse_frame(
            packet, sequence=self._sequence + 1, epoch=self.config.epoch, now_ns=now_ns
        )
        if header.kind is Kind.CLOSE:
            self._took(header.sequence, header.sent_ns, now_ns, 0, 0)
            self._raise_closed()
        if header.kind > Kind.CLOSE:
            raise ProtocolError(f"{header.kind.name} frame on the data socket")
        if header.length > self.config.max_message_bytes:
            raise ProtocolError(
                f"message of {header.length} bytes, max_message_bytes is "
                f"{self.config.max_message_bytes}"
            )
        message = self._large_body(header, timeout_s) if header.in_memfd else decode(body)
        # The interval of a confirm is a promise of its decision, not the time to the next message.
        announced_us = header.interval_us if header.kind is Kind.MESSAGE else 0
        self._took(header.sequence, header.sent_ns, now_ns, announced_us, header.length)
        return header.kind, header.interval_us, message

    def _took(
        self, sequence: int, sent_ns: int, now_ns: int, interval_us: int, length: int
    ) -> None:
        self._sequence = sequence
        self._progress.note(self.rank, sequence)
        self._counters.body_bytes += length
        # The rest of the book-keeping waits until the caller has what it waited for.
        self._arrival = sent_ns, now_ns, interval_us

    def _account(self, sent_ns: int, now_ns: int, interval_us: int) -> None:
        self._arrival = None
        self._heard_s = max(self._heard_s, now_ns / 1e9)
        self._counters.count_latency(now_ns - sent_ns)
        if self._pace.mode != "efficient":
            self._pace.observe(sent_s=sent_ns / 1e9, interval_s=interval_us / 1e6)

    def _large_body(self, header: Header, timeout_s: float) -> Message:
        descriptors: list[int] = []

        def mark() -> memoryview | None:
            try:
                packet, attached = self._root.data.receive_with_descriptors()
            except BlockingIOError:
                return None
            descriptors.extend(attached)
            return packet

        try:
            try:
                packet = mark()
            except OSError as error:
                self._raise_root_gone(f"its connection broke ({error.strerror})")
            if packet is None:
                packet = self._block(mark, Deadline(timeout_s), silence=True)
            if not packet:
                self._raise_end()
            if packet != MEMFD_MARK or len(descriptors) != 1:
                raise ProtocolError(
                    f"large body: expected one descriptor, got {len(descriptors)} "
                    f"and {len(packet)} bytes"
                )
            self._counters.large_messages += 1
            with read_memfd(descriptors[0], header.length) as mapped, memoryview(mapped) as view:
                return decode(view)
        finally:
            close_all(descriptors)

    def _take(self, timeout_s: float, *, silence: bool) -> memoryview:
        """The next packet as soon as it is there: look, sleep and spin as planned, then block."""
        look = self._root.data.look
        try:
            packet = look()
            if packet is None:
                packet = self._inbox.soon(timeout_s)
        except OSError as error:
            self._raise_root_gone(f"its connection broke ({error.strerror})")
        if packet is not None:
            return packet
        return self._block(look, Deadline(timeout_s), silence=silence)

    def _block(
        self, look: Callable[[], memoryview | None], deadline: Deadline, *, silence: bool
    ) -> memoryview:
        """What `look` gives once it gives something; the caller has looked already."""
        heard_s, asked_root = 0.0, False
        while True:
            self._latch.check()
            if silence and self._heard_s != heard_s:
                heard_s, asked_root = self._heard_s, False
                deadline.restart(heard_s)
            if deadline.expired():
                self._raise_late(deadline, "was silent" if silence else "did not decide")
            wait_s = deadline.remaining_s()
            if silence and not asked_root:
                half_s = wait_s - deadline.timeout_s / 2
                if half_s <= 0:
                    # The deadline may be shorter than rank 0's heartbeat: ask for a sign of life.
                    self._root.control.try_send(Kind.PING)
                    asked_root = True
                else:
                    wait_s = half_s
            started_s = time.monotonic()
            self._inbox.block(wait_s)
            try:
                packet = look()
            except OSError as error:
                self._raise_root_gone(f"its connection broke ({error.strerror})")
            if packet is not None:
                return packet
            deadline.woke(slept_from_s=started_s, asked_s=wait_s)

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
        self._latch.set(
            ChannelClosed(
                f"rank {self.rank}: rank 0 closed the channel after {self._counters.messages} "
                "messages, all of them received"
            ),
            failed=False,
        )
        self._latch.check()
        raise ChannelClosed(f"rank {self.rank}: the channel was closed by this rank")

    def _raise_garbage(self, what: str) -> NoReturn:
        self._raise_failed(ProtocolError(f"rank {self.rank}: rank 0 sent: {what}"))

    def _raise_late(self, deadline: Deadline, what: str) -> NoReturn:
        root = self._root
        self._raise_failed(
            DeadlineExceeded(
                f"rank {self.rank}: rank 0 (pid {root.pid}, {process_state(root.pid)}) {what} for "
                f"{deadline.timeout_s:g} s; last message received was {self._sequence}",
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
        self._membership.close()

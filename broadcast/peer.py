"""Every other rank: receives, answers, and notices when rank 0 or a sibling is gone."""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from tp_runtime.broadcast.broadcaster import CAUSE_S, CpuTpBroadcaster
from tp_runtime.broadcast.codec import Message, decode, field
from tp_runtime.broadcast.control import MAX_TEXT_BYTES, ControlFrame, clip
from tp_runtime.broadcast.deadline import Deadline
from tp_runtime.broadcast.pace import Pace, Sleeper, cores_available, spin_yield
from tp_runtime.broadcast.sockets import close_all, process_state, read_memfd
from tp_runtime.broadcast.statistics import BroadcasterStatistics
from tp_runtime.broadcast.watch import Watch
from tp_runtime.broadcast.wire import MEMFD_MARK, Header, Kind, parse_frame
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

T = TypeVar("T")

# Rank 0 names who kept everybody waiting; its word is waited for a little longer than its promise.
_VERDICT_S = 0.25
# A peer that leaves waits this long for rank 0 to have told the others.
_BYE_S = 1.0


class PeerBroadcaster(CpuTpBroadcaster):
    """See `CpuTpBroadcaster`."""

    def __init__(
        self, membership: Membership, *, rank: int, world_size: int, config: BroadcasterConfig
    ) -> None:
        super().__init__(rank=rank, world_size=world_size, config=config)
        self._root = membership.root
        self._siblings = membership.siblings
        self._unanswered = 0
        self._promised_s = 0.0
        # Written by the watch too; a float is replaced whole.
        self._heard_s = time.monotonic()
        self._closing = False
        self._bye_ok = False
        self._pace = Pace(config.wait, may_spin=cores_available() >= world_size)
        self._sleeper = Sleeper(self._root.data.fileno(), self._latch.wake_fd)
        pidfds = {s.rank: s.pidfd for s in self._siblings.values()}
        self._watch = Watch(
            self,
            ports={0: self._root.control},
            pidfds={0: self._root.pidfd, **pidfds},
            tick_s=None,
            name=f"tp-broadcast-watch-{rank}",
        )
        self._watch.start()

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
        deadline = Deadline(self.config.timeout_s if timeout_s is None else timeout_s)
        header, message = self._next(deadline, silence=True)
        if header.kind is Kind.CONFIRM:
            self._unanswered = header.sequence
            self._promised_s = header.interval_us / 1e6
        elif header.kind is not Kind.MESSAGE:
            self._raise_garbage(f"{header.kind.name} without a question")
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
        header, body = self._next(deadline, silence=False)
        if header.kind is not Kind.DECISION or field(body, "sequence", int) != sequence:
            self._raise_garbage(f"{header.kind.name} instead of the decision on {sequence}")
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

    def _next(self, deadline: Deadline, *, silence: bool) -> tuple[Header, Message]:
        """The next frame, checked and decoded. Anything wrong with it fails the channel."""
        self._in_call = True
        try:
            packet = self._await(self._root.data.receive, deadline, silence=silence)
            if not packet:
                self._raise_end()
            now_ns = time.monotonic_ns()
            header, body = parse_frame(
                packet, sequence=self._sequence + 1, epoch=self.config.epoch, now_ns=now_ns
            )
            self._sequence = header.sequence
            self._heard_s = now_ns / 1e9
            if header.kind is Kind.CLOSE:
                self._raise_closed()
            if header.kind > Kind.CLOSE:
                raise ProtocolError(f"{header.kind.name} frame on the data socket")
            if header.length > self.config.max_message_bytes:
                raise ProtocolError(
                    f"message of {header.length} bytes, max_message_bytes is "
                    f"{self.config.max_message_bytes}"
                )
            counters = self._counters
            counters.body_bytes += header.length
            counters.count_latency(now_ns - header.sent_ns)
            self._pace.observe(
                sent_s=header.sent_ns / 1e9,
                interval_s=header.interval_us / 1e6 if header.kind is Kind.MESSAGE else 0.0,
            )
            if header.in_memfd:
                return header, self._large_body(header, deadline)
            return header, decode(body)
        except ProtocolError as error:
            if self._latch.error is error:
                raise
            self._raise_garbage(str(error))
        finally:
            self._in_call = False

    def _large_body(self, header: Header, deadline: Deadline) -> Message:
        take = self._root.data.receive_with_descriptors
        mark, descriptors = self._await(take, deadline, silence=True)
        try:
            if not mark:
                self._raise_end()
            if mark != MEMFD_MARK or len(descriptors) != 1:
                raise ProtocolError(
                    f"large body: expected one descriptor, got {len(descriptors)} "
                    f"and {len(mark)} bytes"
                )
            self._counters.large_messages += 1
            with read_memfd(descriptors[0], header.length) as mapped, memoryview(mapped) as view:
                return decode(view)
        finally:
            close_all(descriptors)

    def _await(self, take: Callable[[], T], deadline: Deadline, *, silence: bool) -> T:
        """What `take` gives as soon as it gives something: sleep, spin or block until then."""
        taken = self._try(take)
        if taken is not None:
            return taken
        now_s = time.monotonic()
        sleep_until_s, spin_until_s = self._pace.plan(now_s)
        deadline_s = now_s + deadline.remaining_s()
        if sleep_until_s > now_s:
            self._counters.waits += 1
            self._sleeper.sleep(min(sleep_until_s, deadline_s) - now_s)
        while time.monotonic() < min(spin_until_s, deadline_s):
            taken = self._try(take)
            if taken is not None:
                return taken
            self._latch.check()
            spin_yield()
        self._counters.misses += spin_until_s > now_s
        return self._block(take, deadline, silence=silence)

    def _block(self, take: Callable[[], T], deadline: Deadline, *, silence: bool) -> T:
        heard_s, asked_root = 0.0, False
        while True:
            taken = self._try(take)
            if taken is not None:
                return taken
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
            self._counters.waits += 1
            self._sleeper.block(wait_s)
            deadline.woke(slept_from_s=started_s, asked_s=wait_s)

    def _try(self, take: Callable[[], T]) -> T | None:
        try:
            return take()
        except BlockingIOError:
            return None
        except OSError as error:
            self._raise_root_gone(f"its connection broke ({error.strerror})")

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
        self._fail(self._lost(0, self._root.pid, "died (its connection ended)"), tell=False)

    def on_exit(self, rank: int) -> None:
        reason = "died (its process ended)"
        if rank == 0:
            self._fail(self._lost(0, self._root.pid, reason), tell=False)
        elif not self._siblings[rank].left:
            self._fail(self._lost(rank, self._siblings[rank].pid, reason))

    def on_tick(self) -> None:
        """Peers have nothing to send unasked."""

    def is_over(self) -> bool:
        return self._closing or self._latch.error is not None

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
        self._sleeper.close()
        self._root.close()
        for sibling in self._siblings.values():
            sibling.close()

    def statistics(self) -> BroadcasterStatistics:
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
            latency_us=tuple(counters.latency_us),
        )

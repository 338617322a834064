"""Rank 0: publishes, collects answers, keeps everybody informed."""

from __future__ import annotations

import contextlib
import os
import time
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, NoReturn

from tp_runtime.broadcast.broadcaster import CpuTpBroadcaster, Receipt
from tp_runtime.broadcast.codec import (
    LARGE_BYTES,
    Message,
    encode,
    encode_parts,
    field,
    make_packer,
)
from tp_runtime.broadcast.control import ControlFrame, clip
from tp_runtime.broadcast.deadline import Deadline
from tp_runtime.broadcast.fan_out import FanOut, LinkBroken, LinksFull
from tp_runtime.broadcast.pace import Cadence
from tp_runtime.broadcast.progress import LagBound, Progress
from tp_runtime.broadcast.region import RegionWriter
from tp_runtime.broadcast.sockets import close_all, process_state, write_memfd
from tp_runtime.broadcast.statistics import PeerStatistics
from tp_runtime.broadcast.watch import Watch
from tp_runtime.broadcast.wire import (
    HEADER_BYTES,
    MAX_INTERVAL_S,
    OFFSET,
    PLAIN_HEADER,
    Flag,
    Kind,
    pack_frame,
    plain_first,
)
from tp_runtime.errors import BroadcastError, DeadlineExceeded, PeerLost, ProtocolError

if TYPE_CHECKING:
    from tp_runtime.broadcast.config import BroadcasterConfig
    from tp_runtime.broadcast.link import Link


_INTEGERS = frozenset({int})
pack_plain_header = PLAIN_HEADER.pack
# The decision of a confirm is sent even when the answers used up all the time.
_DECISION_S = 0.2


class RootBroadcaster(CpuTpBroadcaster):
    """See `CpuTpBroadcaster`. With no peers every call returns at once."""

    def __init__(
        self,
        links: dict[int, Link],
        *,
        progress: Progress,
        world_size: int,
        config: BroadcasterConfig,
    ) -> None:
        super().__init__(rank=0, world_size=world_size, config=config)
        self._links = links
        self._progress = progress
        self._region = RegionWriter()
        self._lag = LagBound(links, timeout_s=config.timeout_s)
        self._fan_out = FanOut(
            list(links.values()),
            wake_fd=self._latch.wake_fd,
            check=self._latch.check,
            counters=self._counters,
            timeout_s=config.timeout_s,
        )
        self._cadence = Cadence()
        self._interval_us = 0
        self._packer = make_packer()
        self._pack = self._packer.pack
        self._first = plain_first(config.epoch)
        self._sent_ns = monotonic_ns()
        self._last_beat_s = self._sent_ns / 1e9
        self._answers: dict[int, tuple[bool, str]] = {}
        self._asking = 0
        self._left: int | None = None
        self._closing = False
        self._watch: Watch | None = None
        # Longest body that travels as a plain frame; -1: none.
        self._most_plain_bytes = -1
        if links:
            checksum_bytes = 4
            granted = min(link.data.packet_bytes for link in links.values())
            self._inline_bytes = granted - HEADER_BYTES - checksum_bytes
            if not config.checksum:
                self._most_plain_bytes = min(self._inline_bytes, config.max_message_bytes)
            with contextlib.ExitStack() as undo:
                undo.callback(self._latch.release)
                undo.callback(self._close_links)
                self._watch = Watch(
                    self,
                    ports={rank: link.control for rank, link in links.items()},
                    pidfds={rank: link.pidfd for rank, link in links.items()},
                    tick_s=config.heartbeat_s,
                    name="tp-broadcast-watch-0",
                )
                self._watch.start()
                undo.pop_all()

    @property
    def pids(self) -> tuple[int, ...]:
        return (self._pid, *(self._links[rank].pid for rank in sorted(self._links)))

    # publish and confirm ---------------------------------------------------------------------

    def publish(
        self, message: Message, *, timeout_s: float | None = None, next_s: float | None = None
    ) -> None:
        # One straight line until every peer has the message of a step. A step of the model has put
        # this code out of the caches, each call in it costs microseconds, and all peers wait.
        # Whatever is unusual goes the long way, which looks at everything.
        body = None
        if get_ident() == self._owner and self._latch.error is None and self._left is None:
            kind = type(message)
            if (kind is list and _INTEGERS.issuperset(map(type, message))) or (
                kind is bytes and len(message) < LARGE_BYTES
            ):
                try:
                    body = self._pack(message)
                except OverflowError:
                    self._packer.reset()
        interval_us = self._interval_us
        if next_s is not None:
            interval_us = int(next_s * 1e6) if 0.0 <= next_s <= MAX_INTERVAL_S else 0
        if body is None or len(body) > self._most_plain_bytes:
            self._publish_other(message, timeout_s, interval_us)
            sent_ns = self._sent_ns
        else:
            sequence, sent_ns = self._sequence + 1, monotonic_ns()
            head = pack_plain_header(self._first, len(body), interval_us, sequence, sent_ns)
            self._in_call = True
            try:
                self._fan_out.send(head + body, timeout_s)
            except BaseException as error:  # noqa: BLE001 - also an interrupt ends the channel; raised again
                self._sending_failed(error)
            self._in_call = False
            self._sequence, self._sent_ns = sequence, sent_ns
            counters = self._counters
            counters.messages += 1
            counters.body_bytes += len(body)
        if next_s is None:
            # The cadence as far as it is known by now is announced with the next message.
            self._interval_us = int(self._cadence.count(sent_ns / 1e9) * 1e6)

    def _publish_other(self, message: Message, timeout_s: float | None, interval_us: int) -> None:
        self._enter()
        if not self._links:
            encode_parts(message)  # so that a message that may not travel is refused here, too
            self._sequence += 1
            return
        self._send_parts(Kind.MESSAGE, encode_parts(message), timeout_s, interval_us)

    def confirm(self, message: Message, *, timeout_s: float | None = None) -> Receipt:
        self._enter()
        if not self._links:
            self._sequence += 1
            return Receipt(sequence=self._sequence, committed=True, refusals={}, details={})
        parts = encode_parts(message)
        deadline = Deadline(self.config.timeout_s if timeout_s is None else timeout_s)
        with self._latch.changed:
            self._answers = {}
            self._asking = self._sequence + 1
        # The announced interval is the promise of a decision by then.
        promise_us = int(min(deadline.timeout_s, MAX_INTERVAL_S) * 1e6)
        self._send_parts(Kind.CONFIRM, parts, deadline.timeout_s, promise_us)
        sequence = self._sequence
        answers = self._collect(deadline)
        refusals = {rank: detail for rank, (ok, detail) in answers.items() if not ok}
        committed = not refusals
        decision = encode({"sequence": sequence, "committed": committed})
        self._send_parts(Kind.DECISION, [decision], max(_DECISION_S, deadline.remaining_s()), 0)
        self._counters.confirms += 1
        self._counters.refused += not committed
        return Receipt(
            sequence=sequence,
            committed=committed,
            refusals=refusals,
            details={rank: detail for rank, (_, detail) in answers.items()},
        )

    def _collect(self, deadline: Deadline) -> dict[int, tuple[bool, str]]:
        """Wait for an answer of every peer."""
        latch = self._latch

        def over() -> bool:
            return latch.error is not None or len(self._answers) == len(self._links)

        self._in_call = True
        try:
            with latch.changed:
                while not over() and self._left is None and not deadline.expired():
                    asked_s, started_s = deadline.remaining_s(), time.monotonic()
                    self._counters.waits += 1
                    latch.changed.wait(min(asked_s, 3600.0))
                    deadline.woke(slept_from_s=started_s, asked_s=asked_s)
                self._asking = 0
                answers = dict(sorted(self._answers.items()))
        finally:
            self._in_call = False
        latch.check()
        silent = [link for rank, link in self._links.items() if rank not in answers]
        if silent and self._left is not None:
            self._raise_left(self._links[self._left])
        if silent:
            self._raise_late(silent, deadline, f"did not acknowledge message {self._sequence}")
        return answers

    # sending ---------------------------------------------------------------------------------

    def _send_parts(
        self, kind: Kind, parts: list[bytes | memoryview], timeout_s: float | None, interval_us: int
    ) -> None:
        """Send a frame of any kind and size.

        Raises:
            ProtocolError: the body is too large; nothing was sent.
        """
        if self._left is not None:
            self._raise_left(self._links[self._left])
        length = sum(map(len, parts))
        if length > self.config.max_message_bytes:
            raise ProtocolError(
                f"message of {length} bytes, max_message_bytes is "
                f"{self.config.max_message_bytes}; send less or raise it on every rank"
            )
        large = length > self._inline_bytes
        outside, memfd, body = 0, -1, b""
        if large:
            outside, memfd, body = self._lay_out(parts, length)
        else:
            body = b"".join(parts)
        try:
            frame = pack_frame(
                kind,
                body,
                sequence=self._sequence + 1,
                epoch=self.config.epoch,
                interval_us=interval_us,
                outside=outside,
                outside_bytes=length,
                checksum=self.config.checksum,
            )
            self._send(frame, timeout_s, memfd)
        finally:
            if memfd >= 0:
                os.close(memfd)
        if kind is not Kind.DECISION:
            self._counters.messages += 1
            self._counters.body_bytes += length
            self._counters.large_messages += large

    def _lay_out(self, parts: list[bytes | memoryview], length: int) -> tuple[int, int, bytes]:
        """Put a large body where the peers find it: flags, a memfd to pass or -1, bytes to send."""
        taken = min(
            (self._progress.seen(rank) for rank, link in self._links.items() if not link.left),
            default=0,
        )
        sequence = self._sequence + 1
        offset = self._region.place(parts, length=length, sequence=sequence, taken=taken)
        if offset is None:
            return Flag.MEMFD, write_memfd(parts), b""
        memfd = self._region.take_descriptor()
        known = memfd < 0
        return Flag.REGION if known else Flag.REGION | Flag.MEMFD, memfd, OFFSET.pack(offset)

    def _send(self, frame: bytes, timeout_s: float | None, memfd: int) -> None:
        self._in_call = True
        try:
            self._fan_out.send(frame, timeout_s, memfd)
        except BaseException as error:  # noqa: BLE001 - also an interrupt ends the channel; raised again
            self._sending_failed(error)
        self._in_call = False
        self._sequence += 1
        self._sent_ns = monotonic_ns()

    def _sending_failed(self, error: BaseException) -> NoReturn:
        """Some peers have the message and some do not: nobody may go on from here."""
        self._in_call = False
        if isinstance(error, LinkBroken):
            self._raise_lost(error.link, error.error)
        if isinstance(error, LinksFull):
            what = f"did not take message {self._sequence + 1} from a full buffer"
            self._raise_late(error.links, error.deadline, what)
        if self._latch.error is None:
            reason = f"interrupted while it was sending ({type(error).__name__})"
            self._fail(PeerLost(f"rank 0 was {reason}", rank=0, reason=reason))
        raise error

    def _raise_lost(self, link: Link, error: OSError) -> NoReturn:
        if link.left:
            self._raise_left(link)
        self._await_cause()
        if link.left:
            self._raise_left(link)
        reason = f"its connection broke ({error.strerror})"
        self._raise_failed(self._lost(link, reason))

    def _raise_left(self, link: Link) -> NoReturn:
        self._raise_failed(self._lost(link, "left the channel"))

    def _raise_late(self, late: list[Link], deadline: Deadline, what: str) -> NoReturn:
        what = f"{what} within {deadline.timeout_s:g} s (waited {deadline.elapsed_s():.3f} s)"
        self._raise_failed(self._late(late, what))

    def _late(self, late: list[Link], what: str) -> DeadlineExceeded:
        # A stopped rank explains the lateness of others, so it is named first.
        states = {link.rank: process_state(link.pid) for link in late}
        late = sorted(late, key=lambda link: (states[link.rank] == "running", link.rank))
        who = ", ".join(
            f"rank {link.rank} (pid {link.pid}, {states[link.rank]}, "
            f"has taken message {self._progress.seen(link.rank)} of {self._sequence})"
            for link in late
        )
        return DeadlineExceeded(f"rank 0: {who} {what}", rank=late[0].rank)

    def _lost(self, link: Link, reason: str) -> PeerLost:
        return PeerLost(
            f"rank 0 lost rank {link.rank} (pid {link.pid}): {reason}; "
            f"last message sent was {self._sequence}",
            rank=link.rank,
            reason=reason,
        )

    # what the watch hears --------------------------------------------------------------------

    def on_frame(self, rank: int, frame: ControlFrame) -> None:
        close_all(frame.descriptors)
        link = self._links[rank]
        try:
            if frame.kind is Kind.ACK:
                self._on_answer(rank, frame)
            elif frame.kind is Kind.PING:
                self._beat(link)
            elif frame.kind is Kind.ABORT:
                self._on_abort(rank, frame)
            elif frame.kind is Kind.BYE:
                self._on_bye(link)
            else:
                raise ProtocolError(f"a peer may not send {frame.kind.name}")
        except ProtocolError as error:
            self.on_garbage(rank, error)

    def _on_answer(self, rank: int, frame: ControlFrame) -> None:
        sequence = field(frame.body, "sequence", int)
        answer = field(frame.body, "ok", bool), field(frame.body, "detail", str)
        with self._latch.changed:
            if self._asking == 0 and sequence == self._sequence:
                # too late, the wait for it is over and about to fail the channel
                return
            if sequence != self._asking or rank in self._answers:
                raise ProtocolError(f"acknowledged message {sequence}, asked was {self._asking}")
            self._answers[rank] = answer
            self._latch.changed.notify_all()

    def _on_abort(self, rank: int, frame: ControlFrame) -> None:
        reason, culprit = field(frame.body, "reason", str), field(frame.body, "rank", int)
        # A peer that gave up on rank 0 is the one that is lost to rank 0.
        lost = culprit if culprit in self._links else rank
        self._fail(
            PeerLost(
                f"rank 0 lost rank {lost}: rank {rank} says: {reason}", rank=lost, reason=reason
            )
        )

    def _on_bye(self, link: Link) -> None:
        # The others must know before this process exits, or they would take it for a death.
        for other in self._links.values():
            if other is not link and not other.left:
                other.control.try_send(Kind.LEFT, {"rank": link.rank})
        with self._latch.changed:
            link.left = True
            self._left = link.rank
            self._latch.changed.notify_all()
        link.control.try_send(Kind.BYE_OK)

    def on_garbage(self, rank: int, error: ProtocolError) -> None:
        link = self._links[rank]
        reason = f"sent what the protocol does not allow: {error}"
        failed = ProtocolError(f"rank 0: rank {rank} (pid {link.pid}) {reason}")
        with self._ending:
            if self._latch.error is None:
                self._tell_all(rank, reason)
                self._fail(failed, tell=False)

    def on_hang_up(self, rank: int) -> None:
        link = self._links[rank]
        if not link.left:
            self._fail(self._lost(link, "died (its connection ended)"))

    def on_exit(self, rank: int) -> None:
        link = self._links[rank]
        if not link.left:
            self._fail(self._lost(link, "died (its process ended)"))

    def on_tick(self) -> None:
        self._check_lag()
        now_s = time.monotonic()
        if now_s - max(self._sent_ns / 1e9, self._last_beat_s) >= self.config.heartbeat_s / 2:
            self._last_beat_s = now_s
            for link in self._links.values():
                if not link.left:
                    self._beat(link)

    def _check_lag(self) -> None:
        """A peer that takes nothing is noticed here, long before its buffer is full."""
        links = self._links
        late = self._lag.late(
            sent=self._sequence,
            taken=lambda rank: self._sequence if links[rank].left else self._progress.seen(rank),
            stopped=lambda rank: process_state(links[rank].pid) == "stopped",
            tick_s=self.config.heartbeat_s,
        )
        if late:
            what = f"took nothing for {self.config.timeout_s:g} s"
            self._fail(self._late([links[rank] for rank in late], what))

    def _beat(self, link: Link) -> None:
        # A full buffer is that of a rank that does not listen; it is noticed when it is needed.
        if link.control.try_send(Kind.HEARTBEAT):
            self._counters.heartbeats += 1

    def is_over(self) -> bool:
        return self._closing or self._latch.error is not None

    # the end ---------------------------------------------------------------------------------

    def _tell(self, error: BroadcastError) -> None:
        culprit = getattr(error, "rank", None)
        self._tell_all(0 if culprit is None else culprit, getattr(error, "reason", str(error)))

    def _tell_all(self, culprit: int, reason: str) -> None:
        body = {"rank": culprit, "reason": clip(reason)}
        for link in self._links.values():
            if not link.left:
                link.control.try_send(Kind.ABORT, body)
        for link in self._links.values():
            link.shutdown()

    def _farewell(self) -> None:
        self._closing = True
        for link in self._links.values():
            # Heard first by every watch: from here on the end of a process is no loss.
            if not link.left:
                link.control.try_send(Kind.CLOSING)
        if self._links:
            frame = pack_frame(
                Kind.CLOSE,
                sequence=self._sequence + 1,
                epoch=self.config.epoch,
                checksum=self.config.checksum,
            )
            self._fan_out.send_last(frame, Deadline(self.config.timeout_s))

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()

    def _release(self) -> None:
        if self._watch is not None:
            self._watch.release()
        self._close_links()

    def _close_links(self) -> None:
        for link in self._links.values():
            link.close()
        self._progress.close()
        self._region.close()

    def _peer_statistics(self) -> tuple[PeerStatistics, ...]:
        return tuple(
            PeerStatistics(
                rank=rank,
                pid=link.pid,
                taken=self._progress.seen(rank),
                full=self._fan_out.full[rank],
                left=link.left,
            )
            for rank, link in sorted(self._links.items())
        )

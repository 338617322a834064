"""Rank 0: publishes, collects answers, keeps everybody informed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NoReturn

from tp_runtime.broadcast.broadcaster import CpuTpBroadcaster, Receipt
from tp_runtime.broadcast.codec import Message, encode, field
from tp_runtime.broadcast.control import ControlFrame, clip
from tp_runtime.broadcast.deadline import Deadline
from tp_runtime.broadcast.fan_out import FanOut, LinkBroken, LinksFull
from tp_runtime.broadcast.pace import Cadence
from tp_runtime.broadcast.sockets import close_all, process_state, write_memfd
from tp_runtime.broadcast.statistics import BroadcasterStatistics, PeerStatistics
from tp_runtime.broadcast.watch import Watch
from tp_runtime.broadcast.wire import HEADER_BYTES, MEMFD_MARK, Kind, pack_frame
from tp_runtime.errors import BroadcastError, DeadlineExceeded, PeerLost, ProtocolError

if TYPE_CHECKING:
    from tp_runtime.broadcast.config import BroadcasterConfig
    from tp_runtime.broadcast.fan_out import Part
    from tp_runtime.broadcast.link import Link


# The decision of a confirm is sent even when the answers used up all the time.
_DECISION_S = 0.2
# The header's field is an unsigned 32-bit number of microseconds.
_LONGEST_INTERVAL_S = 4294.0


class RootBroadcaster(CpuTpBroadcaster):
    """See `CpuTpBroadcaster`. With no peers every call returns at once."""

    def __init__(
        self, links: dict[int, Link], *, world_size: int, config: BroadcasterConfig
    ) -> None:
        super().__init__(rank=0, world_size=world_size, config=config)
        self._links = links
        self._fan_out = FanOut(
            list(links.values()), wake_fd=self._latch.wake_fd, check=self._latch.check
        )
        self._cadence = Cadence()
        self._last_sent_s = self._last_beat_s = time.monotonic()
        self._answers: dict[int, tuple[bool, str]] = {}
        self._asking = 0
        self._acknowledged = dict.fromkeys(links, 0)
        self._left: int | None = None
        self._closing = False
        self._watch: Watch | None = None
        if links:
            checksum_bytes = 4
            granted = min(link.data.packet_bytes for link in links.values())
            self._inline_bytes = granted - HEADER_BYTES - checksum_bytes
            self._watch = Watch(
                self,
                ports={rank: link.control for rank, link in links.items()},
                pidfds={rank: link.pidfd for rank, link in links.items()},
                tick_s=config.heartbeat_s,
                name="tp-broadcast-watch-0",
            )
            self._watch.start()

    @property
    def pids(self) -> tuple[int, ...]:
        return (self._pid, *(self._links[rank].pid for rank in sorted(self._links)))

    # publish and confirm ---------------------------------------------------------------------

    def publish(
        self, message: Message, *, timeout_s: float | None = None, next_s: float | None = None
    ) -> None:
        self._enter()
        if not self._links:
            self._sequence += 1
            return
        body = self._encode(message)
        expected_s = self._cadence.next_interval_s(time.monotonic())
        if next_s is not None:
            expected_s = next_s
        self._send(Kind.MESSAGE, body, self._deadline(timeout_s), interval_s=expected_s)

    def confirm(self, message: Message, *, timeout_s: float | None = None) -> Receipt:
        self._enter()
        if not self._links:
            self._sequence += 1
            return Receipt(sequence=self._sequence, committed=True, refusals={}, details={})
        body = self._encode(message)
        deadline = self._deadline(timeout_s)
        with self._latch.changed:
            self._answers = {}
            self._asking = self._sequence + 1
        # The announced interval is the promise of a decision by then.
        self._send(Kind.CONFIRM, body, deadline, interval_s=deadline.timeout_s)
        sequence = self._sequence
        answers = self._collect(deadline)
        refusals = {rank: detail for rank, (ok, detail) in answers.items() if not ok}
        committed = not refusals
        decision = encode({"sequence": sequence, "committed": committed})
        late = Deadline(max(_DECISION_S, deadline.remaining_s()))
        self._send(Kind.DECISION, decision, late)
        self._counters.confirms += 1
        self._counters.refused += not committed
        return Receipt(
            sequence=sequence,
            committed=committed,
            refusals=refusals,
            details={rank: detail for rank, (_, detail) in answers.items()},
        )

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self.config.timeout_s if timeout_s is None else timeout_s)

    def _encode(self, message: Message) -> bytes:
        body = encode(message)
        if len(body) > self.config.max_message_bytes:
            raise ProtocolError(
                f"message of {len(body)} bytes, max_message_bytes is "
                f"{self.config.max_message_bytes}; send less or raise it on every rank"
            )
        return body

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

    def _send(
        self, kind: Kind, body: bytes, deadline: Deadline, *, interval_s: float = 0.0
    ) -> None:
        """Send one frame to every peer, or fail the channel."""
        if self._left is not None:
            self._raise_left(self._links[self._left])
        self._in_call = True
        descriptors: list[int] = []
        try:
            large = len(body) > self._inline_bytes
            if large:
                descriptors.append(write_memfd(body))
            sequence = self._sequence + 1
            frame = pack_frame(
                kind,
                b"" if large else body,
                sequence=sequence,
                epoch=self.config.epoch,
                interval_us=int(min(max(interval_s, 0.0), _LONGEST_INTERVAL_S) * 1e6),
                memfd_bytes=len(body) if large else None,
                checksum=self.config.checksum,
            )
            parts: list[Part] = [(frame, ())]
            if large:
                parts.append((MEMFD_MARK, descriptors))
            self._send_parts(parts, deadline)
            self._sequence = sequence
            self._last_sent_s = time.monotonic()
            if kind is Kind.MESSAGE or kind is Kind.CONFIRM:
                self._counters.messages += 1
                self._counters.body_bytes += len(body)
                self._counters.large_messages += large
        finally:
            close_all(descriptors)
            self._in_call = False

    def _send_parts(self, parts: list[Part], deadline: Deadline) -> None:
        done = False
        try:
            self._fan_out.send(parts, deadline)
            done = True
        except LinkBroken as broken:
            self._raise_lost(broken.link, broken.error)
        except LinksFull as full:
            what = f"did not take message {self._sequence + 1} from a full buffer"
            self._raise_late(full.links, deadline, what)
        finally:
            if not done and self._latch.error is None:
                # Some peers have the message and some do not: nobody may go on from here.
                reason = "interrupted while it was sending"
                self._fail(PeerLost(f"rank 0 was {reason}", rank=0, reason=reason))

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
        # A stopped rank explains the lateness of others, so it is named first.
        states = {link.rank: process_state(link.pid) for link in late}
        late = sorted(late, key=lambda link: (states[link.rank] == "running", link.rank))
        who = ", ".join(f"rank {link.rank} (pid {link.pid}, {states[link.rank]})" for link in late)
        self._raise_failed(
            DeadlineExceeded(
                f"rank 0: {who} {what} within {deadline.timeout_s:g} s "
                f"(waited {deadline.elapsed_s():.3f} s)",
                rank=late[0].rank,
            )
        )

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
            self._acknowledged[rank] = sequence
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
        now_s = time.monotonic()
        if now_s - max(self._last_sent_s, self._last_beat_s) >= self.config.heartbeat_s / 2:
            self._last_beat_s = now_s
            for link in self._links.values():
                if not link.left:
                    self._beat(link)

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
        for link in self._links.values():
            link.close()

    def statistics(self) -> BroadcasterStatistics:
        counters = self._counters
        return BroadcasterStatistics(
            rank=0,
            world_size=self.world_size,
            sequence=self._sequence,
            messages=counters.messages,
            body_bytes=counters.body_bytes,
            large_messages=counters.large_messages,
            confirms=counters.confirms,
            refused=counters.refused,
            heartbeats=counters.heartbeats,
            waits=counters.waits + self._fan_out.waits,
            misses=counters.misses,
            latency_us=tuple(counters.latency_us),
            peers=tuple(
                PeerStatistics(
                    rank=rank,
                    pid=link.pid,
                    acknowledged=self._acknowledged[rank],
                    full=self._fan_out.full[rank],
                    left=link.left,
                )
                for rank, link in sorted(self._links.items())
            ),
        )

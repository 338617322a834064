"""What every contender of the broadcast benchmark is, and ours."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING, Any

from payloads import LARGE, PLAN, RAW, Payload

from tp_runtime.broadcast import BroadcasterConfig, CpuTpBroadcaster
from tp_runtime.step_message import StepDecoder, StepEncoder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tp_runtime.broadcast import WaitMode
    from tp_runtime.step_plan import StepPlan

now_ns = time.monotonic_ns
AWAKE = "ours, peers awake"
# No wait inside a contender is longer; what takes longer has lost a message.
GIVE_UP_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamps:
    """Shared by all ranks, by message index in a segment; nanoseconds of CLOCK_MONOTONIC.

    Args:
        began, ended: of rank 0's call.
        arrived: one row per rank; that of rank 0 is not used.
        published: how many messages of the segment rank 0 has sent, one element.
    """

    began: memoryview
    ended: memoryview
    arrived: list[memoryview]
    published: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One rank's place among the others while contenders are set up.

    Args:
        hub: a connection to every peer (rank 0), or to rank 0 (peers).
    """

    rank: int
    ranks: int
    folder: Path
    hub: list[Connection[Any, Any]]
    stamps: Stamps

    @property
    def peers(self) -> int:
        return self.ranks - 1

    def connect(self, name: str) -> list[Connection[Any, Any]]:
        """Another set of connections between rank 0 and every peer."""
        return connect(self.folder / name, rank=self.rank, ranks=self.ranks)

    def from_root(self, value: Any) -> Any:
        """What rank 0 passes here, on every rank."""
        if self.rank == 0:
            for connection in self.hub:
                connection.send(value)
            return value
        return self.hub[0].recv()

    def barrier(self) -> None:
        """Rank 0 goes on when all peers are here."""
        if self.rank > 0:
            self.hub[0].send("here")
            return
        for connection in self.hub:
            said = connection.recv()
            if said != "here":
                raise RuntimeError(f"a peer said {said!r} instead of 'here'")


def connect(path: Path, *, rank: int, ranks: int) -> list[Connection[Any, Any]]:
    """A stream connection between rank 0 and every peer, as `multiprocessing.Pipe` makes them."""
    if rank > 0:
        end_s = time.monotonic() + GIVE_UP_S
        while True:
            try:
                return [Client(str(path), "AF_UNIX")]
            except OSError:  # rank 0 does not listen yet
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.005)
    # bound under another name first: a peer that finds the file finds a listener
    partial = path.with_suffix(".new")
    with Listener(str(partial), "AF_UNIX", backlog=ranks) as listener:
        os.link(partial, path)
        return [listener.accept() for _ in range(ranks - 1)]


class Contender(ABC):
    """One way to bring a message from rank 0 to every peer.

    Args:
        name: in the table.
        payloads: what it can send, by name.
    """

    name: str
    payloads: dict[str, Payload]

    @abstractmethod
    def open(self, group: Group) -> None:
        """Connect the ranks; every rank calls it, in the same order of contenders."""

    def sender(self, payload: str) -> Callable[[Any], None]:
        raise NotImplementedError(self.name)

    def receiver(self, payload: str) -> Callable[[], Any]:
        raise NotImplementedError(self.name)

    def prepare(self, payload: str, index: int) -> Any:
        """The message, before the clock starts."""
        return self.payloads[payload].make(index)

    def timed_sender(self, payload: str, stamps: Stamps) -> Callable[[int, Any], None]:
        """Sends message `index` and stamps the begin and the end of the call."""
        send, began, ended = self.sender(payload), stamps.began, stamps.ended

        def timed(index: int, message: Any) -> None:
            begin_ns = now_ns()
            send(message)
            end_ns = now_ns()
            began[index] = begin_ns
            ended[index] = end_ns

        return timed

    def receive_many(self, payload: str, first: int, count: int, arrived: memoryview) -> int:
        """Receive and stamp messages `first` and on; how many had another number."""
        receive, kind = self.receiver(payload), self.payloads[payload]
        read, number = kind.read, kind.index
        wrong = 0
        for index in range(first, first + count):
            message = receive()
            if read is not None:
                message = read(message)
            arrived[index] = now_ns()
            wrong += number(message) != index
        return wrong

    def close(self) -> None:
        """Let go of what `open` took; nothing where the end of the process does that."""
        return


class Ours(Contender):
    """This project's channel; one for each way to wait."""

    payloads = {RAW.name: RAW, PLAN.name: PLAN, LARGE.name: LARGE}  # noqa: RUF012

    def __init__(self, wait: WaitMode) -> None:
        self.name = f"ours, {wait}"
        self._wait: WaitMode = wait
        self._channel: CpuTpBroadcaster | None = None
        self._decoder = StepDecoder()

    @property
    def channel(self) -> CpuTpBroadcaster:
        if self._channel is None:
            raise RuntimeError(f"{self.name} is not open")
        return self._channel

    def open(self, group: Group) -> None:
        self._channel = CpuTpBroadcaster.join(
            rank=group.rank,
            world_size=group.ranks,
            address=group.folder / self.name.replace(", ", "-").replace(" ", "_"),
            config=BroadcasterConfig(wait=self._wait),
        )

    def sender(self, payload: str) -> Callable[[Any], None]:
        publish = self.channel.publish
        if payload == PLAN.name:
            encode = StepEncoder().encode

            def publish_plan(plan: StepPlan) -> None:
                publish(encode(plan))

            return publish_plan
        return publish

    def receive_many(self, payload: str, first: int, count: int, arrived: memoryview) -> int:
        if first == 0:
            self._decoder = StepDecoder()  # every segment is a run of steps of its own
            self.channel.rehearse_with(self._decoder.rehearse)
        return super().receive_many(payload, first, count, arrived)

    def receiver(self, payload: str) -> Callable[[], Any]:
        receive = self.channel.receive
        if payload == PLAN.name:
            decode = self._decoder.decode
            return lambda: decode(receive())
        return receive

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


class OursAwake(Ours):
    """Rank 0's cost of publish() alone: no peer waits for the message, all are awake elsewhere.

    A peer looks at shared memory, yielding its core, until the message has been sent and only
    then calls receive(), as a rank does whose step takes longer than rank 0's. The message form
    of the step is made before the clock starts.
    """

    payloads = {PLAN.name: PLAN}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__("balanced")
        self.name = AWAKE
        self._published = memoryview(b"")
        self._next = 0
        self._encoder = StepEncoder()

    def open(self, group: Group) -> None:
        super().open(group)
        self._published = group.stamps.published

    def prepare(self, payload: str, index: int) -> Any:
        if index == 0:
            self._encoder = StepEncoder()
        return self._encoder.encode(self.payloads[payload].make(index))

    def timed_sender(self, payload: str, stamps: Stamps) -> Callable[[int, Any], None]:
        publish, began, ended = self.channel.publish, stamps.began, stamps.ended

        def timed(index: int, message: Any) -> None:
            begin_ns = now_ns()
            publish(message)
            end_ns = now_ns()
            began[index] = begin_ns
            ended[index] = end_ns
            self._published[0] = index + 1

        return timed

    def receive_many(self, payload: str, first: int, count: int, arrived: memoryview) -> int:
        self._next = first
        return super().receive_many(payload, first, count, arrived)

    def receiver(self, payload: str) -> Callable[[], Any]:
        receive, published = super().receiver(payload), self._published

        def receive_late() -> Any:
            end_s = time.monotonic() + GIVE_UP_S
            while published[0] <= self._next:
                os.sched_yield()
                if time.monotonic() > end_s:
                    raise TimeoutError(f"{self.name}: message {self._next} was not published")
            self._next += 1
            return receive()

        return receive_late

"""Programs of the nursery with one hostile rank: each case is a join, a shot, and its end."""

from __future__ import annotations

import collections
import contextlib
import os
import select
import socket
import time
import traceback
from typing import TYPE_CHECKING, Any

from tests.ranks.faults.board import (
    descriptors,
    failed,
    leaked,
    memory_bytes,
    now,
    peak_memory_bytes,
)
from tests.ranks.faults.fuzz import (
    EPOCH,
    GOLDEN_MESSAGES,
    LARGE_MESSAGE,
    MOST_BYTES,
    TIMESTAMPS,
    Fuzzer,
    hostile_bodies,
)
from tests.ranks.faults.strike import connected, own_sockets
from tp_runtime.broadcast import (
    BroadcasterConfig,
    BroadcastError,
    ChannelClosed,
    CpuTpBroadcaster,
    ProtocolError,
)
from tp_runtime.broadcast.codec import encode
from tp_runtime.broadcast.handshake import Identity
from tp_runtime.broadcast.progress import make_page
from tp_runtime.broadcast.rendezvous import Listener
from tp_runtime.broadcast.wire import Kind, pack_frame

if TYPE_CHECKING:
    from tests.ranks.faults.board import Me

TIMEOUT_S = 0.3
# A victim that shows nothing by then is left alone, and sees its hostile rank go.
_PATIENCE_S = 0.03
_WARM_UP = 10
# What a hostile rank wrote may be quoted, but not without end.
MOST_CHARACTERS = 10_000


def foreign(error: Exception) -> str:
    """An exception that does not belong to the channel, and where it came from."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename.rpartition('/')[2]}:{frame.lineno})"


class Log:
    """What a victim saw, over all cases."""

    def __init__(self) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []
        self._before = descriptors()
        self._memory = self._peak = 0

    def end_case(self, number: int, outcome: str) -> None:
        self.outcomes[outcome] += 1
        self.problems += [f"case {number} left {what}" for what in leaked(self._before)]
        self._before = descriptors()  # once is enough
        if number == _WARM_UP:
            self._memory, self._peak = memory_bytes(), peak_memory_bytes()

    def report(self) -> dict[str, Any]:
        return {
            "outcomes": dict(self.outcomes),
            "problems": self.problems,
            "growth_bytes": memory_bytes() - self._memory,
            "peak_growth_bytes": peak_memory_bytes() - self._peak,
        }


def _join(me: Me, number: int, *, checksum: bool, **changes: Any) -> CpuTpBroadcaster:
    settings: dict[str, Any] = {
        "run_id": f"case {number}",
        "epoch": EPOCH,
        "timeout_s": TIMEOUT_S,
        "join_timeout_s": 10.0,
        "max_message_bytes": MOST_BYTES,
        "checksum": checksum,
        **changes,
    }
    return CpuTpBroadcaster.join(
        rank=me.rank,
        world_size=me.size,
        address=me.address,
        config=BroadcasterConfig(**settings),
    )


# a hostile rank in a group ------------------------------------------------------------------


def in_group(me: Me, *, hostile: int, cases: int, seed: int, checksum: bool) -> dict[str, Any]:
    """Rank `hostile` joins as it should and then shoots at the others."""
    log = Log()
    for number in range(cases):
        if me.rank == hostile:
            fuzzer = Fuzzer(seed * 1000 + number, to_root=hostile != 0, checksum=checksum)
            _shoot(me, number, fuzzer, checksum=checksum)
        else:
            log.end_case(number, _suffer(me, number, checksum=checksum))
    return log.report() if me.rank != hostile else {}


def _shoot(me: Me, number: int, fuzzer: Fuzzer, *, checksum: bool) -> None:
    channel = _join(me, number, checksum=checksum)
    me.arrive(2 * number + 1)
    me.until_all_at(2 * number + 1)
    sockets = own_sockets()
    shot = fuzzer.shot()
    # every victim gets it: rank 0 has one pair of sockets for each
    for sock in sockets.data if shot.on == "data" else sockets.control:
        shot.fire(sock)
    shot.close()
    victims = [rank for rank in range(me.size) if rank != me.rank]
    limit_s = now() + _PATIENCE_S
    while now() < limit_s and not me.all_at(2 * number + 2, victims):
        time.sleep(0.0005)
    for on in ("data", "control"):
        with contextlib.suppress(OSError):
            sockets.shutdown(on)
    sockets.close()
    me.until(lambda: me.all_at(2 * number + 2, victims), "the victims to see an end")
    channel.close()


def _suffer(me: Me, number: int, *, checksum: bool) -> str:
    """Use the channel as if nothing were the matter; what it ends with."""
    channel = _join(me, number, checksum=checksum)
    me.arrive(2 * number + 1)
    limit_s = now() + 3.0
    try:
        while now() < limit_s:
            if me.rank:
                _take(channel, checksum=checksum)
            elif number % 2:
                # a hostile answer counts as one, but only if it is one
                receipt = channel.confirm("plan")
                assert receipt.committed == (not receipt.refusals)
            else:
                failed(channel, 0.002)
                channel.publish("step")
    except BroadcastError as error:
        if len(str(error)) > MOST_CHARACTERS:
            return f"a message of {len(str(error))} characters"
        return type(error).__name__
    except Exception as error:  # noqa: BLE001 - counted, and the test fails by it
        return foreign(error)
    finally:
        me.arrive(2 * number + 2)
        channel.close()
    return "nothing"


def _take(channel: CpuTpBroadcaster, *, checksum: bool) -> None:
    try:
        message = channel.receive()
    except ProtocolError:
        if channel.failure is not None:
            raise
        # the message before was a question
        channel.acknowledge(True)
        return
    refuse_what_may_not_travel(message)
    allowed = [*GOLDEN_MESSAGES, {"sequence": 1, "committed": True}, LARGE_MESSAGE, "plan"]
    if checksum and message not in allowed:
        raise AssertionError(f"accepted what was never sent: {str(message)[:200]}")


def refuse_what_may_not_travel(message: Any) -> None:
    """What comes out of a channel could have been put into one."""
    try:
        encode(message)
    except ProtocolError as error:
        raise AssertionError(f"it returned what may not travel: {str(error)[:200]}") from None


def odd_bodies(me: Me) -> dict[str, Any]:
    """Rank 0 sends a sound frame with a body that is none, one after the other."""
    accepted = []
    log = Log()
    for number, body in enumerate(hostile_bodies()):
        accepted += [
            f"body {number} ({body[:12].hex(' ')}): {what}" for what in _send(me, number, body)
        ]
        log.end_case(number, "sent")
    return {**log.report(), "accepted": accepted}


def _send(me: Me, number: int, body: bytes) -> list[str]:
    channel = _join(me, number, checksum=False)
    wrong = []
    if me.rank == 0:
        sockets = own_sockets()
        sockets.send("data", pack_frame(Kind.MESSAGE, body, sequence=1, epoch=EPOCH))
        sockets.close()
        me.until_all_at(number + 1, [1])
    else:
        try:
            refuse_what_may_not_travel(channel.receive())
        except AssertionError as error:
            wrong.append(str(error))
        except ProtocolError:
            wrong.extend([] if channel.failure is not None else ["refused, but not for good"])
        else:
            wrong += [] if body in TIMESTAMPS else ["returned something"]
        me.arrive(number + 1)
    channel.close()
    return wrong


# a hostile process in the handshake ---------------------------------------------------------


def at_the_door(me: Me, *, cases: int, seed: int) -> dict[str, Any]:
    """Rank 1 first comes as a stranger that says anything but HELLO, then joins as it should."""
    log = Log()
    for number in range(cases):
        if me.rank:
            _knock(me, number, Fuzzer(seed * 1000 + number, to_root=True, checksum=False))
        log.end_case(number, _join_as_usual(me, number))
        me.arrive(number + 1)
        # the next stranger must not come to the listener of this round
        me.until_all_at(number + 1)
    return log.report() if me.rank == 0 else {}


def _join_as_usual(me: Me, number: int) -> str:
    with _join(me, number, checksum=False) as channel:
        if me.rank == 0:
            channel.publish(number)
        elif channel.receive() != number:
            return "another message"
        else:
            with contextlib.suppress(ChannelClosed):
                channel.receive()
    return "joined"


def _knock(me: Me, number: int, fuzzer: Fuzzer) -> None:
    me.until(me.address.exists, "rank 0 to listen")
    identity = Identity.of(
        BroadcasterConfig(run_id=f"case {number}", epoch=EPOCH, max_message_bytes=MOST_BYTES),
        rank=1,
        world_size=me.size,
    )
    with connected(me) as sock:
        shot = fuzzer.shot()
        if fuzzer.source.random() < 0.5:
            body = _spoiled(fuzzer, identity.body())
            hello = pack_frame(Kind.HELLO, encode(body), sequence=1, epoch=EPOCH)
            shot.packets = [hello]
        shot.fire(sock)
        shot.close()
        # all of it is there before the right HELLO is
        select.select([sock], [], [], _PATIENCE_S)


def _spoiled(fuzzer: Fuzzer, body: dict[str, Any]) -> dict[str, Any]:
    """One field is missing, of another type or wrong."""
    values: list[Any] = [None, -1, 1 << 63, 0, 3, "x", "\u0000" * 50_000, [], {}]
    name = fuzzer.source.choice(list(body))
    if fuzzer.source.random() < 0.3:
        del body[name]
    else:
        body[name] = fuzzer.source.choice([value for value in values if value != body[name]])
    return body


def by_an_impostor(me: Me, *, cases: int, seed: int) -> dict[str, Any]:
    """Rank 0 answers the HELLO of rank 1 with anything."""
    log = Log()
    for number in range(cases):
        if me.rank == 0:
            _answer(me, number, Fuzzer(seed * 1000 + number, to_root=False, checksum=False))
            continue
        me.until_all_at(number + 1, [0])
        outcome = _try_to_join(me, number)
        me.arrive(number + 1)
        log.end_case(number, outcome)
    return log.report() if me.rank else {}


def _try_to_join(me: Me, number: int) -> str:
    try:
        _join(me, number, checksum=False, join_timeout_s=TIMEOUT_S).close()
    except BroadcastError as error:
        return type(error).__name__
    except Exception as error:  # noqa: BLE001 - counted, and the test fails by it
        return foreign(error)
    return "joined"


def _answer(me: Me, number: int, fuzzer: Fuzzer) -> None:
    listener = Listener(me.address, backlog=1, timeout_s=10)
    listener.sock.settimeout(5)
    me.arrive(number + 1)
    connection, _ = listener.sock.accept()
    # before the next round, or its join would come here
    listener.close()
    with connection:
        connection.recv(4096)
        for packet, attached in _handshake(me, number, fuzzer):
            with contextlib.suppress(OSError):
                socket.send_fds(connection, [packet], attached)
            for descriptor in attached:
                os.close(descriptor)
        limit_s = now() + _PATIENCE_S
        while now() < limit_s and not me.all_at(number + 1, [1]):
            time.sleep(0.0005)
    me.until_all_at(number + 1, [1])


def _handshake(me: Me, number: int, fuzzer: Fuzzer) -> list[tuple[bytes, list[int]]]:
    """WELCOME and READY, almost right."""
    source = fuzzer.source
    identity = Identity.of(
        BroadcasterConfig(run_id=f"case {number}", epoch=EPOCH, max_message_bytes=MOST_BYTES),
        rank=1,
        world_size=me.size,
    )
    welcome: dict[str, Any] = identity.body()
    ready: dict[str, Any] = {"pids": [os.getpid(), me.board.pid(1)], "pidfd_ranks": [0, 1]}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    with_welcome = [theirs.detach(), make_page(me.size)]
    with_ready = [os.pidfd_open(os.getpid()), os.pidfd_open(me.board.pid(1))]
    choice = source.randrange(8)
    if choice == 0:
        welcome = _spoiled(fuzzer, welcome)
    elif choice == 1:
        with_welcome = _replaced(fuzzer, with_welcome)
    elif choice == 2:
        ready["pids"] = source.choice([None, [], [1], [1, None], [-1, -1], [1 << 40, 1], [1] * 99])
    elif choice == 3:
        ready["pidfd_ranks"] = source.choice(
            [None, [], [0], [0, 0], [1, 1], [1, 0], [0.0, 1], [True, 1], [-1, 5], [[], []], "ab"]
        )
    elif choice == 4:
        with_ready = _replaced(fuzzer, with_ready)
    elif choice == 5:
        del ready[source.choice(list(ready))]
    frames = [
        (pack_frame(Kind.WELCOME, encode(welcome), sequence=1, epoch=EPOCH), with_welcome),
        (pack_frame(Kind.READY, encode(ready), sequence=2, epoch=EPOCH), with_ready),
    ]
    if choice == 6:
        frames.reverse()
    elif choice == 7:
        shot = fuzzer.shot()
        rows = [*shot.descriptors, *[[]] * len(shot.packets)]
        frames += list(zip(shot.packets, rows, strict=False))
        for _ in range(source.randrange(3)):
            for descriptor in frames.pop(0)[1]:
                os.close(descriptor)
    return frames


def _replaced(fuzzer: Fuzzer, attached: list[int]) -> list[int]:
    """Other descriptors than those that belong here."""
    choice = fuzzer.source.randrange(4)
    if choice == 0:
        return attached + fuzzer.descriptors(fuzzer.source.choice([1, 100]))
    if choice == 1:
        for descriptor in attached:
            os.close(descriptor)
        return []
    wrong = fuzzer.source.randrange(len(attached))
    for number, descriptor in enumerate(attached):
        if choice == 2 or number == wrong:
            os.close(descriptor)
            attached[number] = fuzzer.descriptors(1)[0]
    return attached

"""Programs of the nursery that use the channel for long: many joins, kills, messages, long gaps."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

from tests.ranks.faults.board import (
    PATIENCE_S,
    descriptors,
    failed,
    leaked,
    memory_bytes,
    now,
    threads,
)
from tp_runtime.broadcast import BroadcasterConfig, ChannelClosed, CpuTpBroadcaster, PeerLost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.ranks.faults.board import Me
    from tp_runtime.broadcast import WaitMode

# A peer that has a message later than this after it was sent had lost its wake-up.
LOST_S = 0.5
_LONGEST_GAP_S = 3.0


def rounds(me: Me, *, count: int, warm_up: int) -> dict[str, Any]:
    """Join, use, close, again and again in the same processes."""
    before = descriptors()
    memory: list[int] = []
    growth: list[str] = []
    for number in range(count):
        _one_round(me, number)
        # rank 0 of the next round may be there before this rank has looked
        left = os.listdir(me.folder) if me.rank == 0 else []
        growth += [f"round {number}: {what}" for what in (*leaked(before), *left)]
        if number in (warm_up, count - 1):
            memory.append(memory_bytes())
    return {
        "growth": growth,
        "threads": _threads_left(),
        "memory_bytes": memory,
    }


def _one_round(me: Me, number: int) -> None:
    channel = _join(me, run_id=f"round {number}")
    (_use_as_root if me.rank == 0 else _use_as_peer)(channel, number)
    channel.close()


def _join(me: Me, **changes: Any) -> CpuTpBroadcaster:
    settings: dict[str, Any] = {"join_timeout_s": 20.0, "timeout_s": 20.0, **changes}
    return CpuTpBroadcaster.join(
        rank=me.rank,
        world_size=me.size,
        address=me.address,
        config=BroadcasterConfig(**settings),
    )


def _large(number: int) -> bytes:
    return random.Random(number).randbytes(700_000)


def _use_as_root(channel: CpuTpBroadcaster, number: int) -> None:
    for step in range(5):
        channel.publish({"step": step, "slots": list(range(step))})
    receipt = channel.confirm({"plan": number})
    assert receipt.committed
    channel.publish(_large(number))
    receipt = channel.confirm({"plan": _large(number)})
    assert not receipt.committed
    assert set(receipt.refusals) == {channel.world_size - 1}


def _use_as_peer(channel: CpuTpBroadcaster, number: int) -> None:
    for step in range(5):
        assert channel.receive() == {"step": step, "slots": list(range(step))}
    assert channel.receive() == {"plan": number}
    assert channel.acknowledge(True)
    assert channel.receive() == _large(number)
    assert channel.receive() == {"plan": _large(number)}
    assert not channel.acknowledge(channel.rank < channel.world_size - 1, "too large")
    _until_closed(channel)


def _until_closed(channel: CpuTpBroadcaster) -> None:
    try:
        late = channel.receive()
    except ChannelClosed:
        return
    raise AssertionError(f"a message after the last one: {str(late)[:200]}")


def kills(me: Me, *, count: int, warm_up: int, seed: int) -> dict[str, Any]:
    """Groups whose last rank is killed, again and again; the other processes survive them all.

    The process of the last rank joins no group: in each round a child of it does, and is killed.
    """
    before, source = descriptors(), random.Random(seed)
    memory: list[int] = []
    growth: list[str] = []
    lags_s: list[float] = []
    for number in range(count):
        if me.rank == me.size - 1:
            _kill_a_child(me, number, source)
        else:
            lags_s.append(_survive(me, number))
        left = os.listdir(me.folder) if me.rank == 0 else []
        growth += [f"round {number}: {what}" for what in (*leaked(before), *left)]
        if number in (warm_up, count - 1):
            memory.append(memory_bytes())
        # the next round begins when nobody is in this one any more
        me.arrive(2 * number + 2)
        me.until_all_at(2 * number + 2)
    return {
        "growth": growth,
        "threads": _threads_left(),
        "memory_bytes": memory,
        "lags_s": lags_s,
    }


def _kill_a_child(me: Me, number: int, source: random.Random) -> None:
    child = os.fork()
    if child == 0:
        try:
            channel = _join(me, run_id=f"kill {number}")
            me.arrive(2 * number + 1)
            while True:
                if channel.receive() == "plan":
                    channel.acknowledge(True)
        finally:
            # it was not killed, so its parent will say what it waited for
            os._exit(1)
    me.until_all_at(2 * number + 1)
    time.sleep(source.uniform(0.0, 0.01))
    me.board.strike()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _survive(me: Me, number: int) -> float:
    """Seconds from the kill until this rank was told; rank 0 does another thing in each round."""
    with _join(me, run_id=f"kill {number}") as channel:
        me.arrive(2 * number + 1)
        try:
            if me.rank == 0 and number % 3 == 0:
                assert failed(channel, PATIENCE_S)
            while True:
                if me.rank:
                    if channel.receive() == "plan":
                        channel.acknowledge(True)
                elif number % 3 == 1:
                    channel.confirm("plan")
                else:
                    channel.publish([number])
                    time.sleep(0.0005)
        except PeerLost as lost:
            lag_s, lost_rank = now() - me.board.struck_s, lost.rank
    assert lost_rank == me.size - 1, f"round {number}: named rank {lost_rank}"
    return lag_s


def _threads_left() -> int:
    """The kernel still counts a thread for a moment after it was joined."""
    limit_s = now() + 1.0
    while threads() > 1 and now() < limit_s:
        time.sleep(0.001)
    return threads()


def in_order(me: Me, *, count: int, seed: int) -> dict[str, Any]:
    """Messages of random size, most small and a few in a memfd, compared with what was sent."""
    with _join(me) as channel:
        for number, message in enumerate(_messages(count, seed)):
            if me.rank == 0:
                channel.publish(message)
            else:
                got = channel.receive()
                assert got == message, f"message {number}: expected another than {str(got)[:200]}"
        if me.rank:
            _until_closed(channel)
        statistics = channel.statistics()
    return {"messages": statistics.messages, "large": statistics.large_messages}


def _messages(count: int, seed: int) -> Iterator[dict[str, Any]]:
    source = random.Random(seed)
    block = source.randbytes(1 << 20)
    for number in range(count):
        # sizes of every order of magnitude; every 400th beyond any packet
        size = int(10 ** source.uniform(0, 4.5)) if number % 400 else 900_000
        start = source.randrange(len(block) - size)
        yield {"n": number, "body": block[start : start + size], "ids": list(range(number % 9))}


def wake_ups(me: Me, *, wait: WaitMode, seconds: float, seed: int) -> dict[str, Any]:
    """Messages after random gaps; every one must wake every peer at once.

    Rank 0 sends nothing more until all have the last one, so that no later message wakes a peer
    in place of one that was lost.
    """
    latencies: list[float] = []
    with _join(me, wait=wait) as channel:
        if me.rank:
            for number in range(1 << 30):
                message = channel.receive()
                latencies.append(now() - message["sent_s"])
                me.arrive(number + 1)
                if message["last"]:
                    break
            _until_closed(channel)
        else:
            _send_after_gaps(me, channel, seconds, random.Random(seed))
    return {"latencies_s": latencies}


def _send_after_gaps(
    me: Me, channel: CpuTpBroadcaster, seconds: float, source: random.Random
) -> None:
    until_s = now() + seconds
    peers = list(range(1, me.size))
    number, last = 0, False
    while not last:
        longest_s = min(_LONGEST_GAP_S, max(0.0, until_s - now()))
        gap_s = _gap_s(number, source, longest_s)
        last = now() + gap_s >= until_s or longest_s == 0.0
        _pass(gap_s)
        channel.publish({"sent_s": now(), "last": last})
        number += 1
        me.until_all_at(number, peers)


def _gap_s(number: int, source: random.Random, longest_s: float) -> float:
    """Mostly around what a wait spins or sleeps for, now and then up to the longest."""
    if number % 60 == 59:
        return source.uniform(0, longest_s)
    return min(longest_s, 10 ** source.uniform(-6, -1.7))


def _pass(seconds: float) -> None:
    """Let time pass, to the microsecond where it is short."""
    until_s = now() + seconds
    if seconds > 0.001:
        time.sleep(seconds - 0.001)
    while now() < until_s:
        os.sched_yield()

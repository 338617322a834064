"""What the broadcast benchmark measures of ours alone: codec, bytes, idle waiters, deaths.

Nothing here imports torch: a process that loaded it takes longer to die, and that time is its own.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import operator
import os
import random
import select
import signal
import socket
import statistics
import struct
import sys
import tempfile
import time
import timeit
from pathlib import Path
from typing import TYPE_CHECKING, Any

from payloads import step_plan

from tp_runtime.broadcast import BroadcasterConfig, CpuTpBroadcaster, PeerLost, WaitMode
from tp_runtime.broadcast.codec import decode, encode
from tp_runtime.broadcast.wire import HEADER_BYTES
from tp_runtime.ranks import RankInfo
from tp_runtime.step_message import StepDecoder, StepEncoder

if TYPE_CHECKING:
    from collections.abc import Callable

now_ns = time.monotonic_ns
MODES: tuple[WaitMode, ...] = ("latency", "balanced", "efficient")
SITUATIONS = ("idle", "publishing", "confirming")
_STEPS = 512
_NOTICE_LIMIT_S = 10.0
_TEXT_BYTES = 512


def speed() -> dict[str, float]:
    """What this machine needs for things that no program can do without, microseconds.

    A virtual machine with neighbours may be twice as slow from one hour to the next, and find its
    caches empty after a millisecond; limits in microseconds are to be read beside these.
    """
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        far.setblocking(False)
        packet, buffer = bytes(100), bytearray(1000)

        def there_and_back() -> None:
            near.send(packet)
            far.recv_into(buffer)

        def look_in_vain() -> None:
            with contextlib.suppress(BlockingIOError):
                far.recv_into(buffer)

        return {
            "python_sum_of_1000": _usual_us(lambda: sum(range(1000))),
            "sched_yield": _usual_us(os.sched_yield),
            "send_and_recv_of_100_bytes": _usual_us(there_and_back),
            "recv_that_finds_nothing": _usual_us(look_in_vain),
            "small_python_call_hot": _after_gap_us(0.0),
            "the_same_after_1_ms": _after_gap_us(0.001),
            "after_10_ms": _after_gap_us(0.01),
        }


def _after_gap_us(gap_s: float) -> float:
    """Median time of a small call when this process did nothing but look at the clock before."""
    layout, names = struct.Struct("<QIIQQ"), [str(number) for number in range(16)]
    taken = []
    for turn in range(100):
        end_s = time.monotonic() + gap_s
        while time.monotonic() < end_s:
            pass
        started_ns = now_ns()
        fields = dict(zip(names, layout.unpack(layout.pack(turn, 1, 2, 3, 4)), strict=False))
        sorted(fields.items(), key=operator.itemgetter(1))
        taken.append(now_ns() - started_ns)
    return round(statistics.median(taken) / 1000, 3)


def _usual_us(call: Callable[[], object]) -> float:
    """Median over batches of the time of a call, microseconds."""
    number = 500
    taken = timeit.repeat(call, number=number, repeat=25)
    return round(statistics.median(taken) / number * 1e6, 3)


def codec(batches: int) -> dict[str, float]:
    """Hot encode and decode of steady steps: StepPlan to bytes and back, and their size."""
    plans = [step_plan(index) for index in range(_STEPS)]
    # one step more in front: the first message of a channel has no base and is whole
    encoder, decoder = _under_way()
    bodies = [encode(encoder.encode(plan)) for plan in plans]
    if [decoder.decode(decode(body)) for body in bodies] != plans:
        raise RuntimeError("a step plan did not come back as it was sent")

    def both(encoder: StepEncoder, decoder: StepDecoder) -> None:
        for plan in plans:
            decoder.decode(decode(encode(encoder.encode(plan))))

    def there(encoder: StepEncoder, _: StepDecoder) -> None:
        for plan in plans:
            encode(encoder.encode(plan))

    def back(_: StepEncoder, decoder: StepDecoder) -> None:
        for body in bodies:
            decoder.decode(decode(body))

    sizes = sorted(HEADER_BYTES + len(body) for body in bodies)
    return {
        "encode_us": _hot_us(there, batches),
        "decode_us": _hot_us(back, batches),
        "both_us": _hot_us(both, batches),
        "wire_bytes_p50": statistics.median(sizes),
        "wire_bytes_max": sizes[-1],
        "header_bytes": HEADER_BYTES,
    }


def _under_way() -> tuple[StepEncoder, StepDecoder]:
    """Both sides of a channel whose last message was the step before the first one here."""
    encoder, decoder = StepEncoder(), StepDecoder()
    decoder.decode(encoder.encode(step_plan(-1)))
    return encoder, decoder


def _hot_us(batch: Callable[[StepEncoder, StepDecoder], None], batches: int) -> float:
    """Median over batches of the time per step, microseconds."""
    batch(*_under_way())
    gc.collect()
    gc.disable()
    taken = []
    try:
        for _ in range(batches):
            encoder, decoder = _under_way()
            started_ns = now_ns()
            batch(encoder, decoder)
            taken.append((now_ns() - started_ns) / 1000 / _STEPS)
    finally:
        gc.enable()
    return round(statistics.median(taken), 3)


def idle(folder: str, gap_s: float) -> list[float]:
    """CPU share of a peer's process, all threads, in a gap without a message after steady traffic.

    Rank 0 holds a channel of two ranks to every other rank, one for each way to wait. Each peer
    returns [mode's share]; rank 0 nothing.
    """
    rank = RankInfo.from_env().rank
    channels = [
        CpuTpBroadcaster.join(
            rank=min(rank, 1),
            world_size=2,
            address=Path(folder) / f"idle-{mode}",
            config=BroadcasterConfig(wait=mode),
        )
        for number, mode in enumerate(MODES, start=1)
        if rank in (0, number)
    ]
    traffic = 200
    if rank == 0:
        for index in range(traffic):
            for channel in channels:
                channel.publish(index)
            time.sleep(0.001)
        time.sleep(gap_s)
        for channel in channels:
            channel.publish("end of the gap")
            channel.close()
        return []
    (channel,) = channels
    for _ in range(traffic):
        channel.receive()
    started_s, process_s = time.monotonic(), time.process_time()
    channel.receive()
    share = (time.process_time() - process_s) / (time.monotonic() - started_s)
    channel.close()
    return [round(share, 5)]


# ---- deaths ------------------------------------------------------------------------------


def deaths(kills: int, seed: int) -> list[dict[str, Any]]:
    """Time from kill -9 of a peer until every other rank raised PeerLost naming it.

    The ranks are forked from this light process, so a death takes no longer than it must.
    """
    rng = random.Random(seed)
    rows = []
    for ranks in (2, 3):
        for situation in SITUATIONS:
            taken_ms: list[float] = []
            wrong: list[str] = []
            for _ in range(kills):
                kill_ms, complaint = _kill_one(ranks, situation, rng)
                taken_ms.append(kill_ms)
                wrong += [complaint] if complaint else []
            ordered = sorted(taken_ms)
            rows.append(
                {
                    "ranks": ranks,
                    "situation": situation,
                    "kills": kills,
                    "p50_ms": round(statistics.median(ordered), 3),
                    "p99_ms": round(ordered[min(kills - 1, int(0.99 * kills))], 3),
                    "max_ms": round(ordered[-1], 3),
                    "wrong": wrong,
                }
            )
    return rows


class Slate:
    """Shared with the forked ranks: who is ready, when each raised, whom it named and why."""

    def __init__(self, ranks: int) -> None:
        self._memory = mmap.mmap(-1, (1 + ranks) * _TEXT_BYTES)
        cells = memoryview(self._memory)[:_TEXT_BYTES].cast("q")
        self.ready = cells[:ranks]
        self.raised_ns = cells[ranks : 2 * ranks]
        self.named = cells[2 * ranks : 3 * ranks]

    def write(self, rank: int, text: str) -> None:
        at = (1 + rank) * _TEXT_BYTES
        self._memory[at : at + _TEXT_BYTES] = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)

    def text(self, rank: int) -> str:
        at = (1 + rank) * _TEXT_BYTES
        return self._memory[at : at + _TEXT_BYTES].decode(errors="replace").strip()


def _kill_one(ranks: int, situation: str, rng: random.Random) -> tuple[float, str]:
    """Milliseconds until the last survivor knew, and what was wrong with what it was told."""
    victim = ranks - 1
    slate = Slate(ranks)
    pids: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(ranks):
                pid = os.fork()
                if pid == 0:
                    _be_rank(rank, ranks, situation, folder, slate)
                pids[rank] = pid
            _until(lambda: all(slate.ready), "the ranks did not join")
            # whoever is ready may be a few instructions away from its call
            time.sleep(rng.uniform(0.005, 0.025))
            killed_ns = now_ns()
            os.kill(pids[victim], signal.SIGKILL)
            survivors = [rank for rank in range(ranks) if rank != victim]
            raised = slate.raised_ns
            _until(lambda: all(raised[rank] for rank in survivors), "a survivor noticed nothing")
            complaint = ", ".join(
                f"rank {rank} named {slate.named[rank]} instead of {victim}: {slate.text(rank)}"
                for rank in survivors
                if slate.named[rank] != victim
            )
            return max(raised[rank] - killed_ns for rank in survivors) / 1e6, complaint
        finally:
            for pid in pids.values():
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
                os.waitpid(pid, 0)


def _until(condition: Callable[[], bool], complaint: str) -> None:
    end_s = time.monotonic() + _NOTICE_LIMIT_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{complaint} within {_NOTICE_LIMIT_S:g} s")
        time.sleep(0.0005)


def _be_rank(rank: int, ranks: int, situation: str, folder: str, slate: Slate) -> None:
    """The life of a forked rank; never returns."""
    code = 1
    try:
        channel = CpuTpBroadcaster.join(
            rank=rank,
            world_size=ranks,
            address=Path(folder) / "channel",
            config=BroadcasterConfig(join_timeout_s=_NOTICE_LIMIT_S),
        )
        slate.ready[rank] = 1
        try:
            _live(channel, situation, victim=ranks - 1)
        except PeerLost as lost:
            raised_ns = now_ns()
            slate.write(rank, str(lost))
            slate.named[rank], slate.raised_ns[rank] = lost.rank, raised_ns
        channel.close()
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
        # without the clean-up of the process that this one was forked from
        os._exit(code)


def _live(channel: CpuTpBroadcaster, situation: str, victim: int) -> None:
    """Do what the situation says until the channel fails."""
    if situation == "confirming":
        if channel.rank == 0:
            channel.confirm("plan")
        channel.receive()
        if channel.rank != victim:
            channel.acknowledge(True)
        time.sleep(2 * _NOTICE_LIMIT_S)
    if channel.rank > 0:
        while True:
            channel.receive()
    if situation == "idle":
        # a rank 0 that is in no call watches the descriptor; the next call raises the cause
        select.select([channel.fileno()], [], [])
    while True:
        channel.publish("step")
        time.sleep(0.0005)

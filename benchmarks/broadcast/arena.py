"""All contenders side by side in the same processes, in short segments whose order is reshuffled.

Rank 0 computes between two messages; it never sleeps, since a sleeping rank 0 leaves its warm core
to the woken peer and flatters every blocking contender. Its clock starts just before a message is
encoded, a peer's stops when it has been decoded, and the latency of a message is that of the last
peer. Stamps lie in shared memory by message index, so nothing is added to what is sent.

Other programs on the machine disturb some segments. A segment waits a while for a moment in which
nothing else runs, and one that had company at its start, at its end, or in the kernel's account of
both, is not counted where enough others had none; the choice never looks at what was measured.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from contenders import (
    GIVE_UP_S,
    Contender,
    Group,
    Ours,
    OursAwake,
    Stamps,
    connect,
    now_ns,
)
from measuring import (
    FEW_SHARE,
    FEW_TICKS_S,
    Cell,
    Effort,
    Measured,
    Quiet,
    Work,
    cells,
    machine_busy_s,
)
from rivals import Sources, make_rivals

from tp_runtime.ranks import RankInfo

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_MOST_MESSAGES = 512


def all_contenders(sources: Sources, *, ranks: int) -> tuple[list[Contender], dict[str, str]]:
    ours: list[Contender] = [Ours("latency"), Ours("balanced"), Ours("efficient")]
    if ranks >= 8:
        ours.append(OursAwake())
    rivals, skipped = make_rivals(sources)
    return ours + rivals, skipped


def measure(
    folder: str, sources: dict[str, Any], effort: dict[str, Any], only: str, seed: int
) -> list[dict[str, Any]] | None:
    """All cells at this number of ranks. Runs on every rank; rank 0 returns the rows."""
    info = RankInfo.from_env()
    rank, ranks = info.rank, info.world_size
    if effort["nice"]:
        os.setpriority(os.PRIO_PROCESS, 0, effort["nice"])
    path = Path(folder)
    stamps = _stamps(path / "stamps", ranks)
    hub = connect(path / "hub", rank=rank, ranks=ranks)
    group = Group(rank=rank, ranks=ranks, folder=path, hub=hub, stamps=stamps)
    contenders, _ = all_contenders(Sources(**sources), ranks=ranks)
    table = cells(contenders, ranks=ranks, only=only)
    used = {cell.contender for cell in table}
    open_ones = {one.name: one for one in contenders if one.name in used}
    for contender in open_ones.values():
        contender.open(group)
        group.barrier()
    gc.collect()
    gc.freeze()  # so that the collection before each segment is short
    rows = None
    if rank == 0:
        # JSON has no integer keys
        numbers = {
            name: {int(key): value for key, value in effort[name].items()}
            for name in ("dropped", "counted")
        }
        counts = Effort(**(effort | numbers))
        rows = _lead(group, open_ones, table, counts, random.Random(seed))
    else:
        _follow(group, open_ones, table)
    group.barrier()
    for contender in open_ones.values():
        contender.close()
    return rows


def _stamps(path: Path, ranks: int) -> Stamps:
    """Map the file that all ranks share; every rank makes it if it is not there yet."""
    row_bytes = 8 * _MOST_MESSAGES
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, row_bytes * (ranks + 3))
        whole = memoryview(mmap.mmap(descriptor, row_bytes * (ranks + 3)))
    finally:
        os.close(descriptor)
    rows = [whole[at : at + row_bytes].cast("q") for at in range(0, len(whole), row_bytes)]
    return Stamps(began=rows[0], ended=rows[1], published=rows[2], arrived=rows[3:])


# ---- rank 0 ------------------------------------------------------------------------------


def _lead(
    group: Group,
    contenders: dict[str, Contender],
    table: list[Cell],
    effort: Effort,
    rng: random.Random,
) -> list[dict[str, Any]]:
    measured = {cell: Measured() for cell in table}
    work, quiet = Work(), Quiet(effort.patience_s)
    for turn in range(effort.rounds + 1):
        order = list(table)
        rng.shuffle(order)
        for cell in order:
            dropped, counted = effort.dropped[cell.cadence_ms], effort.counted[cell.cadence_ms]
            segment = Segment(
                cell=table.index(cell), dropped=dropped, counted=counted if turn else 1
            )
            into = measured[cell] if turn else Measured()
            _run_segment(group, contenders[cell.contender], cell, segment, into, work, quiet, rng)
            measured[cell].wrong += 0 if turn else into.wrong
    for connection in group.hub:
        connection.send(None)
    return [measured[cell].row(cell, group.ranks) for cell in table]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What rank 0 tells the peers: which cell comes, and how many messages of it."""

    cell: int
    dropped: int
    counted: int


def _run_segment(
    group: Group,
    contender: Contender,
    cell: Cell,
    segment: Segment,
    into: Measured,
    work: Work,
    quiet: Quiet,
    rng: random.Random,
) -> None:
    stamps, total = group.stamps, segment.dropped + segment.counted
    timed = contender.timed_sender(cell.payload, stamps)
    stamps.published[0] = 0
    alone = quiet.wait()
    busy_s, own_s, started_s = machine_busy_s(), time.process_time(), time.monotonic()
    for connection in group.hub:
        connection.send(segment)
    group.barrier()
    gc.collect()
    gc.disable()
    try:
        work.until(now_ns() + 2_000_000)
        for index in range(total):
            # made here, as a scheduler does, so that no contender finds it cold in memory
            message = contender.prepare(cell.payload, index)
            timed(index, message)
            gap_ns = cell.cadence_ms * 1_000_000
            if cell.jitter_us:
                gap_ns += int(1000 * max(-3 * cell.jitter_us, rng.gauss(0, cell.jitter_us)))
            work.until(stamps.began[index] + gap_ns)
    finally:
        gc.enable()
    for connection in group.hub:
        wrong, process_cpu, thread_cpu, peer_s = _answer(connection)
        own_s -= peer_s
        into.wrong += wrong
        into.process_cpu.append(process_cpu)
        into.thread_cpu.append(thread_cpu)
    foreign_s = (machine_busy_s() - busy_s) - (time.process_time() - own_s)
    few = foreign_s <= max(FEW_TICKS_S, FEW_SHARE * (time.monotonic() - started_s))
    into.quiet.append(alone and few and quiet.is_now())
    kept = slice(segment.dropped, total)
    began = np.array(stamps.began[kept])
    arrived = np.array([row[kept] for row in stamps.arrived[1 : group.ranks]])
    into.latency_us.append((arrived.max(axis=0) - began) / 1000)
    into.send_us.append((np.array(stamps.ended[kept]) - began) / 1000)


def _answer(connection: Connection[Any, Any]) -> tuple[int, float, float, float]:
    """Wrong messages, CPU of a waiter (process, thread), CPU of the whole segment in seconds."""
    if not connection.poll(4 * GIVE_UP_S):
        raise TimeoutError("a peer did not finish its segment")
    wrong, process_cpu, thread_cpu, whole_s = connection.recv()
    return wrong, process_cpu, thread_cpu, whole_s


# ---- peers -------------------------------------------------------------------------------


def _follow(group: Group, contenders: dict[str, Contender], table: list[Cell]) -> None:
    root, arrived = group.hub[0], group.stamps.arrived[group.rank]
    while True:
        segment = root.recv()
        if segment is None:
            return
        cell = table[segment.cell]
        contender = contenders[cell.contender]
        whole_s = time.process_time()
        gc.collect()
        with _no_gc():
            group.barrier()
            wrong = contender.receive_many(cell.payload, 0, segment.dropped, arrived)
            started_s = time.monotonic()
            process_s, thread_s = time.process_time(), time.thread_time()
            wrong += contender.receive_many(cell.payload, segment.dropped, segment.counted, arrived)
            process_s, thread_s = time.process_time() - process_s, time.thread_time() - thread_s
            wall_s = time.monotonic() - started_s
        whole_s = time.process_time() - whole_s
        root.send((wrong, process_s / wall_s, thread_s / wall_s, whole_s))


@contextlib.contextmanager
def _no_gc() -> Any:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

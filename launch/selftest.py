"""Two real processes try the channel: join, confirmed round trips, close."""

from __future__ import annotations

import statistics
import time
from typing import Any

from tp_runtime.broadcast import BroadcasterConfig, CpuTpBroadcaster
from tp_runtime.errors import TpRuntimeError
from tp_runtime.ranks import RankInfo
from tp_runtime.rendezvous import channel_address
from tp_runtime.testing import run_ranks

ROUND_TRIPS = 50


def try_channel(*, timeout_s: float = 30.0) -> dict[str, Any]:
    """Run the test. `problem` is None when it passed; times are microseconds."""
    try:
        root, _ = run_ranks(_rank, 2, timeout_s, args=(ROUND_TRIPS, timeout_s / 3))
    except (TpRuntimeError, OSError) as error:
        return {"problem": " ".join(str(error).split()), "round_trips": 0, "median_us": None}
    return {"problem": None, "round_trips": len(root), "median_us": statistics.median(root)}


def _rank(round_trips: int, timeout_s: float) -> list[float]:
    """What each process does. Rank 0 returns the time of each confirmed message."""
    info = RankInfo.from_env()
    channel = CpuTpBroadcaster.join(
        rank=info.tp_rank,
        world_size=info.tp_size,
        address=channel_address(info),
        config=BroadcasterConfig(join_timeout_s=timeout_s, timeout_s=timeout_s),
    )
    times_us: list[float] = []
    try:
        for i in range(round_trips):
            if info.tp_rank == 0:
                start = time.perf_counter()
                receipt = channel.confirm({"kind": "self-test", "number": i})
                times_us.append((time.perf_counter() - start) * 1e6)
                if not receipt.committed:
                    raise TpRuntimeError(f"message {i} was refused: {receipt.refusals}")
            else:
                message = channel.receive()
                channel.acknowledge(message["number"] == i, f"expected number {i}, got {message}")
    finally:
        channel.close()
    return times_us

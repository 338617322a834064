"""The channel for long, and against a rank that means harm; see `soak`, `hostile`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.ranks.faults.harness import Nursery
from tests.ranks.faults.soak import LOST_S

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED = 20261129
WARM_UP = 20
# The allocator takes a MiB now and then; one buffer that is kept in each round would be 5 MiB.
MOST_GROWTH_BYTES = 3 << 20
# A hostile rank may make its victim hold a message of 1 MiB or unpack one, not more.
MOST_HOSTILE_GROWTH_BYTES = 2 << 20
MOST_HOSTILE_PEAK_BYTES = 32 << 20
ENDS = {"PeerLost", "ProtocolError", "DeadlineExceeded", "ChannelClosed"}


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as process:
        yield process


@pytest.mark.parametrize(
    ("size", "count"),
    [pytest.param(2, 40, id="2-ranks"), pytest.param(8, 200, id="8-ranks", marks=pytest.mark.long)],
)
def test_many_joins_leave_nothing(nursery: Nursery, size: int, count: int) -> None:
    result = nursery.run(
        "tests.ranks.faults.soak:rounds",
        size,
        args={"count": count, "warm_up": WARM_UP},
        limit_s=30 + 0.5 * count,
    )
    for rank, report in enumerate(result.checked()):
        assert report["growth"] == [], f"rank {rank}"
        assert report["threads"] == 1
        first, last = report["memory_bytes"]
        print(f"rank {rank}: {first >> 10} KiB, then {last >> 10} KiB")
        assert last - first < MOST_GROWTH_BYTES, f"rank {rank}"


@pytest.mark.parametrize(
    ("size", "count"),
    [pytest.param(3, 30, id="3-ranks"), pytest.param(4, 200, id="4-ranks", marks=pytest.mark.long)],
)
def test_many_kills_leave_nothing_in_the_survivors(nursery: Nursery, size: int, count: int) -> None:
    result = nursery.run(
        "tests.ranks.faults.soak:kills",
        size,
        args={"count": count, "warm_up": WARM_UP, "seed": SEED},
        limit_s=30 + 0.5 * count,
    )
    for rank, report in enumerate(result.checked()):
        assert report["growth"] == [], f"rank {rank}"
        assert report["threads"] == 1
        first, last = report["memory_bytes"]
        assert last - first < MOST_GROWTH_BYTES, f"rank {rank}"
        lags_ms = sorted(1000 * lag_s for lag_s in report["lags_s"])
        if rank < size - 1:
            assert len(lags_ms) == count
            assert lags_ms[-1] < 1000 * LOST_S
            print(f"rank {rank} knew after {lags_ms[count // 2]:.1f} ms, at most {lags_ms[-1]:.1f}")


@pytest.mark.long
def test_ten_thousand_messages_of_random_size_to_seven_peers(nursery: Nursery) -> None:
    count = 10_000
    result = nursery.run(
        "tests.ranks.faults.soak:in_order", 8, args={"count": count, "seed": SEED}, limit_s=180
    )
    for report in result.checked():
        assert report == {"messages": count, "large": count // 400}


@pytest.mark.parametrize("wait", ["latency", "balanced", "efficient"])
@pytest.mark.parametrize(
    "seconds",
    [pytest.param(1.0, id="brief"), pytest.param(10.0, id="long", marks=pytest.mark.long)],
)
def test_no_wake_up_is_lost(nursery: Nursery, wait: str, seconds: float) -> None:
    result = nursery.run(
        "tests.ranks.faults.soak:wake_ups",
        3 if wait == "efficient" else 2,
        args={"wait": wait, "seconds": seconds, "seed": SEED},
        limit_s=30 + 3 * seconds,
    )
    for report in result.checked()[1:]:
        latencies_s = sorted(report["latencies_s"])
        median_us, longest_s = latencies_s[len(latencies_s) // 2] * 1e6, latencies_s[-1]
        print(f"{len(latencies_s)} messages, p50 {median_us:.0f} us, longest {longest_s:.4f} s")
        assert len(latencies_s) > 20 * seconds
        assert longest_s < LOST_S


def check_victim(report: dict[str, Any], *, cases: int, allowed: set[str]) -> None:
    print(report["outcomes"], report["growth_bytes"] >> 10, report["peak_growth_bytes"] >> 10)
    assert report["problems"] == []
    assert set(report["outcomes"]) <= allowed
    assert sum(report["outcomes"].values()) == cases
    assert report["growth_bytes"] < MOST_HOSTILE_GROWTH_BYTES
    assert report["peak_growth_bytes"] < MOST_HOSTILE_PEAK_BYTES


def _counts(short: int, long: int) -> list[Any]:
    return [
        pytest.param(short, SEED, id="brief"),
        pytest.param(long, SEED + 1, id="long", marks=pytest.mark.long),
    ]


@pytest.mark.parametrize("checksum", [False, True], ids=["plain", "checksum"])
@pytest.mark.parametrize(("hostile", "size"), [(1, 3), (0, 2)], ids=["peer", "root"])
@pytest.mark.parametrize(("cases", "seed"), _counts(60, 600))
def test_a_hostile_rank_of_the_group(
    nursery: Nursery, hostile: int, size: int, checksum: bool, cases: int, seed: int
) -> None:
    result = nursery.run(
        "tests.ranks.faults.hostile:in_group",
        size,
        args={"hostile": hostile, "cases": cases, "seed": seed, "checksum": checksum},
        limit_s=30 + 0.3 * cases,
    )
    for rank, report in enumerate(result.checked()):
        if rank != hostile:
            check_victim(report, cases=cases, allowed=ENDS)


def test_no_odd_body_comes_out_of_a_sound_frame(nursery: Nursery) -> None:
    root, peer = nursery.run("tests.ranks.faults.hostile:odd_bodies", 2, args={}).checked()
    print(peer["outcomes"], peer["peak_growth_bytes"] >> 10)
    assert peer["accepted"] == []
    assert root["problems"] == peer["problems"] == []
    assert peer["growth_bytes"] < MOST_HOSTILE_GROWTH_BYTES
    assert peer["peak_growth_bytes"] < MOST_HOSTILE_PEAK_BYTES


@pytest.mark.parametrize(("cases", "seed"), _counts(60, 600))
def test_a_stranger_at_the_door_does_not_disturb_the_join(
    nursery: Nursery, cases: int, seed: int
) -> None:
    result = nursery.run(
        "tests.ranks.faults.hostile:at_the_door",
        2,
        args={"cases": cases, "seed": seed},
        limit_s=30 + 0.3 * cases,
    )
    check_victim(result.checked()[0], cases=cases, allowed={"joined"})


@pytest.mark.parametrize(("cases", "seed"), _counts(60, 600))
def test_a_peer_is_safe_from_an_impostor_of_rank_0(nursery: Nursery, cases: int, seed: int) -> None:
    result = nursery.run(
        "tests.ranks.faults.hostile:by_an_impostor",
        2,
        args={"cases": cases, "seed": seed},
        limit_s=30 + 0.6 * cases,
    )
    allowed = {"joined", "PeerLost", "ProtocolError", "DeadlineExceeded", "HandshakeRefused"}
    check_victim(result.checked()[1], cases=cases, allowed=allowed)

"""What a channel has done so far."""

from __future__ import annotations

from dataclasses import dataclass, field

# Bucket i counts latencies below 2**i microseconds that no smaller bucket counts.
LATENCY_BUCKETS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatistics:
    """Rank 0's view of one peer.

    Args:
        taken: sequence of the last frame that it took; what was sent since waits for it.
        full: times its buffer was full when a message was to be sent.
    """

    rank: int
    pid: int
    taken: int
    full: int
    left: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcasterStatistics:
    """Counters since the join.

    Args:
        sequence: number of the last frame sent (rank 0) or received (peers) on the data socket.
        messages: published or confirmed (rank 0), or received (peers).
        body_bytes: encoded bodies of these, counted once however many peers there are.
        large_messages: how many of them travelled outside of the packet.
        confirms: decisions made (rank 0) or received (peers); refused: those against.
        heartbeats: sent (rank 0) or received (peers).
        waits: times that it went to the kernel to wait.
        misses: messages that came after the spin for them was over (peers, not "efficient").
        spun_s: time spent spinning, which is the CPU that waiting has cost, seconds (peers).
        latency_us: histogram of arrival minus send time (peers): bucket i counts latencies under
            2**i us, the last one everything above.
        peers: rank 0 only.
    """

    rank: int
    world_size: int
    sequence: int
    messages: int
    body_bytes: int
    large_messages: int
    confirms: int
    refused: int
    heartbeats: int
    waits: int
    misses: int
    spun_s: float
    latency_us: tuple[int, ...]
    peers: tuple[PeerStatistics, ...] = ()

    def latency_quantile_us(self, share: float) -> float:
        """Upper bound of the bucket in which this share (0 to 1) of the latencies lies; NaN = none.

        Raises:
            ValueError: the share is not between 0 and 1.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share: expected 0 to 1, got {share}")
        total = sum(self.latency_us)
        if not total:
            return float("nan")
        seen = 0
        for index, count in enumerate(self.latency_us):
            seen += count
            if seen >= share * total and seen:
                return float(1 << index)
        return float(1 << (LATENCY_BUCKETS - 1))


@dataclass(slots=True)
class Counters:
    """The mutable side; each field is written by one thread only."""

    messages: int = 0
    body_bytes: int = 0
    large_messages: int = 0
    confirms: int = 0
    refused: int = 0
    heartbeats: int = 0
    waits: int = 0
    misses: int = 0
    spun_s: float = 0.0
    latency_us: list[int] = field(default_factory=lambda: [0] * LATENCY_BUCKETS)

    def count_latency(self, nanoseconds: int) -> None:
        index = max(0, nanoseconds // 1000).bit_length()
        self.latency_us[min(index, LATENCY_BUCKETS - 1)] += 1

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tp_runtime.errors import DeadlineExceeded, PeerLost, TpRuntimeError
from tp_runtime.staging import StagingLease, StagingRing, _Buffer

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make(slots: int = 2, *, timeout_s: float = 30.0, device: torch.device = CPU) -> StagingRing:
    return StagingRing(
        slots, shape=(4,), dtype=torch.int64, device=device, timeout_s=timeout_s, name="tokens"
    )


class FakeEvent:
    """An event of a device that gets there when the test says so."""

    def __init__(self) -> None:
        self.done = False
        self.queries = 0

    def query(self) -> bool:
        self.queries += 1
        return self.done


def pend(lease: StagingLease) -> FakeEvent:
    """Make a lease's buffer look as if the device were using it."""
    event = FakeEvent()
    buffer: Any = lease._held()
    buffer.event, buffer.recorded = event, True
    return event


def test_a_staged_copy_is_read_back_and_its_buffer_returned() -> None:
    ring = make()
    source = torch.tensor([5, 6, 7])
    lease = ring.stage(source)
    source.fill_(0)  # the copy has its own memory
    assert ring.statistics().in_use == 1
    assert lease.read() == [5, 6, 7]
    assert ring.statistics().in_use == 0
    assert ring.stage(torch.empty(0, dtype=torch.int64)).read() == []


def test_leaving_the_context_returns_the_buffer_also_after_an_error() -> None:
    ring = make(1)

    def fail() -> None:
        with ring.lease() as lease:
            lease.host.fill_(1)
            raise ValueError("x")

    for _ in range(3):
        with pytest.raises(ValueError, match="x"):
            fail()
    assert ring.statistics().in_use == 0
    assert ring.statistics().leases == 3


def test_a_lease_that_was_handed_over_stays_out() -> None:
    ring = make(1)
    with ring.lease() as lease:
        lease.hand_over()
    assert ring.statistics().in_use == 1
    lease.release()
    lease.release()
    assert ring.statistics().in_use == 0


def test_two_leases_never_share_memory_and_the_longest_idle_comes_first() -> None:
    ring = make(3)
    leases = [ring.lease() for _ in range(3)]
    addresses = [lease.host.data_ptr() for lease in leases]
    assert len(set(addresses)) == 3
    for index in (1, 0, 2):
        leases[index].release()
    again = [ring.lease().host.data_ptr() for _ in range(3)]
    assert again == [addresses[index] for index in (1, 0, 2)]


def test_nothing_can_be_done_with_a_buffer_after_its_release() -> None:
    lease = make().lease()
    lease.release()
    for use in (lambda: lease.host, lease.read, lease.record):
        with pytest.raises(TpRuntimeError, match="after its release"):
            use()


def test_an_exhausted_ring_says_so_at_its_deadline() -> None:
    ring = make(2, timeout_s=0.02)
    held = [ring.lease(), ring.lease()]
    with pytest.raises(DeadlineExceeded, match="tokens: all 2 buffers are leased"):
        ring.lease()
    assert ring.statistics().in_use == len(held)


def test_a_waiter_gets_the_buffer_that_comes_back() -> None:
    ring = make(1)
    lease = ring.lease()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ring.lease)
        assert not waiting.done()
        lease.release()
        waiting.result(30).release()
    assert ring.statistics().leases == 2


def test_a_buffer_is_not_used_again_before_its_event() -> None:
    ring = make(1, timeout_s=0.02)
    with ring.lease() as lease:
        event = pend(lease)
    with pytest.raises(DeadlineExceeded, match="device has not finished"):
        ring.lease()
    event.done = True
    ring.lease()
    assert event.queries > 1


def test_a_read_waits_for_the_event_and_gives_up_at_its_deadline() -> None:
    ring = make(1, timeout_s=0.02)
    lease = ring.stage(torch.tensor([1, 2]))
    event = pend(lease)
    with pytest.raises(DeadlineExceeded, match="not done"):
        lease.read()
    assert ring.statistics().in_use == 1
    event.done = True
    assert lease.read() == [1, 2]


def test_a_read_ends_with_what_is_known_to_have_gone_wrong() -> None:
    ring = make(1)
    lease = ring.stage(torch.tensor([1, 2]))
    pend(lease)

    def check() -> None:
        raise PeerLost("rank 1 is gone", rank=1, reason="killed")

    with pytest.raises(PeerLost):
        lease.read(check)


@pytest.mark.parametrize(
    "source",
    [
        torch.zeros(5, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, 2, dtype=torch.int64),
        torch.tensor(3),
    ],
)
def test_a_source_that_does_not_fit_is_refused_and_leaks_nothing(source: torch.Tensor) -> None:
    ring = make()
    with pytest.raises(TpRuntimeError, match=r"expected at most \(4,\)"):
        ring.stage(source)
    assert ring.statistics().in_use == 0
    assert ring.statistics().leases == 0


def test_a_ring_needs_a_slot() -> None:
    with pytest.raises(TpRuntimeError, match="at least one slot"):
        make(0)


def test_threads_share_a_ring_without_mixing_values() -> None:
    ring = make(3)

    def use(worker: int) -> bool:
        for i in range(200):
            value = worker * 1000 + i
            if ring.stage(torch.full((3,), value)).read() != [value] * 3:
                return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(use, range(6)))
    statistics = ring.statistics()
    assert (statistics.in_use, statistics.leases) == (0, 1200)


def test_a_buffer_without_a_device_is_always_ready() -> None:
    assert _Buffer((2,), torch.int64, CPU).passed()


@pytest.mark.gpu
@needs_gpu
def test_a_copy_does_not_wait_and_survives_its_source() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    ring = make(3, device=device)
    source = torch.zeros(4, dtype=torch.int64, device=device)
    assert ring.lease().host.is_pinned()
    for i in range(50):
        torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
        source.fill_(i)
        lease = ring.stage(source[:3])
        source.fill_(-1)  # as the next replay would
        assert lease.read() == [i] * 3

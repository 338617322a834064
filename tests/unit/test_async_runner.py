from __future__ import annotations

import contextvars
import gc
import logging
import threading
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

from tp_runtime.async_runner import AsyncRunner
from tp_runtime.errors import DeadlineExceeded, TpRuntimeError
from tp_runtime.leases import LeaseCounter

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 30.0
CPU = torch.device("cpu")


class Boom(Exception):
    pass


def boom() -> None:
    raise Boom


@pytest.fixture
def runner() -> Iterator[AsyncRunner]:
    with AsyncRunner(device=CPU, timeout_s=WAIT_S) as it:
        yield it


class Gate:
    """A task that stands still until it is opened."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.opened.wait(WAIT_S)


def test_tasks_run_in_order_on_one_other_thread(runner: AsyncRunner) -> None:
    ran: list[tuple[int, int]] = []
    for i in range(200):
        runner.launch(lambda i=i: ran.append((i, threading.get_ident())))  # type: ignore[misc]
    runner.sync()
    assert [i for i, _ in ran] == list(range(200))
    assert len({thread for _, thread in ran}) == 1
    assert ran[0][1] != threading.get_ident()
    assert runner.statistics().launched == 200


def test_launch_returns_while_its_task_runs_and_blocks_for_the_one_before(
    runner: AsyncRunner,
) -> None:
    gate, second_ran = Gate(), threading.Event()
    runner.launch(gate)
    assert gate.entered.wait(WAIT_S)
    launching = threading.Thread(target=runner.launch, args=(second_ran.set,))
    launching.start()
    launching.join(0.05)
    assert launching.is_alive()
    assert not second_ran.is_set()
    gate.opened.set()
    launching.join(WAIT_S)
    assert second_ran.wait(WAIT_S)
    assert runner.statistics().blocked_s > 0.0


def test_sync_before_any_launch_does_nothing(runner: AsyncRunner) -> None:
    runner.sync()
    assert runner.statistics().launched == 0


def test_an_exception_is_raised_by_sync_once(runner: AsyncRunner) -> None:
    runner.launch(boom)
    with pytest.raises(Boom):
        runner.sync()
    runner.sync()
    assert runner.statistics().failed == 1


def test_an_exception_is_raised_by_the_next_launch_whose_task_is_not_run(
    runner: AsyncRunner,
) -> None:
    ran: list[str] = []
    runner.launch(boom)
    with pytest.raises(Boom):
        runner.launch(lambda: ran.append("refused"))
    runner.sync()
    assert ran == []
    assert runner.statistics().launched == 1


def test_it_can_be_used_after_an_exception(runner: AsyncRunner) -> None:
    ran: list[int] = []
    for i in range(50):
        runner.launch(boom)
        with pytest.raises(Boom):
            runner.sync()
        runner.launch(lambda i=i: ran.append(i))  # type: ignore[misc]
        runner.launch(boom)
        with pytest.raises(Boom):
            runner.launch(lambda: ran.append(-1))
    assert ran == list(range(50))


def test_even_an_exit_in_a_task_reaches_the_caller(runner: AsyncRunner) -> None:
    def leave() -> None:
        raise SystemExit(3)

    runner.launch(leave)
    with pytest.raises(SystemExit):
        runner.sync()
    runner.launch(lambda: None)
    runner.sync()


def test_close_waits_for_an_accepted_task_and_ends_the_thread() -> None:
    before = threading.active_count()
    runner, gate, closed = AsyncRunner(device=CPU, timeout_s=WAIT_S), Gate(), threading.Event()
    runner.launch(gate)
    assert gate.entered.wait(WAIT_S)

    def close() -> None:
        runner.close()
        closed.set()

    closing = threading.Thread(target=close)
    closing.start()
    assert not closed.wait(0.05)
    gate.opened.set()
    closing.join(WAIT_S)
    assert closed.is_set()
    assert threading.active_count() == before
    runner.close()


def test_a_task_accepted_just_before_close_still_runs() -> None:
    for _ in range(100):
        ran: list[int] = []
        runner = AsyncRunner(device=CPU, timeout_s=WAIT_S)
        runner.launch(lambda: ran.append(1))  # noqa: B023 - runs before close returns
        runner.close()
        assert ran == [1]


def test_close_logs_an_exception_that_nobody_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    runner = AsyncRunner(device=CPU, name="harvest", timeout_s=WAIT_S)
    runner.launch(boom)
    with caplog.at_level(logging.ERROR):
        runner.close()
        runner.close()
    (record,) = caplog.records
    assert "harvest" in record.message
    assert "Boom" in record.message
    assert record.exc_info is not None


def test_nothing_can_be_launched_after_close() -> None:
    runner = AsyncRunner(device=CPU)
    runner.close()
    with pytest.raises(TpRuntimeError, match="after close"):
        runner.launch(lambda: None)
    runner.sync()


def test_a_task_that_does_not_end_is_an_error_with_a_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner, gate, ran = AsyncRunner(device=CPU, timeout_s=0.05), Gate(), []
    runner.launch(gate)
    with pytest.raises(DeadlineExceeded, match="still running"):
        runner.sync()
    with pytest.raises(DeadlineExceeded, match="still running"):
        runner.launch(lambda: ran.append(1))
    runner.close()
    assert "did not end" in caplog.text
    gate.opened.set()
    runner._thread.join(WAIT_S)
    assert ran == []


def test_a_task_cannot_wait_for_itself(runner: AsyncRunner) -> None:
    for call in (runner.sync, lambda: runner.launch(boom)):
        runner.launch(call)
        with pytest.raises(TpRuntimeError, match="own task"):
            runner.sync()


def test_what_a_task_wrote_is_visible_after_sync(runner: AsyncRunner) -> None:
    out = torch.zeros(1000)
    for i in range(100):
        runner.launch(lambda: out.add_(1.0))
        runner.sync()
        assert out.eq(i + 1).all()


def test_a_task_sees_the_callers_context(runner: AsyncRunner) -> None:
    rank = contextvars.ContextVar("rank", default=-1)
    seen: list[tuple[int, bool]] = []
    rank.set(3)
    with torch.inference_mode():
        runner.launch(lambda: seen.append((rank.get(), torch.is_inference_mode_enabled())))
    rank.set(4)
    runner.launch(lambda: seen.append((rank.get(), torch.is_inference_mode_enabled())))
    runner.sync()
    assert seen == [(3, True), (4, False)]


def test_a_finished_task_holds_nothing_alive(runner: AsyncRunner) -> None:
    class Big:
        def run(self) -> None:
            pass

    big = Big()
    gone = weakref.ref(big)
    runner.launch(big.run)
    runner.sync()
    del big
    gc.collect()
    assert gone() is None


# -- leases ----------------------------------------------------------------------------------------


def test_a_lease_goes_to_the_task_and_comes_back_when_it_ends(runner: AsyncRunner) -> None:
    counter, gate = LeaseCounter(), Gate()
    with counter.lease() as lease:
        runner.launch(gate, lease=lease)
    assert gate.entered.wait(WAIT_S)
    assert counter.count == 1
    gate.opened.set()
    runner.sync()
    assert counter.count == 0


def test_a_lease_comes_back_when_its_task_raises(runner: AsyncRunner) -> None:
    counter = LeaseCounter()
    with counter.lease() as lease:
        runner.launch(boom, lease=lease)
    with pytest.raises(Boom):
        runner.sync()
    assert counter.count == 0


def test_a_lease_comes_back_when_launch_throws(runner: AsyncRunner) -> None:
    counter = LeaseCounter()
    runner.launch(boom)
    with pytest.raises(Boom), counter.lease() as lease:
        runner.launch(lambda: None, lease=lease)
    assert counter.count == 0
    assert runner.statistics().launched == 1


def test_a_lease_handed_over_by_hand_is_returned_once() -> None:
    counter = LeaseCounter()
    with counter.lease() as kept, counter.lease():
        kept.hand_over()
    assert counter.count == 1
    kept.release()
    kept.release()
    assert counter.count == 0


def test_a_lease_that_its_new_owner_returned_first_is_not_returned_twice() -> None:
    counter = LeaseCounter()
    other = counter.lease()
    with counter.lease() as lease:
        lease.release()
        lease.hand_over()
    assert counter.count == 1
    other.release()
    assert counter.count == 0


def test_many_threads_may_launch(runner: AsyncRunner) -> None:
    counter, ran = LeaseCounter(), []

    def many() -> None:
        for _ in range(100):
            with counter.lease() as lease:
                runner.launch(lambda: ran.append(counter.count), lease=lease)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    runner.sync()
    assert len(ran) == 400
    assert min(ran) >= 1
    assert counter.count == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_device_work_of_a_task_is_visible_after_sync() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    out = torch.zeros(1 << 20, device=device)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    with AsyncRunner(device=device, timeout_s=WAIT_S) as runner:
        for i in range(20):

            def task() -> None:
                # without the event, the copy below would be early
                torch.cuda._sleep(5_000_000)  # type: ignore[no-untyped-call]
                out.add_(1.0)

            ready.record()
            runner.launch(task, after=ready)
            runner.sync()
            assert bool(out.clone().eq(i + 1).all())

        def fails() -> None:
            torch.cuda._sleep(5_000_000)  # type: ignore[no-untyped-call]
            out.fill_(-1.0)
            raise Boom

        ready.record()
        runner.launch(fails, after=ready)
        with pytest.raises(Boom):
            runner.sync()
        assert bool(out.clone().eq(-1.0).all())

"""TpGroup over real processes: equal results, equal bits, and waits that end."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tp_runtime.broadcast.sockets import process_state
from tp_runtime.errors import ChannelClosed, DeadlineExceeded, PeerLost, TpGroupError
from tp_runtime.group import TpGroup
from tp_runtime.process_group import await_ranks, connect_store
from tp_runtime.ranks import RankInfo
from tp_runtime.shared_memory import MEMORY_NAME
from tp_runtime.testing import run_ranks

CPU = torch.device("cpu")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
}


def make_group(*, shared: bool = True, timeout_s: float = 30.0, tp_size: int = 0) -> TpGroup:
    info = RankInfo.from_env(tp_size=tp_size or None)
    group = TpGroup.create(info, device=CPU, timeout_s=timeout_s, shared_memory=shared)
    assert (group.statistics().shared is not None) == shared
    return group


def signal_file(name: str) -> Path:
    return Path(os.environ["XDG_RUNTIME_DIR"]) / name


def wait_for_file(name: str) -> None:
    deadline = time.monotonic() + 30
    while not signal_file(name).exists():
        assert time.monotonic() < deadline, f"{name} was not written"
        time.sleep(0.005)


def memory_maps() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if MEMORY_NAME in line]


def descriptors() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found


# ---- run on every rank ---------------------------------------------------------------------


def reduce_at_random(seed: int, rounds: int, shared: bool) -> int:
    """Checks each all-reduce against the sum of what all ranks are known to have drawn."""
    group = make_group(shared=shared)
    chooser = random.Random(seed)
    for number in range(rounds):
        dtype = DTYPES[chooser.choice(sorted(DTYPES))]
        shape = [chooser.randint(1, 9) for _ in range(chooser.randint(0, 3))]
        if number % 50 == 7:
            shape = [chooser.randint(1, 700_000)]  # more than one slot
        elif number % 50 == 9:
            shape.append(0)
        drawn = [draw(seed, number, rank, shape, dtype) for rank in range(group.size)]
        mine = drawn[group.rank].clone()
        if number % 5 == 0 and mine.dim() >= 2:
            mine = mine.transpose(0, 1).contiguous().transpose(0, 1)
        got = group.all_reduce(mine)
        assert got is mine
        if shared or dtype == torch.int64:
            wide = torch.float32 if dtype.is_floating_point else dtype
            total = drawn[0].to(wide)
            for addend in drawn[1:]:
                total = total + addend.to(wide)
            torch.testing.assert_close(got, total.to(dtype), rtol=0, atol=0)
        else:
            exact = torch.stack([one.double() for one in drawn]).sum(0)
            torch.testing.assert_close(got.double(), exact, rtol=0.02, atol=0.05)
        if number % 10 == 0:
            everyone = group.all_gather(got)
            assert everyone.shape == (group.size, *shape)
            for other in everyone:
                assert torch.equal(other, everyone[0])
    statistics = group.statistics()
    group.close()
    return statistics.gloo if statistics.shared is None else statistics.shared.operations


def draw(seed: int, number: int, rank: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed * 1_000_003 + number * 101 + rank)
    if dtype == torch.int64:
        return torch.randint(-(2**40), 2**40, shape, generator=source)
    return torch.randn(shape, generator=source).to(dtype)


def gather_and_broadcast(shared: bool) -> None:
    group = make_group(shared=shared)
    for round_ in range(60):
        shape = [(), (3,), (2, 5), (400_000,)][round_ % 4] if round_ < 8 else (round_, 2)
        for dtype in (torch.float32, torch.int32, torch.bool, torch.bfloat16, torch.int64):
            mine = torch.full(shape, group.rank + round_ % 2).to(dtype)
            gathered = group.all_gather(mine)
            expected = torch.arange(group.size) + round_ % 2
            assert gathered.dtype == dtype
            assert gathered.shape == (group.size, *shape)
            for rank in range(group.size):
                assert torch.equal(gathered[rank], torch.full(shape, int(expected[rank])).to(dtype))
            sent = torch.full(shape, 1 if group.rank == 0 else 0).to(dtype)
            assert group.broadcast(sent) is sent
            assert bool((sent == 1).all())
    strided = torch.zeros(4, 6)[:, ::2]
    strided += group.rank + 5
    assert torch.equal(group.broadcast(strided), torch.full((4, 3), 5.0))
    group.close()


def exchange_bytes(shared: bool) -> None:
    group = make_group(shared=shared)
    for body in (b"", b"x", bytes(range(256)) * 3, os.urandom(1) * 3_000_001):
        length = len(body)
        got = group.broadcast_bytes(body if group.rank == 0 else None)
        assert len(got) == length
        assert got.count(got[:1] or b"0") >= min(length, 1)
    assert group.broadcast_bytes(b"root" if group.rank == 0 else b"other") == b"root"
    if group.rank == 0:
        with pytest.raises(TpGroupError, match="must give the bytes"):
            group.broadcast_bytes(None)
    group.close()


def inside_and_outside_inference_mode() -> list[float]:
    group = make_group()
    with torch.inference_mode():
        first = group.all_reduce(torch.ones(7)).sum().item()
    second = group.all_reduce(torch.ones(7)).sum().item()
    group.close()
    return [first, second]


def barrier_keeps_order(shared: bool) -> list[bool]:
    group = make_group(shared=shared)
    seen = []
    for number in range(20):
        if number % group.size == group.rank:
            signal_file(f"b{number}").touch()
        group.barrier()
        seen.append(signal_file(f"b{number}").exists())
    group.close()
    return seen


def two_groups() -> list[object]:
    """Group 1 does all its work while group 0 cannot even form."""
    info = RankInfo.from_env(tp_size=2)
    if info.rank == 1:
        wait_for_file("group-1-is-done")
    group = make_group(tp_size=2)
    total = group.all_reduce(torch.tensor([10.0**info.rank])).item()
    gathered = group.all_gather(torch.tensor([info.rank])).flatten().tolist()
    sent = group.broadcast_bytes(f"from {info.rank}".encode()).decode()
    group.barrier()
    group.close()
    if info.rank == 2:
        signal_file("group-1-is-done").touch()
    return [group.rank, total, gathered, sent]


def one_is_killed(victim: int, shared: bool) -> list[object]:
    group = make_group(shared=shared)
    for _ in range(50):
        group.all_reduce(torch.ones(64))
    if group.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        while True:
            group.all_reduce(torch.ones(64))
    except PeerLost as error:
        first = [type(error).__name__, error.rank]
    seconds = time.monotonic() - started
    with pytest.raises(PeerLost):  # and it stays so
        group.all_reduce(torch.ones(64))
    group.close()
    return [first, seconds]


def one_returns_early(close: bool) -> str:
    group = make_group()
    group.barrier()
    if group.rank == 1:
        if close:
            group.close()
            wait_for_file("seen")  # alive, but no member any more
        return "left"
    with pytest.raises(PeerLost) as caught:
        group.all_reduce(torch.ones(3))
    signal_file("seen").touch()
    assert caught.value.rank == 1
    return caught.value.reason


def fail_wakes(shared: bool) -> str:
    group = make_group(shared=shared)
    group.barrier()
    if group.rank == 1:
        wait_for_file(f"failed-{shared}")
        if shared:
            group.barrier()  # to this one rank 0 had come, too
            with pytest.raises(PeerLost) as lost:
                group.barrier()
            assert lost.value.rank == 0
            return str(lost.value)
        return ""
    timer = threading.Timer(0.2, group.fail, args=(RuntimeError("the watcher says so"),))
    timer.start()
    with pytest.raises(RuntimeError, match="the watcher says so"):
        group.all_reduce(torch.ones(3))
    with pytest.raises(RuntimeError, match="the watcher says so"):
        group.barrier()
    timer.join()
    signal_file(f"failed-{shared}").touch()
    if not shared:  # its all-reduce is under way in gloo until the peer has left
        return ""
    group.close()
    return ""


def a_child_is_forked() -> list[object]:
    """A child of rank 0 uses and leaves the group; the ranks go on."""
    result: list[object] = []
    with make_group(shared=True) as group:
        group.barrier()
        if group.rank == 0:
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                with group:  # its end in the child
                    try:
                        group.all_reduce(torch.ones(3))
                    except TpGroupError as error:
                        os.write(write, str(error).encode())
                os._exit(0)
            os.close(write)
            _, status = os.waitpid(child, 0)
            result = [status, os.read(read, 1000).decode()]
            os.close(read)
        result.append(group.all_reduce(torch.ones(2)).tolist())
        group.barrier()
    return result


def rank_0_is_stopped() -> str:
    """While the ranks meet. On rank 1: what it says of the store that does not answer."""
    info = RankInfo.from_env()
    store = connect_store(info, timeout_s=20)
    if info.tp_rank == 0:
        store.set("pid", str(os.getpid()))
        wait_for_file("connected")
        os.kill(os.getpid(), signal.SIGSTOP)
        return "went on"
    pid = int(store.get("pid"))
    signal_file("connected").touch()
    while process_state(pid) != "stopped":
        time.sleep(0.01)
    try:
        with pytest.raises(TpGroupError) as caught:
            await_ranks(store, info, timeout_s=1)
    finally:
        os.kill(pid, signal.SIGCONT)
    # torch aborts a process that ends while the store answers in a thread
    for thread in threading.enumerate():
        if thread.name == "tp_runtime-arrive":
            thread.join(10)
    return str(caught.value)


def one_is_late(shared: bool) -> str:
    group = make_group(shared=shared, timeout_s=3.0)
    if group.rank == 1:
        wait_for_file(f"late-{shared}")
        return ""
    with pytest.raises(DeadlineExceeded) as caught:
        group.all_reduce(torch.ones(3))
    assert caught.value.rank == (1 if shared else None)
    signal_file(f"late-{shared}").touch()
    return str(caught.value)


def nothing_is_left() -> list[object]:
    before = set(descriptors())
    group = make_group()
    group.all_reduce(torch.ones(100_000))
    during = len(memory_maps())
    group.close()
    group.close()
    with pytest.raises(ChannelClosed):
        group.all_reduce(torch.ones(1))
    with pytest.raises(ChannelClosed):
        group.barrier()
    opened = [one for one in set(descriptors()) - before if "pidfd" in one or "memfd" in one]
    return [during, memory_maps(), opened]


def a_hosts_own_group() -> list[object]:
    dist.init_process_group("gloo")
    pg = dist.group.WORLD
    assert pg is not None
    group = TpGroup.from_process_group(pg)
    assert group.statistics().shared is not None
    first = group.all_reduce(torch.full((3,), 1.0 + group.rank)).tolist()
    sent = group.broadcast_bytes(b"plan" if group.rank == 0 else None).decode()
    group.close()
    after = torch.ones(2)
    dist.all_reduce(after)  # still the host's
    dist.destroy_process_group()
    return [group.rank, group.size, str(group.device), first, sent, after.tolist()]


def beside_a_default_group() -> float:
    """A host's default group over the same store, and a group of ours."""
    dist.init_process_group("gloo")
    group = make_group()
    mine = group.all_reduce(torch.ones(2)).sum().item()
    theirs = torch.ones(2)
    dist.all_reduce(theirs)
    group.close()
    dist.destroy_process_group()
    return mine + theirs.sum().item()


def all_collectives(shared: bool, rounds: int) -> dict[str, object]:
    """One after the other in the same processes, each with a group of its own."""
    gather_and_broadcast(shared)
    exchange_bytes(shared)
    return {
        "operations": [reduce_at_random(seed, rounds, shared) for seed in (1, 2)],
        "barrier": barrier_keeps_order(shared),
        "modes": inside_and_outside_inference_mode(),
        "left": nothing_is_left(),
        "threads": torch.get_num_threads(),
    }


def all_failures() -> list[object]:
    return [
        [fail_wakes(shared) for shared in (True, False)],
        [one_is_late(shared) for shared in (True, False)],
        one_returns_early(True),
        a_child_is_forked(),
    ]


def beside_a_host() -> list[object]:
    return [a_hosts_own_group(), beside_a_default_group(), torch.get_num_threads()]


# ---- tests -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "shared", "rounds"),
    [pytest.param(2, True, 150, marks=pytest.mark.long), (3, True, 60), (2, False, 10)],
)
def test_collectives_are_right_on_every_rank(world_size: int, shared: bool, rounds: int) -> None:
    results = run_ranks(
        all_collectives, world_size, 150, args=(shared, rounds), env={"OMP_NUM_THREADS": "1"}
    )
    # torchrun's 1 is not a wish of the user: the CPUs are shared out
    share = max(1, len(os.sched_getaffinity(0)) // world_size)
    for result in results:
        assert result["operations"] == results[0]["operations"]
        if shared:  # large tensors take several operations each
            assert min(result["operations"]) > rounds
        assert result["barrier"] == [True] * 20
        assert result["modes"] == [float(7 * world_size)] * 2
        assert result["left"] == [1, [], []]
        assert 1 <= result["threads"] <= share


def test_failures_end_every_wait() -> None:
    root, peer = run_ranks(all_failures, 2, 90)
    told, _ = peer[0]
    assert told == "TP rank 0 failed the group: RuntimeError: the watcher says so"
    for message in root[1]:
        assert message.startswith("TP rank 0 waited 3.")
    assert [root[2], peer[2]] == ["it closed the group", "left"]
    status, said, total = root[3]
    assert (status, total, peer[3]) == (0, [2.0, 2.0], [[2.0, 2.0]])
    assert "a forked child may not use the group" in said


def test_a_store_whose_rank_is_stopped_is_an_error_in_time() -> None:
    stopped, said = run_ranks(rank_0_is_stopped, 2, 60)
    assert stopped == "went on"
    assert "the store does not answer: is global rank 0 stopped?" in said


@pytest.mark.long
def test_a_process_that_ended_is_not_waited_for() -> None:
    assert run_ranks(one_returns_early, 2, 60, args=(False,)) == ["its process has ended", "left"]


@pytest.mark.long
def test_a_hosts_process_groups_are_used_and_left_alone() -> None:
    results = run_ranks(beside_a_host, 2, 60, env={"TP_RUNTIME_NUM_THREADS": "3"})
    for rank, (own, beside, threads) in enumerate(results):
        assert own == [rank, 2, "cpu", [3.0, 3.0, 3.0], "plan", [2.0, 2.0]]
        assert beside == 8.0
        assert threads == 3


def test_two_groups_of_one_run_never_meet() -> None:
    assert run_ranks(two_groups, 4, 90) == [
        [0, 11.0, [0, 1], "from 0"],
        [1, 11.0, [0, 1], "from 0"],
        [0, 1100.0, [2, 3], "from 2"],
        [1, 1100.0, [2, 3], "from 2"],
    ]


@pytest.mark.parametrize(
    ("victim", "world_size", "shared"),
    [
        pytest.param(0, 2, True, marks=pytest.mark.long),
        (1, 3, True),
        pytest.param(0, 2, False, marks=pytest.mark.long),
    ],
)
def test_survivors_name_a_killed_rank(victim: int, world_size: int, shared: bool) -> None:
    results = run_ranks(
        one_is_killed, world_size, 90, args=(victim, shared), expect_exit={victim: -9}
    )
    for rank, result in enumerate(results):
        if rank != victim:
            first, seconds = result
            assert first == ["PeerLost", victim]
            assert seconds < 5


@pytest.mark.long
def test_torchruns_own_store_is_used(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import torch, sys\n"
        "from tp_runtime.group import TpGroup\n"
        "from tp_runtime.ranks import RankInfo\n"
        "info = RankInfo.from_env(tp_size=2)\n"
        "group = TpGroup.create(info, device=torch.device('cpu'), timeout_s=60)\n"
        "total = group.all_reduce(torch.tensor([10.0**info.rank])).item()\n"
        "group.close()\n"
        "sys.exit(0 if total == (11.0, 1100.0)[info.tp_group] else 1)\n"
    )
    done = subprocess.run(
        [*TORCHRUN, "--nproc-per-node", "4", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_single_rank_needs_no_peer() -> None:
    group = TpGroup.single(CPU)
    tensor = torch.arange(3.0)
    assert group.all_reduce(tensor) is tensor
    assert group.broadcast(tensor) is tensor
    assert group.all_gather(tensor).tolist() == [[0.0, 1.0, 2.0]]
    assert group.broadcast_bytes(b"x") == b"x"
    group.barrier()
    group.close()


LONELY = replace(
    RankInfo.single(), world_size=2, local_world_size=2, tp_size=2, master_addr="127.0.0.1"
)


def test_a_rank_0_that_never_listens_is_an_error_in_time_and_leaves_no_thread(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    info = replace(LONELY, rank=1, local_rank=1, tp_rank=1, master_port=port)
    threads = threading.active_count()
    with pytest.raises(TpGroupError, match=r"nobody listens there after 0\.3 s.*is global rank 0"):
        connect_store(info, timeout_s=0.3)
    lost = PeerLost("rank 0 is gone", rank=0, reason="died")
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        connect_store(info, timeout_s=60, failure=lambda: lost)
    assert threading.active_count() == threads
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_of_another_program_is_named(rank: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        info = replace(LONELY, rank=rank, local_rank=rank, tp_rank=rank, master_port=port)
        verb = "listen on" if rank == 0 else "reach the store of this run at"
        with pytest.raises(TpGroupError, match=rf"cannot {verb} 127\.0\.0\.1:{port}"):
            connect_store(info, timeout_s=2)


def test_a_peer_that_never_comes_is_an_error_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(TpGroupError, match=r"was not formed within 1 s"):
        TpGroup.create(replace(LONELY, master_port=port), device=CPU, timeout_s=1)
    assert time.monotonic() - started < 20

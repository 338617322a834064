"""Forms the process group of one tensor-parallel group, apart from torch's global one.

``torch.distributed.init_process_group`` needs every rank of the run, and a process has only one
default group. Here the ranks of one TP group meet alone: several groups of one torchrun do not
wait for each other, and a host program keeps its own default group. torchrun's store is used
where it has one (TORCHELASTIC_USE_AGENT_STORE); otherwise global rank 0 listens, as torch does.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, Store, TCPStore

from tp_runtime.errors import TpGroupError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tp_runtime.ranks import RankInfo

__all__ = [
    "Collectives",
    "connect_store",
    "in_place",
    "make_gloo",
    "make_nccl",
    "set_nccl_defaults",
    "start_all_gather",
    "start_all_reduce",
    "start_broadcast",
]


Result = TypeVar("Result")

_ARRIVAL_POLL_S = 0.005
_STORE_GRACE_S = 1.0
_LEAVE_S = 1.0  # for a thread to come out of torch: the end of the process would abort in there
_PROBE_S = 1.0
_PROBE_PAUSE_S = 0.02


class Collectives(Protocol):
    """What is used of a c10d backend, and of a ProcessGroup, which has the same calls."""

    def allreduce(
        self, tensors: list[torch.Tensor], options: dist.AllreduceOptions, /
    ) -> dist.Work | None: ...
    def broadcast(
        self, tensors: list[torch.Tensor], options: dist.BroadcastOptions, /
    ) -> dist.Work | None: ...
    def _allgather_base(
        self, output: torch.Tensor, input_: torch.Tensor, options: AllgatherOptions, /
    ) -> dist.Work | None: ...
    def abort(self) -> None: ...
    def shutdown(self) -> None: ...


def _now(options: Any) -> Any:
    """NCCL then works on the current stream, with no second stream and events between."""
    options.asyncOp = False
    return options


_REDUCE: dist.AllreduceOptions = _now(dist.AllreduceOptions())
_GATHER: AllgatherOptions = _now(AllgatherOptions())
_BROADCAST: dist.BroadcastOptions = _now(dist.BroadcastOptions())
_BROADCAST.rootRank = 0


def start_all_reduce(pg: Collectives, t: torch.Tensor) -> dist.Work | None:
    """Sums t, which is contiguous, in place. None: on the current stream, nothing to wait for."""
    return pg.allreduce([t], _REDUCE)


def start_all_gather(pg: Collectives, out: torch.Tensor, t: torch.Tensor) -> dist.Work | None:
    """The flat t of each rank into the flat out, one after the other."""
    return pg._allgather_base(out, t, _GATHER)


def start_broadcast(pg: Collectives, t: torch.Tensor) -> dist.Work | None:
    """t of rank 0 into that of the others; it is contiguous."""
    return pg.broadcast([t], _BROADCAST)


def in_place(t: torch.Tensor, run: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """t after `run` has changed it, through a copy where t is not contiguous."""
    dense = t.contiguous()
    run(dense)
    return t if dense is t else t.copy_(dense)


_served: dict[tuple[str, int], Store] = {}
"""Stores that this process listens for: other TP groups may need them after ours has closed."""

_formed: Counter[tuple[tuple[str, int], str]] = Counter()
"""How often this process has met each group: a later meeting must not read stale keys."""


def connect_store(
    info: RankInfo,
    *,
    timeout_s: float,
    failure: Callable[[], Exception | None] | None = None,
) -> Store:
    """The key-value store of this rank's TP group in this attempt.

    Raises:
        TpGroupError: nothing, or something else, answers at MASTER_ADDR:MASTER_PORT.
    """
    place = (info.master_addr, info.master_port)
    agent_listens = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    listen = info.rank == 0 and not agent_listens
    store = _served.get(place) if listen else None
    if store is None:
        try:
            store = _open_store(place, listen=listen, timeout_s=timeout_s, failure=failure)
        except (RuntimeError, ValueError) as error:
            what = "listen on" if listen else "reach the store of this run at"
            advice = (
                "another program uses the port: choose a free one with --master-port, "
                "or start with torchrun --standalone"
                if listen
                else "is global rank 0 running, and does no other program listen there?"
            )
            raise TpGroupError(
                f"rank {info.rank} cannot {what} {info.master_addr}:{info.master_port} "
                f"({_first_line(error)}); {advice}"
            ) from error
        if listen:
            _served[place] = store
    members = f"{info.run_id}/{info.restart_count}/{info.tp_size}/{info.tp_group}"
    _formed[place, members] += 1
    return PrefixStore(f"tp_runtime/{members}/{_formed[place, members]}", store)


def _open_store(
    place: tuple[str, int],
    *,
    listen: bool,
    timeout_s: float,
    failure: Callable[[], Exception | None] | None,
) -> Store:
    """Opens a TCPStore in a thread, because it has no deadline for a program that never answers,
    and none of its waits ends when the rank that should answer has died.

    It is begun only when somebody listens: a process that ends while such a thread is inside
    torch is aborted, whatever its own error was.

    Raises:
        RuntimeError: the port is taken, or nobody listens there, or nobody answers.
    """
    if not listen:
        _await_listener(place, timeout_s=timeout_s, failure=failure)

    def connect(_over: threading.Event) -> Store:
        return TCPStore(
            *place,
            is_master=listen,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )

    try:
        # the store's own deadline comes first where it works, and says more
        return _in_thread(
            connect, name="store", timeout_s=timeout_s + _STORE_GRACE_S, failure=failure
        )
    except TimeoutError as error:
        raise RuntimeError(f"no answer within {timeout_s:g} s") from error


def _in_thread(
    work: Callable[[threading.Event], Result],
    *,
    name: str,
    timeout_s: float,
    failure: Callable[[], Exception | None] | None,
) -> Result:
    """What `work` returns, from a thread, since the store answers without a deadline.

    Args:
        work: is given an event that is set when nobody waits for it any more.
        name: of the thread, which a host that ends has to let come out of torch.

    Raises:
        TimeoutError: it has not returned in time. Its thread is left behind.
        Exception: what `work` raises, and what `failure` gives meanwhile.
    """
    outcome: Future[Result] = Future()
    over = threading.Event()

    def run() -> None:
        try:
            outcome.set_result(work(over))
        except Exception as error:  # noqa: BLE001 - raised by who waits
            outcome.set_exception(error)

    # a daemon: where nothing ever answers, it must not keep the process from ending
    thread = threading.Thread(target=run, name=f"tp_runtime-{name}", daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout_s
    try:
        while not wait([outcome], _ARRIVAL_POLL_S).done:
            _raise_failure(failure)
            if time.monotonic() > deadline:
                raise TimeoutError
    finally:
        over.set()
        thread.join(_LEAVE_S)
    return outcome.result()


def _await_listener(
    place: tuple[str, int], *, timeout_s: float, failure: Callable[[], Exception | None] | None
) -> None:
    """Waits until a program takes connections there.

    Raises:
        RuntimeError: none did in time; says what the last try got.
        Exception: what ``failure`` gives.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(place, timeout=_PROBE_S).close()
        except OSError as error:
            _raise_failure(failure)
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"nobody listens there after {timeout_s:g} s: {error}"
                ) from error
            time.sleep(_PROBE_PAUSE_S)
        else:
            return


def _raise_failure(failure: Callable[[], Exception | None] | None) -> None:
    cause = failure() if failure is not None else None
    if cause is not None:
        raise cause


def await_ranks(
    store: Store,
    info: RankInfo,
    *,
    timeout_s: float,
    failure: Callable[[], Exception | None] | None = None,
) -> None:
    """Waits until every rank of the group has come to this point.

    gloo and NCCL cannot be interrupted while they wait for a rank that has died, so they are
    started only when all ranks are there.

    Raises:
        TpGroupError: not all ranks came within ``timeout_s``; names those that did not.
        Exception: what ``failure`` gives.
    """
    keys = [f"arrived/{rank}" for rank in range(info.tp_size)]
    missing = list(range(info.tp_size))
    deadline = time.monotonic() + timeout_s

    def arrive(over: threading.Event) -> None:
        store.set(keys[info.tp_rank], "1")
        while missing and time.monotonic() < deadline and not over.wait(_ARRIVAL_POLL_S):
            missing[:] = [rank for rank in missing if not store.check([keys[rank]])]

    try:
        _in_thread(arrive, name="arrive", timeout_s=timeout_s + _STORE_GRACE_S, failure=failure)
    except TimeoutError as error:
        silent = "the store does not answer: is global rank 0 stopped?"
        raise TpGroupError(_not_formed(info, timeout_s, silent)) from error
    except RuntimeError as error:  # the process that listens is gone
        raise TpGroupError(_not_formed(info, timeout_s, error)) from error
    if missing:
        raise TpGroupError(_not_formed(info, timeout_s, f"TP ranks {missing} did not come"))


def make_gloo(store: Store, info: RankInfo, *, timeout_s: float) -> Collectives:
    """A gloo group over loopback: a TP group never leaves its host.

    Naming the interface also avoids a look-up of the host's name, which may hang or be wrong.

    Raises:
        TpGroupError: not all ranks came within ``timeout_s``.
    """
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack the options
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    try:
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        return cast(
            "Collectives",
            gloo(PrefixStore("gloo", store), info.tp_rank, info.tp_size, options),
        )
    except RuntimeError as error:
        raise TpGroupError(_not_formed(info, timeout_s, error)) from error


def make_nccl(
    store: Store, info: RankInfo, device: torch.device, *, timeout_s: float
) -> Collectives:
    """An NCCL group, connected at once so that a failure shows here and not in a decode step.

    Raises:
        TpGroupError: this torch has no NCCL, or the ranks could not connect.
    """
    set_nccl_defaults()
    if not dist.is_nccl_available():
        raise TpGroupError(
            f"rank {info.rank}: device {device} needs NCCL, which this torch was built without"
        )
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.group_name = f"tp_runtime_{info.tp_group}"
    options.global_ranks_in_group = list(info.tp_ranks)
    try:
        group = nccl(PrefixStore("nccl", store), info.tp_rank, info.tp_size, options)
        group.eager_connect_single_device(device)
    except RuntimeError as error:
        raise TpGroupError(_not_formed(info, timeout_s, error)) from error
    return cast("Collectives", group)


def set_nccl_defaults() -> None:
    """How torch and NCCL should behave unless the user asked for else; before NCCL is first used.

    Multicast over NVLink is off: it needs fabric rights that containers often lack, and then the
    start fails or hangs.
    """
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    # torch's watchdog would end the process at a fault of the device, before the thread that runs
    # the steps has told the other ranks and raised it
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")


def _not_formed(info: RankInfo, timeout_s: float, error: Exception | str) -> str:
    return (
        f"rank {info.rank}: tensor-parallel group {info.tp_group} "
        f"(global ranks {', '.join(map(str, info.tp_ranks))}) was not formed within "
        f"{timeout_s:g} s through {info.master_addr}:{info.master_port} "
        f"({_first_line(error)}); look at the output of the other ranks"
    )


def _first_line(error: Exception | str) -> str:
    return str(error).strip().partition("\n")[0]

"""The rivals of the broadcast benchmark, each as its own users call it.

What is not installed is left out by name. vLLM and SGLang are large; the one file or function
that matters can be taken out of a wheel instead (`pip download --no-deps vllm`).
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from contenders import GIVE_UP_S, Contender, Group, Stamps
from payloads import DICT, LARGE, RAW
from wheels import sglang_function, vllm_module

if TYPE_CHECKING:
    from collections.abc import Callable

C_SOURCE = Path(__file__).with_name("seqpacket_rival.c")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where rivals come from; None = not at hand.

    Args:
        library: the compiled C rival.
        vllm_wheel, sglang_wheel: used where the package is not installed.
    """

    library: str | None = None
    vllm_wheel: str | None = None
    sglang_wheel: str | None = None


class CSocket(Contender):
    """A SEQPACKET socket driven by C alone: what no program on it can beat."""

    payloads = {RAW.name: RAW}  # noqa: RUF012

    def __init__(self, library: str, *, spin: bool) -> None:
        self.name = "C SEQPACKET, spinning" if spin else "C SEQPACKET, blocking"
        self._spin = spin
        self._library = ctypes.CDLL(library)
        self._library.seqpacket_receive.restype = ctypes.c_int64
        self._sockets: list[socket.socket] = []

    def open(self, group: Group) -> None:
        path = group.folder / f"c-{self._spin:d}"
        if group.rank == 0:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(str(path))
                listener.listen(group.ranks)
                group.from_root("listening")
                self._sockets = [listener.accept()[0] for _ in range(group.peers)]
            return
        group.from_root(None)
        self._sockets = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
        self._sockets[0].connect(str(path))

    def timed_sender(self, payload: str, stamps: Stamps) -> Callable[[int, Any], None]:
        numbers = (ctypes.c_int * len(self._sockets))(*(s.fileno() for s in self._sockets))
        send, count = self._library.seqpacket_send, len(self._sockets)
        began, ended = ctypes.c_int64(), ctypes.c_int64()
        begin_at, end_at = ctypes.byref(began), ctypes.byref(ended)

        def timed(index: int, message: Any) -> None:
            problem = send(numbers, count, message, ctypes.c_size_t(len(message)), begin_at, end_at)
            if problem:
                raise OSError(problem, os.strerror(problem))
            stamps.began[index] = began.value
            stamps.ended[index] = ended.value

        return timed

    def receive_many(self, payload: str, first: int, count: int, arrived: memoryview) -> int:
        give_up_ns = time.monotonic_ns() + int(3 * GIVE_UP_S * 1e9)
        wrong: int = self._library.seqpacket_receive(
            self._sockets[0].fileno(),
            int(self._spin),
            ctypes.c_int64(first),
            ctypes.c_int64(count),
            (ctypes.c_int64 * len(arrived)).from_buffer(arrived),
            ctypes.c_int64(give_up_ns),
        )
        if wrong < 0:
            raise OSError(-wrong, os.strerror(-wrong))
        return wrong

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


class VllmQueue(Contender):
    """vLLM's MessageQueue with its defaults: pickle into a shared ring, readers spin."""

    name = "vLLM MessageQueue"
    payloads = {RAW.name: RAW, DICT.name: DICT, LARGE.name: LARGE}  # noqa: RUF012

    def __init__(self, wheel: str | None) -> None:
        self._wheel = wheel
        self._queue: Any = None

    def open(self, group: Group) -> None:
        module = vllm_module(self._wheel, group.folder)
        if group.rank == 0:
            self._queue = module.MessageQueue(n_reader=group.peers, n_local_reader=group.peers)
            group.from_root(self._queue.export_handle())
        else:
            handle = group.from_root(None)
            self._queue = module.MessageQueue.create_from_handle(handle, group.rank - 1)
        self._queue.wait_until_ready()

    def sender(self, payload: str) -> Callable[[Any], None]:
        send: Callable[[Any], None] = self._queue.enqueue
        return send

    def receiver(self, payload: str) -> Callable[[], Any]:
        take = self._queue.dequeue
        return lambda: take(timeout=GIVE_UP_S, indefinite=True)

    def close(self) -> None:
        self._queue = None


class TorchTensor(Contender):
    """gloo broadcast of a tensor whose size everybody knows."""

    name = "gloo tensor"
    payloads = {RAW.name: RAW, LARGE.name: LARGE}  # noqa: RUF012

    def open(self, group: Group) -> None:
        _join_gloo()

    def sender(self, payload: str) -> Callable[[Any], None]:
        import torch
        import torch.distributed as dist

        tensor = torch.empty(len(self.payloads[payload].make(0)), dtype=torch.uint8)
        view = tensor.numpy()

        def send(message: bytes) -> None:
            view[:] = np.frombuffer(message, dtype=np.uint8)
            dist.broadcast(tensor, src=0)

        return send

    def receiver(self, payload: str) -> Callable[[], Any]:
        import torch
        import torch.distributed as dist

        tensor = torch.empty(len(self.payloads[payload].make(0)), dtype=torch.uint8)
        view = tensor.numpy()

        def receive() -> Any:
            dist.broadcast(tensor, src=0)
            return view

        return receive


class TorchObjects(Contender):
    """torch.distributed.broadcast_object_list over gloo."""

    name = "broadcast_object_list"
    payloads = {RAW.name: RAW, DICT.name: DICT}  # noqa: RUF012

    def open(self, group: Group) -> None:
        _join_gloo()

    def sender(self, payload: str) -> Callable[[Any], None]:
        import torch.distributed as dist

        return lambda message: dist.broadcast_object_list([message], src=0)

    def receiver(self, payload: str) -> Callable[[], Any]:
        import torch.distributed as dist

        def receive() -> Any:
            box: list[Any] = [None]
            dist.broadcast_object_list(box, src=0)
            return box[0]

        return receive


class SglangObjects(Contender):
    """SGLang's broadcast_pyobj: pickle, then size and bytes over gloo."""

    name = "SGLang broadcast_pyobj"
    payloads = {RAW.name: RAW, DICT.name: DICT}  # noqa: RUF012

    def __init__(self, wheel: str | None) -> None:
        self._wheel = wheel
        self._call: Any = None
        self._rank = 0

    def open(self, group: Group) -> None:
        _join_gloo()
        self._rank = group.rank
        self._call = sglang_function(self._wheel)

    def sender(self, payload: str) -> Callable[[Any], None]:
        call = self._call
        return lambda message: call([message], 0, None, 0)

    def receiver(self, payload: str) -> Callable[[], Any]:
        call, rank = self._call, self._rank
        return lambda: call([], rank, None, 0)[0]


class ZmqPubSub(Contender):
    """pyzmq PUB/SUB over ipc; the step as MessagePack, by msgspec where it is installed."""

    name = "zmq PUB/SUB"
    payloads = {RAW.name: RAW, DICT.name: DICT, LARGE.name: LARGE}  # noqa: RUF012

    def __init__(self) -> None:
        self._zmq = importlib.import_module("zmq")
        self._context: Any = None
        self._socket: Any = None
        if importlib.util.find_spec("msgspec"):
            msgspec = importlib.import_module("msgspec")
            self._encode, self._decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.decode
        else:
            msgpack = importlib.import_module("msgpack")
            self._encode, self._decode = msgpack.packb, msgpack.unpackb

    def open(self, group: Group) -> None:
        zmq, address = self._zmq, f"ipc://{group.folder}/zmq"
        self._context = zmq.Context()
        if group.rank > 0:
            self._socket = self._context.socket(zmq.SUB)
            self._socket.setsockopt(zmq.RCVHWM, 0)
            self._socket.setsockopt(zmq.RCVTIMEO, int(GIVE_UP_S * 1000))
            self._socket.setsockopt(zmq.SUBSCRIBE, b"")
            self._socket.connect(address)
            # a subscription takes effect some time later: messages before that are lost
            self._socket.recv()
            group.hub[0].send("subscribed")
            while self._socket.recv() != b"start":
                pass
            return
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(address)
        waiting = list(group.hub)
        while waiting:
            self._socket.send(b"probe")
            time.sleep(0.01)
            waiting = [peer for peer in waiting if not peer.poll()]
        for peer in group.hub:
            peer.recv()
        self._socket.send(b"start")

    def sender(self, payload: str) -> Callable[[Any], None]:
        send, encode = self._socket.send, self._encode
        if payload == DICT.name:
            return lambda message: send(encode(message))
        return lambda message: send(message)

    def receiver(self, payload: str) -> Callable[[], Any]:
        take, decode = self._socket.recv, self._decode
        if payload == DICT.name:
            return lambda: decode(take())
        return lambda: take()

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


class Pipes(Contender):
    """A multiprocessing pipe to every peer; send(obj) for the step, send_bytes for bytes."""

    name = "multiprocessing.Pipe"
    payloads = {RAW.name: RAW, DICT.name: DICT, LARGE.name: LARGE}  # noqa: RUF012

    def __init__(self) -> None:
        self._pipes: list[Any] = []

    def open(self, group: Group) -> None:
        self._pipes = group.connect("pipe")

    def sender(self, payload: str) -> Callable[[Any], None]:
        calls = [pipe.send if payload == DICT.name else pipe.send_bytes for pipe in self._pipes]

        def send(message: Any) -> None:
            for call in calls:
                call(message)

        return send

    def receiver(self, payload: str) -> Callable[[], Any]:
        pipe = self._pipes[0]
        take: Callable[[], Any] = pipe.recv if payload == DICT.name else pipe.recv_bytes
        return take

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()


def make_rivals(sources: Sources) -> tuple[list[Contender], dict[str, str]]:
    """All that can be had on this machine; and by name why the others cannot.

    Called on every rank with the same sources, so every rank has the same ones.
    """
    rivals: list[Contender] = []
    skipped: dict[str, str] = {}
    has_torch = importlib.util.find_spec("torch") is not None
    has_zmq = importlib.util.find_spec("zmq") is not None
    if sources.library is not None:
        rivals += [CSocket(sources.library, spin=True), CSocket(sources.library, spin=False)]
    else:
        skipped |= dict.fromkeys(
            ("C SEQPACKET, spinning", "C SEQPACKET, blocking"), "no C compiler"
        )
    if not (sources.vllm_wheel or importlib.util.find_spec("vllm")):
        skipped[VllmQueue.name] = "not installed (pip install vllm, or --vllm-wheel FILE)"
    elif not (has_torch and has_zmq):
        skipped[VllmQueue.name] = "needs torch and pyzmq, not installed"
    else:
        rivals.append(VllmQueue(sources.vllm_wheel))
    if has_zmq:
        rivals.append(ZmqPubSub())
    else:
        skipped[ZmqPubSub.name] = "not installed (pip install pyzmq)"
    rivals.append(Pipes())
    if has_torch:
        rivals += [TorchTensor(), TorchObjects()]
    else:
        skipped |= dict.fromkeys((TorchTensor.name, TorchObjects.name), "torch is not installed")
    if not (sources.sglang_wheel or importlib.util.find_spec("sglang")):
        skipped[SglangObjects.name] = "not installed (pip install sglang, or --sglang-wheel FILE)"
    elif has_torch:
        rivals.append(SglangObjects(sources.sglang_wheel))
    else:
        skipped[SglangObjects.name] = "torch is not installed"
    return rivals, skipped


def compile_library(folder: Path) -> str | None:
    """Build the C rival; None where there is no compiler.

    Raises:
        RuntimeError: there is one, and it refuses the file.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    library = folder / "seqpacket_rival.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(C_SOURCE)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if built.returncode:
        raise RuntimeError(f"{' '.join(command)}: {built.stderr.strip()}")
    return str(library)


def versions(sources: Sources) -> dict[str, str]:
    """Of every package that takes part, installed or from a wheel."""
    found = {}
    for name in ("vllm", "sglang", "pyzmq", "msgspec", "torch", "numpy", "msgpack"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    for wheel in (sources.vllm_wheel, sources.sglang_wheel):
        if wheel is not None:
            name, version = Path(wheel).name.split("-")[:2]
            found.setdefault(name, f"{version}, from its wheel")
    return found


def _join_gloo() -> None:
    """The gloo group of all ranks, which several contenders share."""
    import datetime

    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=GIVE_UP_S))

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tp_runtime.errors import ProtocolError
from tp_runtime.hints import Place, ShapeHints, TensorHint, broadcast_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

WAIT_S = 30.0
CPU = torch.device("cpu")


class Wire:
    """What two or more ranks of this process share."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.value: Any = None


class FakeGroup:
    device = CPU

    def __init__(self, rank: int, size: int, wire: Wire) -> None:
        self.rank, self.size, self._wire = rank, size, wire
        self.broadcasts: list[tuple[torch.dtype, int]] = []

    def _share(self, value: Any) -> Any:
        if self.rank == 0:
            self._wire.value = value
        self._wire.barrier.wait(WAIT_S)
        got = self._wire.value
        self._wire.barrier.wait(WAIT_S)
        return got

    def broadcast(self, t: Tensor) -> Tensor:
        assert t.is_contiguous()
        self.broadcasts.append((t.dtype, t.numel()))
        sent = self._share(t)
        assert sent.shape == t.shape
        return t.copy_(sent) if self.rank else t

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        got: bytes = self._share(data)
        return got


class FakeChannel:
    def __init__(self, *messages: Any) -> None:
        self.messages = deque(messages)
        self.sent = threading.Semaphore(len(messages))

    def publish(self, message: Any) -> None:
        self.messages.append(message)
        self.sent.release()

    def receive(self) -> Any:
        assert self.sent.acquire(timeout=WAIT_S)
        return self.messages.popleft()


def on_ranks(size: int, run: Callable[[FakeGroup], Any]) -> list[Any]:
    wire = Wire(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, FakeGroup(rank, size, wire)) for rank in range(size)]
        return [future.result(WAIT_S) for future in futures]


def samples() -> dict[str, Tensor]:
    """Every dtype, odd sizes, a scalar, and layouts that are not contiguous."""
    g = torch.Generator().manual_seed(0)
    return {
        "bool": torch.tensor([True, False, True]),
        "f32": torch.randn(3, 5, generator=g),
        "u8": torch.arange(7, dtype=torch.uint8),
        "f64": torch.randn(2, generator=g).double(),
        "bf16": torch.randn(5, 3, generator=g).bfloat16(),
        "f16": torch.randn(1, 1, 3, generator=g).half(),
        "i64": torch.tensor([-(2**63), 2**63 - 1]),
        "i32": torch.arange(3, dtype=torch.int32),
        "i16": torch.tensor([-5], dtype=torch.int16),
        "i8": torch.tensor([-128, 127], dtype=torch.int8),
        "f8": torch.randn(9, generator=g).to(torch.float8_e4m3fn),
        "f8b": torch.randn(9, generator=g).to(torch.float8_e5m2),
        "scalar": torch.tensor(3.5),
        "transposed": torch.randn(4, 6, generator=g).t(),
        "strided": torch.arange(20)[::3],
        "expanded": torch.arange(3).expand(4, 3),
    }


def same(a: Tensor, b: Tensor) -> bool:
    raw = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw[0], raw[1])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("inline_bytes", [0, 40, 64 * 1024])
def test_every_rank_gets_the_same_tensors(size: int, inline_bytes: int) -> None:
    given = samples()

    def rank(group: FakeGroup) -> dict[str, Tensor]:
        mine = given if group.rank == 0 else None
        got = broadcast_tensors(mine, group=group, inline_bytes=inline_bytes)
        assert len(group.broadcasts) == (inline_bytes < 1000)  # one collective, or none
        assert all(dtype is torch.uint8 and n % 16 == 0 for dtype, n in group.broadcasts)
        return got

    results = on_ranks(size, rank)
    assert all(results[0][name] is given[name] for name in given)
    for got in results[1:]:
        assert list(got) == list(given)
        assert all(same(got[name], given[name]) for name in given)
        assert all(got[name].is_contiguous() for name in given)


def test_hints_go_by_the_channel_when_there_is_one() -> None:
    channel, given = FakeChannel(), {"x": torch.arange(6).view(2, 3), "y": torch.ones(3)}

    def rank(group: FakeGroup) -> dict[str, Tensor]:
        mine = given if group.rank == 0 else None
        got = broadcast_tensors(mine, group=group, channel=channel, row_multiples={"x": 2})
        assert group.broadcasts == []
        return got

    peer = on_ranks(2, rank)[1]
    assert torch.equal(peer["x"], given["x"])
    peer["x"].fill_(0)  # what came by the message is writable too
    assert float(peer["y"].sum()) == 3.0
    assert not channel.messages


def test_nothing_to_send_is_an_empty_message_and_no_collective() -> None:
    def rank(group: FakeGroup) -> dict[str, Tensor]:
        got = broadcast_tensors({} if group.rank == 0 else None, group=group)
        assert group.broadcasts == []
        return got

    assert on_ranks(2, rank) == [{}, {}]


def test_one_rank_keeps_its_tensors_and_sends_nothing() -> None:
    given = {"x": torch.ones(2)}
    got = broadcast_tensors(given, group=FakeGroup(0, 1, Wire(1)), channel=FakeChannel())
    assert got["x"] is given["x"]
    with pytest.raises(ValueError, match="no rows"):
        broadcast_tensors({"x": torch.ones(0, 3)}, group=FakeGroup(0, 1, Wire(1)))


def test_only_rank_0_passes_tensors() -> None:
    with pytest.raises(ValueError, match="rank 0: expected the tensors"):
        broadcast_tensors(None, group=FakeGroup(0, 2, Wire(2)))
    with pytest.raises(ValueError, match="rank 1: only rank 0"):
        broadcast_tensors({}, group=FakeGroup(1, 2, Wire(2)))


@pytest.mark.parametrize(
    ("named", "multiples", "message"),
    [
        ({"a": torch.ones(0, 4)}, {}, r"tensor 'a': no rows .*\(0, 4\)"),
        ({"a": torch.ones(4, 0)}, {}, "tensor 'a': no rows or no columns"),
        ({"a": torch.ones(5, 2)}, {"a": 3}, "'a': shape .* no multiple of 3 rows"),
        ({"a": torch.tensor(1.0)}, {"a": 2}, "no multiple of 2 rows"),
        ({"a": torch.ones(2)}, {"a": 0}, "row_multiple must be at least 1"),
        ({"a": torch.ones(2)}, {"b": 2}, r"not given: \['b'\]"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, {}, "dtype torch.complex64"),
        ({"a": torch.ones(2, device="meta")}, {}, "expected it on cpu or cpu, got meta"),
        ({"a": torch.ones([1] * 17)}, {}, "17 dimensions"),
    ],
)
def test_rank_0_refuses_before_it_sends_anything(
    named: dict[str, Tensor], multiples: dict[str, int], message: str
) -> None:
    channel = FakeChannel()
    with pytest.raises(ValueError, match=message):
        broadcast_tensors(
            named, group=FakeGroup(0, 2, Wire(2)), channel=channel, row_multiples=multiples
        )
    assert not channel.messages


def test_hints_survive_the_wire() -> None:
    hints = ShapeHints.of(samples(), device=CPU, row_multiples={"f32": 3}, inline_bytes=50)
    ints = hints.to_ints()
    assert ints.dtype == np.int64
    assert ShapeHints.from_ints([name for name, _ in hints.tensors], ints.tolist()) == hints
    assert dict(hints.tensors)["f32"].row_multiple == 3
    assert {hint.place for _, hint in hints.tensors} == {Place.DEVICE, Place.CPU_INLINE}


def test_tensors_lie_at_16_byte_boundaries() -> None:
    def hint(n: int, place: Place = Place.DEVICE) -> TensorHint:
        return TensorHint(shape=(n,), dtype=torch.uint8, place=place)

    hints = ShapeHints(
        tensors=(("a", hint(1)), ("b", hint(16)), ("c", hint(9, Place.CPU)), ("d", hint(17)))
    )
    assert hints.offsets(Place.DEVICE) == ({"a": 0, "b": 16, "d": 32}, 64)
    assert hints.offsets(Place.CPU) == ({"c": 0}, 16)
    assert hints.offsets(Place.CPU_INLINE) == ({}, 0)


def test_large_cpu_tensors_of_a_gpu_group_travel_apart_from_device_tensors() -> None:
    gpu = torch.device("cuda", 0)
    named = {"small": torch.ones(4), "large": torch.ones(100)}
    hints = dict(ShapeHints.of(named, device=gpu, inline_bytes=100).tensors)
    assert hints["small"].place is Place.CPU_INLINE
    assert hints["large"].place is Place.CPU


def test_names_must_differ() -> None:
    hint = TensorHint(shape=(1,), dtype=torch.uint8, place=Place.DEVICE)
    with pytest.raises(ValueError, match="names must differ"):
        ShapeHints(tensors=(("a", hint), ("a", hint)))


def message(**changes: Any) -> dict[str, Any]:
    """A good message that tells of x, float32 [2, 3] in the packed broadcast, with changes."""
    base = {
        "kind": "tensors",
        "version": 1,
        "names": ["x"],
        "hints": np.array([0, 0, 1, 2, 2, 3]),
        "inline": b"",
    }
    return base | changes


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"kind": "step"}, "got 'step'; do all ranks"),
        (None, "NoneType"),
        ([1], "list"),
        (message(version=2), "version 1"),
        (message(names="x"), "wrong types"),
        (message(names=[1]), "wrong types"),
        (message(hints=None), "wrong types"),
        (message(hints=[0, 0, 1, 2, 2, 3.0]), "wrong types"),
        (message(hints=[0, 0, 1, 2, 2, True]), "wrong types"),
        (message(inline="x"), "wrong types"),
        (message(hints=np.array([0, 0, 1, 2, 2])), "2 dimensions"),
        (message(hints=np.array([0, 0, 1])), "cannot be used"),
        (message(hints=np.array([0, 0, 1, 2, 2, 3, 4])), "1 integers too many"),
        (message(hints=np.array([99, 0, 1, 2, 2, 3])), "dtype 99"),
        (message(hints=np.array([-1, 0, 1, 2, 2, 3])), "dtype -1"),
        (message(hints=np.array([0, 7, 1, 2, 2, 3])), "7 is not a valid Place"),
        (message(hints=np.array([0, 0, 1, -1, 2, 3])), "-1 dimensions"),
        (message(hints=np.array([0, 0, 1, 2, -2, 3])), "negative dimension"),
        (message(hints=np.array([0, 0, 1, 2, 0, 3])), "no rows"),
        (message(hints=np.array([0, 0, 4, 2, 2, 3])), "no multiple of 4 rows"),
        (message(hints=np.array([0, 0, 0, 2, 2, 3])), "at least 1"),
        (message(hints=np.array([0, 0, 1, 2, 2**62, 2**62])), "larger than memory"),
        (message(names=["x", "x"], hints=np.array([0, 0, 1, 2, 2, 3] * 2)), "names must differ"),
        (message(inline=b"1234"), "describe 0 bytes of CPU tensors, but 4 came"),
        (message(hints=np.array([0, 2, 1, 2, 2, 3]), inline=b"123"), "24 bytes .* but 3 came"),
    ],
)
def test_a_peer_refuses_a_bad_message_before_it_allocates(bad: Any, reason: str) -> None:
    group = FakeGroup(1, 2, Wire(2))
    with pytest.raises(ProtocolError, match=reason):
        broadcast_tensors(None, group=group, channel=FakeChannel(bad))
    assert group.broadcasts == []


def test_bytes_that_are_no_message_are_refused() -> None:
    def rank(group: FakeGroup) -> str:
        if group.rank == 0:
            group.broadcast_bytes(b"\xc1 not msgpack")
            return ""
        with pytest.raises(ProtocolError, match="bytes of something else") as caught:
            broadcast_tensors(None, group=group)
        return str(caught.value)

    assert "rank 1" in on_ranks(2, rank)[1]

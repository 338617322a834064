"""Either all ranks map each other's memory or none: with a driver that is a dictionary."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch

from tp_runtime import peer_memory
from tp_runtime.cuda_driver import HANDLE_BYTES
from tp_runtime.errors import TpGroupError
from tp_runtime.peer_memory import PeerMemory

NBYTES = 4096
CPU = torch.device("cpu")


class Board:
    """All-gather of rows between threads."""

    def __init__(self, size: int) -> None:
        self._rows: dict[int, torch.Tensor] = {}
        self._barrier = threading.Barrier(size, timeout=20)

    def exchange(self, rank: int, row: torch.Tensor) -> torch.Tensor:
        self._rows[rank] = row
        self._barrier.wait()
        rows = torch.stack([self._rows[r] for r in sorted(self._rows)])
        self._barrier.wait()
        return rows


@dataclass
class FakeDriver:
    """One process's view of devices whose memory is bytearrays."""

    rank: int
    world: dict[int, bytearray]
    fails: str = ""
    mapped: dict[int, int] = field(default_factory=dict)

    def _may(self, call: str) -> None:
        if self.fails == call:
            raise TpGroupError(f"{call} failed: peer access is not supported (error 217)")

    def allocate(self, nbytes: int) -> int:
        self._may("allocate")
        address = (self.rank + 1) << 20
        self.world[address] = bytearray(nbytes)
        self.mapped[address] = address
        return address

    def fill(self, address: int, words: int, value: int) -> None:
        self.world[address][: 4 * words] = value.to_bytes(4, "little", signed=True) * words

    def export(self, address: int) -> bytes:
        return address.to_bytes(8, "little") + b"\xff" * (HANDLE_BYTES - 8)

    def map(self, handle: bytes) -> int:
        self._may("map")
        address = int.from_bytes(handle[:8], "little")
        here = address + (self.rank + 1 << 40)
        self.mapped[here] = address
        return here

    def unmap(self, address: int) -> None:
        del self.mapped[address]

    def _find(self, address: int) -> tuple[bytearray, int]:
        for base, real in self.mapped.items():
            if 0 <= address - base < 1 << 20:
                return self.world[real], address - base
        raise AssertionError(f"{address:#x} is not mapped")

    def write(self, address: int, data: bytes) -> None:
        if self.fails == "lose":
            return
        memory, at = self._find(address)
        memory[at : at + len(data)] = data

    def read(self, address: int, nbytes: int) -> bytes:
        memory, at = self._find(address)
        return bytes(memory[at : at + nbytes])


def open_all(
    size: int, fails: dict[int, str], refusals: dict[int, str] | None = None
) -> tuple[list[PeerMemory | None], list[FakeDriver]]:
    peer_memory._spare.clear()
    board, world = Board(size), dict[int, bytearray]()
    drivers = [FakeDriver(rank, world, fails.get(rank, "")) for rank in range(size)]

    def one(rank: int) -> PeerMemory | None:
        return PeerMemory.open(
            lambda row: board.exchange(rank, row),
            rank=rank,
            size=size,
            device=CPU,
            nbytes=NBYTES,
            value=-1,
            refusal=(refusals or {}).get(rank),
            driver=drivers[rank],
        )

    with ThreadPoolExecutor(size) as pool:
        opened = list(pool.map(one, range(size)))
    peer_memory._spare.clear()
    return opened, drivers


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_reaches_every_other(size: int) -> None:
    opened, drivers = open_all(size, {})
    for rank, memory in enumerate(opened):
        assert memory is not None
        assert memory.addresses[rank] == (rank + 1) << 20
        assert len(set(memory.addresses)) == size
        assert drivers[rank].read(memory.addresses[rank], NBYTES) == b"\xff" * NBYTES
    for rank, memory in enumerate(opened):
        assert memory is not None
        for peer in range(size):
            drivers[rank].write(memory.addresses[peer] + 8 * rank, bytes([rank] * 8))
    for rank, memory in enumerate(opened):
        assert memory is not None
        seen = drivers[rank].read(memory.addresses[rank], 8 * size)
        assert seen == b"".join(bytes([peer] * 8) for peer in range(size))
        memory.close()
        assert list(drivers[rank].mapped) == [memory.addresses[rank]]


@pytest.mark.parametrize("call", ["allocate", "map", "lose"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_one_rank_that_cannot_makes_all_go_without(
    call: str, culprit: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    opened, drivers = open_all(2, {culprit: call})
    assert opened == [None, None]
    for rank, driver in enumerate(drivers):
        assert set(driver.mapped) <= {(rank + 1) << 20}
    assert "TP rank 0 shares no device memory" in caplog.text
    assert "TP rank 1 shares no device memory" in caplog.text
    if call != "lose":
        assert "peer access is not supported" in caplog.text


def test_a_refusal_is_every_ranks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    opened, drivers = open_all(2, {}, {1: "no Triton here"})
    assert opened == [None, None]
    assert "TP rank 1 shares no device memory: no Triton here" in caplog.text
    assert not drivers[1].mapped


def test_memory_of_a_closed_group_is_used_again() -> None:
    peer_memory._spare.clear()
    world = dict[int, bytearray]()
    driver = FakeDriver(0, world)
    address = peer_memory._take(driver, CPU, 512)
    peer_memory._give_back(driver, CPU, 512 - 256, 0, address, [address])
    driver.fails = "allocate"
    assert peer_memory._take(driver, CPU, 512) == address

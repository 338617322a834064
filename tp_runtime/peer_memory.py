"""Device memory of each rank, mapped into every other rank of one host.

Every rank allocates the same number of bytes, ships its handle (CUDA inter-process memory) to the
others and maps theirs. Either all ranks end with a mapping that was tried, or none has one: a rank
that cannot (no access between the devices, no driver) makes all of them go without.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tp_runtime.cuda_driver import HANDLE_BYTES, CudaDriver, Driver
from tp_runtime.errors import TpGroupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Exchange = Callable[[torch.Tensor], torch.Tensor]

__all__ = ["PeerMemory"]

log = logging.getLogger(__name__)

_HANDLE_WORDS = HANDLE_BYTES // 8
_PROBE_BYTES = 256  # at the end of the memory; 8 bytes for each sender
_MOST_RANKS = _PROBE_BYTES // 8

_spare: dict[tuple[int, int], list[int]] = {}
"""Memory of closed groups, by device and size. It is not freed, as a peer may still map it."""


@dataclass(frozen=True, kw_only=True)
class PeerMemory:
    """Made by :meth:`open`.

    Attributes:
        rank: TP rank of this process.
        device: where its own memory lies.
        nbytes: that each rank may use.
        addresses: of the memory of each rank, by TP rank, valid on `device` in this process.
    """

    rank: int
    device: torch.device
    nbytes: int
    addresses: tuple[int, ...]
    driver: Driver

    @classmethod
    def open(
        cls,
        exchange: Exchange,
        *,
        rank: int,
        size: int,
        device: torch.device,
        nbytes: int,
        value: int,
        refusal: str | None = None,
        driver: Driver | None = None,
    ) -> PeerMemory | None:
        """Maps the memory on all ranks, or on none of them.

        Args:
            exchange: all-gather of an int64 row [n] to [size, n]; called three times on every rank.
            rank: TP rank of this process.
            size: ranks in the group; they run on one host.
            device: of this rank.
            nbytes: a multiple of 256, equal on all ranks.
            value: of every 32-bit word when this returns.
            refusal: why this rank cannot use the memory even if it is mapped.
            driver: CUDA's own if None.

        Returns:
            None on every rank if any rank cannot map the memory; each logs its own reason.
        """
        problem = refusal
        own, addresses = 0, [0] * size
        handle = bytes(HANDLE_BYTES)
        with _current(device):
            try:
                if problem is not None:
                    raise TpGroupError(problem)
                if size > _MOST_RANKS:
                    raise TpGroupError(f"{size} ranks, at most {_MOST_RANKS} can share memory")
                driver = driver or CudaDriver()
                own = _take(driver, device, nbytes + _PROBE_BYTES)
                driver.fill(own, (nbytes + _PROBE_BYTES) // 4, value)
                handle = driver.export(own)
            except TpGroupError as error:
                problem = str(error)
            rows = exchange(_row(handle, problem is None))
            if bool(rows[:, 0].all()) and driver is not None:
                try:
                    for peer in range(size):
                        addresses[peer] = own if peer == rank else driver.map(_handle(rows[peer]))
                        driver.write(addresses[peer] + nbytes + 8 * rank, _word(rank))
                except TpGroupError as error:
                    problem = str(error)
            elif problem is None:
                problem = "another rank has no memory to share"
            # every rank has written what it could
            reached = bool(exchange(torch.tensor([int(problem is None)])).all())
            if reached and driver is not None:
                got = driver.read(own + nbytes, 8 * size)
                if got != b"".join(map(_word, range(size))):
                    problem = f"what the peers wrote did not arrive: {got.hex()}"
            arrived = exchange(torch.tensor([int(reached and problem is None)]))
            if driver is not None and bool(arrived.all()):
                return cls(
                    rank=rank,
                    device=device,
                    nbytes=nbytes,
                    addresses=tuple(addresses),
                    driver=driver,
                )
            why = problem or "a peer's fault"
            log.info("TP rank %d shares no device memory: %s", rank, why)
            if driver is not None:
                _give_back(driver, device, nbytes, rank, own, addresses)
            return None

    def close(self) -> None:
        """Ends the mappings. The work that uses them must be done. Not to be called twice."""
        own = self.addresses[self.rank]
        with _current(self.device):
            _give_back(self.driver, self.device, self.nbytes, self.rank, own, list(self.addresses))


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Makes the device current for the driver."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        yield


def _take(driver: Driver, device: torch.device, nbytes: int) -> int:
    spare = _spare.get((device.index or 0, nbytes))
    return spare.pop() if spare else driver.allocate(nbytes)


def _give_back(
    driver: Driver, device: torch.device, nbytes: int, rank: int, own: int, addresses: list[int]
) -> None:
    for peer, address in enumerate(addresses):
        if peer != rank and address:
            with suppress(TpGroupError):  # the peer has ended, and its memory with it
                driver.unmap(address)
    if own:
        _spare.setdefault((device.index or 0, nbytes + _PROBE_BYTES), []).append(own)


def _row(handle: bytes, able: bool) -> torch.Tensor:
    words = [
        int.from_bytes(handle[at : at + 8], "little", signed=True)
        for at in range(0, HANDLE_BYTES, 8)
    ]
    return torch.tensor([int(able), *words])


def _handle(row: torch.Tensor) -> bytes:
    words = row.tolist()[1 : 1 + _HANDLE_WORDS]
    return b"".join(int(word).to_bytes(8, "little", signed=True) for word in words)


def _word(rank: int) -> bytes:
    return (0x5A00 + rank).to_bytes(8, "little")

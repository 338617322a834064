"""Sums over ranks through memory that the GPUs of one host map from each other.

A decode step sums a few hidden rows many times, which is a matter of latency. One kernel does it:
see `peer_reduce_kernel` for the protocol. It works in a CUDA graph and without one alike, always on
one stream, and every rank must launch the same ones in the same order. Every rank gets the same
bits: float32 sums in rank order, rounded once.

A rank whose peer does not come gives up after the limit, or as soon as it is told to
(`PeerReduce.stop`): its kernels then end with numbers that mean nothing, and `PeerReduce.gave_up`
is true. Whoever takes results off the device has to ask first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from tp_runtime.ops.kernels import dependent_launch, power_of_two, runs_kernels
from tp_runtime.reduce_plan import PROGRAM_BYTES, REDUCED_BYTES

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PEER_DTYPES", "WORKSPACE_MARK", "PeerAddresses", "PeerReduce", "workspace_bytes"]

PEER_DTYPES: Final = frozenset({torch.bfloat16, torch.float16, torch.float32})
WORKSPACE_MARK: Final = -1
"""What every 32-bit word of the memory holds before the first sum."""

_PIECE = 16  # bytes of a thread
_SLOT_BYTES = REDUCED_BYTES[-1]
_STOP, _LIMIT_NS, _GAVE_UP = 0, 1, 2  # words of the page that the host and the kernels share
_PAGE_WORDS = 16
_TRIAL_NUMBERS = 8192
_TRIALS = 5

_pages: list[torch.Tensor] = []
"""Pages of every group so far: a kernel that still waits may read one after its group is gone."""


class PeerAddresses(Protocol):
    """What is needed of `PeerMemory`: the memory of each rank, as mapped in this process."""

    @property
    def rank(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def addresses(self) -> tuple[int, ...]: ...


def workspace_bytes(ranks: int) -> int:
    """Bytes of memory of each rank: for each size of program two halves of a slot per sender."""
    return len(PROGRAM_BYTES) * 2 * ranks * _SLOT_BYTES


def channel_offset(program_bytes: int, ranks: int) -> int:
    """Where the part of the memory begins that programs of this size use."""
    return PROGRAM_BYTES.index(program_bytes) * 2 * ranks * _SLOT_BYTES


class PeerReduce:
    """One rank's end. All ranks make it before any of them uses it.

    Args:
        memory: `workspace_bytes` of each rank, all `WORKSPACE_MARK`.
        timeout_s: how long a sum waits for a peer.
    """

    def __init__(self, memory: PeerAddresses, *, timeout_s: float) -> None:
        self._rank = memory.rank
        self._ranks = len(memory.addresses)
        device = memory.device
        self._pdl = dependent_launch(device)
        # the kernels see this page of the host at the same address
        self._page = torch.zeros(_PAGE_WORDS, dtype=torch.int64, pin_memory=True)
        _pages.append(self._page)
        self._words = self._page.numpy()
        self.set_timeout(timeout_s)
        # behind them two words in which the threads that wait tell each other what stands there
        places = [*memory.addresses, self._page.data_ptr(), 0, 0]
        self._places = torch.tensor(places, dtype=torch.int64, device=device)
        most = _SLOT_BYTES // PROGRAM_BYTES[0]
        counts = torch.zeros(len(PROGRAM_BYTES), most, dtype=torch.int32, device=device)
        self._launches = dict(zip(PROGRAM_BYTES, counts, strict=True))
        torch.cuda.synchronize(device)

    @staticmethod
    def serves(device: torch.device) -> bool:
        """Whether the kernel runs on a device."""
        return runs_kernels(device)

    @staticmethod
    def takes(t: Tensor) -> bool:
        """Whether a tensor has a dtype, a size and a place that the kernel can sum."""
        return (
            t.dtype in PEER_DTYPES
            and 0 < t.nbytes <= _SLOT_BYTES
            and t.nbytes % _PIECE == 0
            and t.data_ptr() % _PIECE == 0
            and t.is_contiguous()
        )

    @staticmethod
    def takes_rows(t: Tensor) -> bool:
        """Whether `all_reduce_norm` can sum and normalise the rows of a tensor."""
        return PeerReduce.takes(t) and _row_bytes(t) is not None

    def all_reduce(self, t: Tensor, *, program_bytes: int) -> Tensor:
        """Sums t over the ranks, in place, and returns it.

        The device of t is the current one.

        Args:
            t: what `takes` accepts; the same shape and dtype on all ranks.
            program_bytes: one of `PROGRAM_BYTES`, the same on all ranks.

        Raises: ValueError: not such a tensor.
        """
        self._check(t)
        block = program_bytes // _PIECE
        pieces = t.nbytes // _PIECE
        self._launch(t, t, t, t, pieces, block, 0.0, program_bytes, -(-pieces // block), norm=False)
        return t

    def all_reduce_norm(self, t: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Sums t over the ranks, in place, and normalises the sum in the same launch.

        Args:
            t: [rows, width], what `takes_rows` accepts: rows of 16 to 16384 bytes, multiples of 16.
            weight: [width], dtype of t.
            eps: added to the mean square.

        Returns:
            t, and rms_norm(t, weight, eps) as `ops.norm.rms_norm` defines it.

        Raises: ValueError: not such tensors.
        """
        self._check(t)
        piece_count = t.shape[-1] * t.element_size() // _PIECE
        program_bytes = _row_bytes(t)
        if program_bytes is None or weight.shape != t.shape[1:] or weight.dtype != t.dtype:
            raise ValueError(
                f"expected rows of at most {PROGRAM_BYTES[-1]} bytes, a multiple of {_PIECE}, and "
                f"a weight for them, got {t.dtype} {list(t.shape)} and {weight.dtype} "
                f"{list(weight.shape)}"
            )
        rows = t.shape[0]
        normed = torch.empty_like(t)
        pieces = rows * piece_count
        self._launch(t, t, weight, normed, pieces, piece_count, eps, program_bytes, rows, norm=True)
        return t, normed

    def try_out(self, *, program_bytes: int) -> str | None:
        """Sums known numbers a few times; all ranks call it together, before anything else.

        Returns:
            What went wrong here; None if all is well. Other ranks may still have failed.
        """
        device = self._places.device
        numbers = torch.arange(_TRIAL_NUMBERS, device=device) % 61
        expected = numbers * self._ranks + self._ranks * (self._ranks - 1) // 2
        try:
            for turn in range(1, _TRIALS + 1):
                t = ((numbers + self._rank) * turn).to(torch.float32)
                self.all_reduce(t, program_bytes=program_bytes)
                wrong = int((t != expected * turn).sum())
                if self.gave_up:
                    return "a peer's numbers did not arrive"
                if wrong:
                    return f"{wrong} of {_TRIAL_NUMBERS} sums came out wrong"
        except Exception as error:  # noqa: BLE001 - whatever it is, all ranks then use NCCL
            return f"the kernel cannot run: {type(error).__name__}: {error}"
        return None

    def set_timeout(self, timeout_s: float) -> None:
        """How long a sum waits for a peer from now on; graphs that were captured as well."""
        self._words[_LIMIT_NS] = int(timeout_s * 1e9)

    def stop(self) -> None:
        """Ends every wait on the device, within a millisecond, now and later. From any thread."""
        self._words[_STOP] = 1

    @property
    def gave_up(self) -> bool:
        """Whether a wait ended without its peer: results from then on mean nothing."""
        return bool(self._words[_GAVE_UP])

    def _check(self, t: Tensor) -> None:
        if not self.takes(t):
            raise ValueError(
                f"expected a contiguous float tensor of at most {_SLOT_BYTES} bytes, a multiple of "
                f"{_PIECE}, got {t.dtype} {list(t.shape)} with strides {t.stride()}"
            )

    def _launch(
        self,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        normed: Tensor,
        pieces: int,
        row: int,
        eps: float,
        program_bytes: int,
        programs: int,
        *,
        norm: bool,
    ) -> None:
        from tp_runtime.ops.peer_reduce_kernel import one_shot

        block = program_bytes // _PIECE
        options: dict[str, Any] = {"num_warps": block // 32, "launch_pdl": self._pdl}
        one_shot[(programs,)](
            x,
            y,
            weight,
            normed,
            self._places,
            self._launches[program_bytes],
            pieces,
            row,
            eps,
            x.shape[-1] if norm else 1,
            RANK=self._rank,
            RANKS=self._ranks,
            CHANNEL=channel_offset(program_bytes, self._ranks),
            SLOT=_SLOT_BYTES,
            BLOCK=block,
            NORM=norm,
            PDL=self._pdl,
            **options,
        )


def _row_bytes(t: Tensor) -> int | None:
    """The program that takes one row of t [rows, width]; None where none does."""
    row_bytes = t.shape[-1] * t.element_size()
    if t.dim() != 2 or row_bytes % _PIECE or row_bytes > PROGRAM_BYTES[-1]:
        return None
    program_bytes = max(PROGRAM_BYTES[0], power_of_two(row_bytes))
    return program_bytes if t.shape[0] * program_bytes <= _SLOT_BYTES else None

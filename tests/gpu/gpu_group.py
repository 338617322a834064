"""GPUs of a test's ranks: each on a GPU of its own, or all on one where there are too few.

Peer memory works between processes on one GPU as it does between GPUs; NCCL refuses. So there all
that NCCL would do is made of sums through peer memory: slow, but as capturable and deterministic.
The processes then take turns on the GPU, milliseconds each: no time measured there means anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import torch

from tp_runtime.group import TpGroup
from tp_runtime.ranks import RankInfo
from tp_runtime.reduce_plan import PROGRAM_BYTES, REDUCED_BYTES

if TYPE_CHECKING:
    from tp_runtime.ops.peer_reduce import PeerReduce

_PIECE = 16


class PeerMemoryOnly:
    """Stands where NCCL's group stands; its `peer` is set once the group has one."""

    def __init__(self, rank: int, size: int) -> None:
        self.peer: PeerReduce | None = None
        self._rank = rank
        self._size = size

    def allreduce(self, tensors: list[torch.Tensor], _: object) -> None:
        (t,) = tensors
        rows = t.new_empty((self._size, t.numel()))
        self._allgather_base(rows.view(-1), t.view(-1), None)
        # in rank order, rounded once, as the kernel does it
        total = rows.double() if t.is_floating_point() else rows
        t.copy_(total.sum(0).to(t.dtype).view(t.shape))

    def broadcast(self, tensors: list[torch.Tensor], _: object) -> None:
        (t,) = tensors
        rows = t.new_empty((self._size, t.numel()))
        self._allgather_base(rows.view(-1), t.view(-1), None)
        t.copy_(rows[0].view(t.shape))

    def _allgather_base(self, out: torch.Tensor, t: torch.Tensor, _: object) -> None:
        """Each byte is a float; those of the other ranks are 0 here, so that the sum has them."""
        assert self.peer is not None
        own = t.view(torch.uint8)
        padded = -(-own.numel() // _PIECE) * _PIECE
        rows = torch.zeros((self._size, padded), device=t.device)
        rows[self._rank, : own.numel()] = own
        flat, most = rows.view(-1), REDUCED_BYTES[-1] // rows.element_size()
        for at in range(0, flat.numel(), most):
            self.peer.all_reduce(flat[at : at + most], program_bytes=PROGRAM_BYTES[-1])
        got = rows[:, : own.numel()].to(torch.uint8)
        out.view(torch.uint8).copy_(got.reshape(-1))

    def abort(self) -> None:
        """The group stops its peer memory itself."""

    def shutdown(self) -> None:
        """Nothing is held."""


def break_device() -> None:
    """A kernel reads beyond its input: every later call of this process on its GPU fails."""
    torch.zeros(1, device="cuda").index_select(0, torch.full((1,), 99, device="cuda"))


def too_few_gpus(ranks: int) -> bool:
    """Whether so many ranks have to share one."""
    return torch.cuda.device_count() < ranks


def open_group(timeout_s: float = 60) -> TpGroup:
    """The group of this rank, with peer memory; its device is the current one."""
    info = RankInfo.from_env()
    shared = too_few_gpus(info.tp_size)
    device = torch.device("cuda", 0 if shared else info.local_rank)
    torch.cuda.set_device(device)
    if not shared:
        return TpGroup.create(info, device=device, timeout_s=timeout_s, peer_memory=True)
    stand_in = PeerMemoryOnly(info.tp_rank, info.tp_size)
    with mock.patch("tp_runtime.group.make_nccl", return_value=stand_in):
        group = TpGroup.create(info, device=device, timeout_s=timeout_s, peer_memory=True)
    stand_in.peer = group.peer_reduce
    return group

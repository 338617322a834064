"""Backends that fail as kernels do: one reads beyond its memory, one returns NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from tp_runtime.selection import DecodeShape, DecodeStep, DeviceInfo, PagedKV


class Lies:
    name = "lies"
    needs_host_lengths = False

    def __init__(self, shape: DecodeShape, device: torch.device) -> None:
        """Keeps nothing."""

    @staticmethod
    def refusal(shape: DecodeShape, device: DeviceInfo) -> str | None:
        return None

    def prepare_for_capture(self, bucket: int) -> None:
        """Nothing to make."""

    def prepare(self, step: DecodeStep) -> None:
        """Nothing to plan."""

    def forward(self, q: Tensor, kv: PagedKV, out: Tensor) -> None:
        out.fill_(torch.nan)


class Faults(Lies):
    name = "faults"

    def forward(self, q: Tensor, kv: PagedKV, out: Tensor) -> None:
        beyond = torch.full((1,), 1 << 40, device=q.device)
        out.view(-1)[:1] = kv.k.view(-1)[beyond]  # the device asserts, and nothing works after it

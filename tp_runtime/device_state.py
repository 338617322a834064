"""What one rank remembers of every running request, on the device and mirrored on the host.

A request owns one slot for its life. The step gathers by slot, so that a steady decode step needs
no copies: tokens and lengths advance in place. The host mirror advances by arithmetic from the
step plans alone; nothing is ever read back to learn a length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tp_runtime.errors import ProtocolError
from tp_runtime.ops.sampling import SamplerMode, mode_of
from tp_runtime.pages import DUMMY_BLOCK
from tp_runtime.uploads import Uploader

if TYPE_CHECKING:
    from tp_runtime.step_plan import StepPlan


_WRITTEN_BLOCKS = 4
"""So many block entries of a step go to the device as arguments of a launch each: an upload, with
its copy, its event and the kernel that spreads it, takes the host longer than these launches."""


class DeviceState:
    """Per-slot tensors of one rank; the last slot is the dummy that padded rows use.

    Attributes (S = slots + 1, W = table_width in kernel pages):
        last_token: int64 [S], sampled but not yet in the cache.
        length: int64 [S], tokens in the cache.
        block_table: int32 [S, W], kernel pages; entries beyond the length are the dummy's.
        temperature, top_p, min_p: float32 [S].  top_k, seed: int64 [S].
        uploads: for what else a step sends to this device.
        host_length: the mirror of `length` as the next step will find it, int64 [S].
    """

    def __init__(
        self, *, slots: int, table_width: int, pages_per_block: int, device: torch.device
    ) -> None:
        size = slots + 1
        self.slots = slots
        self.dummy_slot = slots
        self.device = device
        self.last_token = torch.zeros(size, dtype=torch.int64, device=device)
        self.length = torch.zeros(size, dtype=torch.int64, device=device)
        self.block_table = torch.zeros((size, table_width), dtype=torch.int32, device=device)
        self.temperature = torch.zeros(size, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(size, dtype=torch.int64, device=device)
        self.top_p = torch.ones(size, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(size, dtype=torch.float32, device=device)
        self.seed = torch.zeros(size, dtype=torch.int64, device=device)
        self.host_length = np.zeros(size, dtype=np.int64)
        self._host_mode = np.zeros(size, dtype=np.int8)
        self._pages_per_block = pages_per_block
        self._page_offsets = np.arange(pages_per_block, dtype=np.int64)
        self._flat_table = self.block_table.view(-1)
        self.uploads = Uploader(device)
        self._rows: tuple[int, ...] = ()

    def apply(self, plan: StepPlan) -> tuple[int, ...]:
        """Take over the deltas of a plan and return its decode rows.

        Raises:
            ProtocolError: a slot, a table index or the number of rows is out of range.
        """
        if plan.rows is None and not (plan.admits or plan.blocks or plan.chunks):
            self._check_base(plan, self._rows)  # steady decode: nothing changed
            return self._rows
        self._check(plan)
        if plan.admits:
            self._apply_admits(plan)
        if plan.blocks:
            self._apply_blocks(plan)
        if plan.rows is not None:
            # a prefill step has no rows and does not change what the next decode step repeats
            if plan.num_rows:
                self._rows = plan.rows
            return plan.rows
        return self._rows

    def sampler_mode(self, slots: tuple[int, ...]) -> SamplerMode:
        """The one sampler that serves these slots; derived alike on every rank."""
        if not slots:
            return SamplerMode.GREEDY
        return SamplerMode(int(self._host_mode[list(slots)].max()))

    def advance_host(self, index: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Mirror what a decode step does to `length` of these slots on the device."""
        self.host_length[index] += 1

    def _check(self, plan: StepPlan) -> None:
        touched = [slot for slot, _, _ in plan.blocks]
        touched += [admit.slot for admit in plan.admits]
        touched += [chunk.slot for chunk in plan.chunks]
        touched += plan.rows or ()
        bad = [slot for slot in touched if not 0 <= slot < self.slots]
        if bad:
            raise ProtocolError(
                f"step {plan.step} names slots {bad}, expected 0 <= slot < {self.slots}"
            )
        self._check_base(plan, self._rows if plan.rows is None else plan.rows)
        width = self.block_table.shape[1] // self._pages_per_block
        wide = [position for _, position, _ in plan.blocks if not 0 <= position < width]
        if wide:
            raise ProtocolError(f"step {plan.step} sets table entries {wide} of {width}")

    @staticmethod
    def _check_base(plan: StepPlan, rows: tuple[int, ...]) -> None:
        if len(rows) != plan.num_rows:
            raise ProtocolError(
                f"step {plan.step} decodes {plan.num_rows} rows, but this rank holds {len(rows)}: "
                "its base is another step"
            )

    def _apply_admits(self, plan: StepPlan) -> None:
        admits = plan.admits
        sampling = [admit.sampling for admit in admits]
        slots = np.array([admit.slot for admit in admits], dtype=np.int64)
        index, integers, floats = self.uploads.send(
            slots,
            np.array([[s.top_k for s in sampling], [a.seed for a in admits]], dtype=np.int64),
            np.array([[s.temperature, s.top_p, s.min_p] for s in sampling], dtype=np.float32).T,
        )
        self.length.index_fill_(0, index, 0)
        self.last_token.index_fill_(0, index, 0)
        self.block_table.index_fill_(0, index, DUMMY_BLOCK)
        for column, values in (
            (self.top_k, integers[0]),
            (self.seed, integers[1]),
            (self.temperature, floats[0]),
            (self.top_p, floats[1]),
            (self.min_p, floats[2]),
        ):
            column.index_copy_(0, index, values)
        self.host_length[slots] = 0
        self._host_mode[slots] = [mode_of(s) for s in sampling]

    def _apply_blocks(self, plan: StepPlan) -> None:
        if len(plan.blocks) <= _WRITTEN_BLOCKS:
            pages, width = self._pages_per_block, self.block_table.shape[1]
            for slot, position, block in plan.blocks:
                entries = self._flat_table.narrow(0, slot * width + position * pages, pages)
                torch.arange(block * pages, (block + 1) * pages, out=entries)
        else:
            self._upload_blocks(plan)

    def _upload_blocks(self, plan: StepPlan) -> None:
        entries = np.array(plan.blocks, dtype=np.int64)
        first = entries[:, 0] * self.block_table.shape[1] + entries[:, 1] * self._pages_per_block
        where = first[:, None] + self._page_offsets
        pages = entries[:, 2:3] * self._pages_per_block + self._page_offsets
        index, values = self.uploads.send(where.ravel(), pages.ravel().astype(np.int32))
        self._flat_table.index_copy_(0, index, values)

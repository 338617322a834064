"""The two ends of a decode step: gather what slots hold into rows, and advance the slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from tp_runtime.ops.kernels import dependent_launch, power_of_two, runs_kernels
from tp_runtime.ops.rope_append import first_rows

if TYPE_CHECKING:
    from torch import Tensor

_TABLE_BLOCK = 512  # table entries of one program
_ROWS_BLOCK = 128
_ALIGNED_ROWS = 4  # every column begins at 16 bytes, as kernels compiled for one rely on


class SlotState(Protocol):
    """The part of a `DeviceState` that a step reads and writes. S = slots + 1, the last a dummy."""

    dummy_slot: int
    last_token: Tensor
    length: Tensor
    block_table: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """What one decode step needs of its rows, each [rows] and contiguous unless said otherwise.

    token_ids: int64, the last token.  positions: int64, where it stands, which is the length.
    next_positions: int64, where the token stands that will be drawn.
    kv_lens: int32, tokens in the cache once this one is.
    block_table: int32 [rows, W]; entries beyond the length are those of the slot: pages that it
        owns already, or the dummy page.
    cache_rows: int64, `first_rows` of the new token.
    temperature, top_p, min_p: float32.  top_k, seed: int64.
    """

    token_ids: Tensor
    positions: Tensor
    next_positions: Tensor
    kv_lens: Tensor
    block_table: Tensor
    cache_rows: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor


def begin_step(
    slots: Tensor,
    state: SlotState,
    *,
    kv_heads: int,
    page_size: int,
) -> StepRows:
    """Gather the rows of a decode step, in one launch on a GPU.

    Args:
        slots: int64 [rows], each in [0, S); the dummy slot may come several times.
        state: of this rank; only read. A slot's length must be below page_size * W.
        kv_heads: of this rank's cache.  page_size: tokens per kernel page.
    """
    if not runs_kernels(slots.device):
        return begin_step_reference(slots, state, kv_heads=kv_heads, page_size=page_size)
    from tp_runtime.ops.step_state_kernel import begin_step_kernel

    rows, width = slots.shape[0], state.block_table.shape[1]
    stride = -(-rows // _ALIGNED_ROWS) * _ALIGNED_ROWS
    ids = slots.new_empty((6, stride))
    floats = state.temperature.new_empty((3, stride))
    table = state.block_table.new_empty((rows, width))
    kv_lens = state.block_table.new_empty(rows)
    pdl = dependent_launch(slots.device)
    block = min(_TABLE_BLOCK, power_of_two(width))
    if rows:
        begin_step_kernel[(rows, 1 + -(-width // block))](
            slots,
            state.last_token,
            state.length,
            state.block_table,
            state.temperature,
            state.top_k,
            state.top_p,
            state.min_p,
            state.seed,
            ids,
            floats,
            kv_lens,
            table,
            stride,
            width,
            KV_HEADS=kv_heads,
            PAGE=page_size,
            BLOCK_W=block,
            PDL=pdl,
            num_warps=4 if block >= 256 else 1,
            launch_pdl=pdl,
        )
    return StepRows(
        token_ids=ids[0, :rows],
        positions=ids[1, :rows],
        next_positions=ids[2, :rows],
        cache_rows=ids[3, :rows],
        top_k=ids[4, :rows],
        seed=ids[5, :rows],
        temperature=floats[0, :rows],
        top_p=floats[1, :rows],
        min_p=floats[2, :rows],
        kv_lens=kv_lens,
        block_table=table,
    )


def begin_step_reference(
    slots: Tensor,
    state: SlotState,
    *,
    kv_heads: int,
    page_size: int,
) -> StepRows:
    """`begin_step` in plain torch: what it means, and what a CPU runs."""
    positions = state.length[slots]
    table = state.block_table[slots]
    pages = table.gather(1, (positions // page_size)[:, None])[:, 0]
    return StepRows(
        token_ids=state.last_token[slots],
        positions=positions,
        next_positions=positions + 1,
        kv_lens=(positions + 1).to(torch.int32),
        block_table=table,
        cache_rows=first_rows(pages, positions, kv_heads=kv_heads, page_size=page_size),
        temperature=state.temperature[slots],
        top_k=state.top_k[slots],
        top_p=state.top_p[slots],
        min_p=state.min_p[slots],
        seed=state.seed[slots],
    )


def end_step(slots: Tensor, tokens: Tensor, state: SlotState) -> None:
    """Put the tokens drawn into their slots, and count the ones before them as cached.

    The dummy slot keeps its token and its length, so that padded rows do the same in every step.

    Args:
        slots: int64 [rows], no slot twice but the dummy.
        tokens: int64 [rows]; a negative one (a row without a token, which the host fails later)
            is remembered as 0.
        state: `last_token` and `length` are changed.

    Raises:
        ValueError: slots and tokens are not of one shape.
    """
    if slots.shape != tokens.shape:
        raise ValueError(f"tokens: expected {tuple(slots.shape)}, got {tuple(tokens.shape)}")
    if not runs_kernels(slots.device):
        end_step_reference(slots, tokens, state)
        return
    from tp_runtime.ops.step_state_kernel import end_step_kernel

    rows = slots.shape[0]
    if not rows:
        return
    pdl = dependent_launch(slots.device)
    end_step_kernel[(-(-rows // _ROWS_BLOCK),)](
        slots,
        tokens,
        state.last_token,
        state.length,
        rows,
        state.dummy_slot,
        BLOCK=_ROWS_BLOCK,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def end_step_reference(slots: Tensor, tokens: Tensor, state: SlotState) -> None:
    """`end_step` in plain torch: what it means, and what a CPU runs."""
    served = slots != state.dummy_slot
    # padded rows write back what the dummy holds
    held = state.last_token[slots]
    state.last_token[slots] = torch.where(served, tokens.clamp(min=0), held)
    state.length.index_add_(0, slots, served.to(torch.int64))

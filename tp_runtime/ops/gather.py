"""Rows of tables by index, several tables in one launch: embeddings, and the rotary table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tp_runtime.ops.kernels import dependent_launch, power_of_two, runs_kernels

if TYPE_CHECKING:
    from torch import Tensor

_MOST_COLUMNS = 1024  # of one program


def gather_rows(index: Tensor, *tables: Tensor, start: int = 0) -> tuple[Tensor, ...]:
    """Row index - start of each table; zeros where a table has no such row.

    Args:
        index: [n] int64.
        tables: one or two [rows, width], contiguous, of one shape and dtype.
        start: the index of the first row, for a table that holds one rank's slice.

    Returns:
        [n, width] for each table.
    """
    if not 1 <= len(tables) <= 2 or any(
        table.shape != tables[0].shape or table.dtype != tables[0].dtype for table in tables
    ):
        raise ValueError(
            f"expected one or two tables of one shape and dtype, got "
            f"{[(list(table.shape), table.dtype) for table in tables]}"
        )
    if not runs_kernels(index.device):
        return gather_rows_reference(index, *tables, start=start)
    from tp_runtime.ops.gather_kernel import gather_rows_kernel

    first, last = tables[0], tables[-1]
    count, (rows, width) = index.shape[0], first.shape
    out = first.new_empty((len(tables), count, width))
    if count:
        block = min(_MOST_COLUMNS, power_of_two(width))
        pdl = dependent_launch(index.device)
        gather_rows_kernel[(count, -(-width // block), len(tables))](
            index,
            first,
            last,
            out,
            start,
            rows,
            width,
            BLOCK=block,
            PDL=pdl,
            num_warps=4 if block > 256 else 1,
            launch_pdl=pdl,
        )
    return tuple(out)


def gather_rows_reference(index: Tensor, *tables: Tensor, start: int = 0) -> tuple[Tensor, ...]:
    """`gather_rows` in plain torch: what it means, and what a CPU runs."""
    local = index - start
    foreign = ((local < 0) | (local >= tables[0].shape[0])).unsqueeze(1)
    local = local.masked_fill_(foreign.squeeze(1), 0)
    return tuple(table.index_select(0, local).masked_fill_(foreign, 0) for table in tables)

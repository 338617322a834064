"""The Triton kernel of `gather`. Importing this imports Triton."""

# The kernel language is not Python: its arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["start", "rows"])
def gather_rows_kernel(
    index_ptr,
    first_ptr,
    last_ptr,
    out_ptr,
    start,
    rows,
    width,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, b, t): block b of row index[i] - start of table t, which is first or last.

    out: [tables, n, width].
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0).to(tl.int64)
    table = tl.program_id(2)
    row = tl.load(index_ptr + place) - start
    owned = (row >= 0) & (row < rows)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = row * width + column
    if table == 0:
        values = tl.load(first_ptr + source, mask=inside & owned, other=0.0)
    else:
        values = tl.load(last_ptr + source, mask=inside & owned, other=0.0)
    target = (table * tl.num_programs(0) + place) * width + column
    tl.store(out_ptr + target, values, mask=inside)

"""The Triton kernel of triton_splitkv. Importing this imports Triton.

One launch, a fixed grid, no host plan. Each program reads the lengths, and from them every program
derives the same division of work: the KV tiles of all (row, head) pairs in one line, cut into equal
ranges, one range per program ("stream-K": Osama et al., 2023, arXiv 2301.03598). A program so gets
the end of one pair, some whole pairs, and the begin of another; a ragged batch is as even as an
equal one. Whole pairs are written at once. A pair that lies in several ranges leaves partial
results, and the last program to arrive there adds them up, in the order of the ranges, so that the
result does not depend on who was last. Where cutting gains less than the merges cost, each program
takes one whole pair instead.
"""

# The kernel language is not Python: its arguments have no Python types.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LOWEST = tl.constexpr(-1e30)


@triton.jit
def _merge(
    acc_ptr,
    stat_ptr,
    pair_start,
    pair_tiles,
    per_program,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Sum of a pair's partial results: float32 [GROUP_ROWS, HEAD_DIM], divided by its weight."""
    first = pair_start // per_program
    last = (pair_start + pair_tiles - 1) // per_program
    m_rows = tl.arange(0, GROUP_ROWS)
    dims = tl.arange(0, HEAD_DIM)
    top = tl.full([GROUP_ROWS], _LOWEST, tl.float32)
    weight = tl.zeros([GROUP_ROWS], tl.float32)
    acc = tl.zeros([GROUP_ROWS, HEAD_DIM], tl.float32)
    # [row, part, dim] in this order: Triton gives the warps the first axis, so that the sum over
    # the parts stays within a thread
    for begin in range(first, last + 1, BLOCK_S):
        program = begin + tl.arange(0, BLOCK_S)
        used = program <= last
        # a program's second slot holds the pair that begins inside its range
        second = (program == first) & (pair_start != first * per_program)
        slot = tl.where(used, 2 * program + second.to(tl.int32), 0)
        stat = stat_ptr + slot[None, :] * (2 * GROUP_ROWS) + m_rows[:, None]
        part_top = tl.load(stat, mask=used[None, :], other=_LOWEST, cache_modifier=".cg")
        part_weight = tl.load(
            stat + GROUP_ROWS, mask=used[None, :], other=0.0, cache_modifier=".cg"
        )
        part = tl.load(
            acc_ptr
            + slot[None, :, None] * (GROUP_ROWS * HEAD_DIM)
            + m_rows[:, None, None] * HEAD_DIM
            + dims[None, None, :],
            mask=used[None, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(part_top, 1))
        scale = tl.exp2(part_top - new_top[:, None])
        keep = tl.exp2(top - new_top)
        weight = weight * keep + tl.sum(part_weight * scale, 1)
        acc = acc * keep[:, None] + tl.sum(part * scale[:, :, None], 1)
        top = new_top
    return acc * (1.0 / tl.maximum(weight, 1e-30))[:, None]


@triton.jit(do_not_specialize=["rows", "table_width"])
def splitkv(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lens_ptr,
    out_ptr,
    acc_ptr,
    stat_ptr,
    count_ptr,
    rows,
    table_width,
    scale_log2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    Q_LEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS_POW2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    SATURATING: tl.constexpr,
    MERGE_COST: tl.constexpr,
    MERGE_STEP_COST: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Decode attention over HND pages.

    q, out: [rows * Q_LEN, KV_HEADS * GROUP, HEAD_DIM].  k, v: [pages, KV_HEADS, PAGE, HEAD_DIM].
    table: int32 [rows, table_width].  lens: int32 [rows].
    acc, stat: partial results, float32 [2 * programs, GROUP_ROWS, HEAD_DIM] and
    [2 * programs, 2, GROUP_ROWS].  count: int32 [rows * KV_HEADS], zero before and after.
    GROUP_ROWS: GROUP * Q_LEN rounded up to a power of two; BLOCK_M: at least 16, for the tensor
    cores.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    row_index = tl.arange(0, ROWS_POW2)
    lens = tl.load(lens_ptr + row_index, mask=row_index < rows, other=0)
    # a row without tokens gets a tile too, all masked, so that its result is written
    tiles = tl.where(row_index < rows, tl.maximum((lens + BLOCK_N - 1) // BLOCK_N, 1), 0)
    total = tl.sum(tiles, 0) * KV_HEADS
    longest = tl.max(tiles, 0)
    pairs = rows * KV_HEADS
    programs = tl.num_programs(0)
    even = (total + programs - 1) // programs
    # memory is saturated by SATURATING programs: with more of them each reads more slowly
    reading = total // SATURATING
    # longer ranges make fewer parts to merge; the cheapest of some multiples of the even range, in
    # quarters of the time of a tile
    multiple = tl.arange(0, 16)
    tried = even * (multiple + 1)
    merges = ((longest + tried - 1) // tried + BLOCK_S) // BLOCK_S  # one part may be left over
    costs = 4 * tl.maximum(tried, reading) + MERGE_COST + MERGE_STEP_COST * merges
    cheapest = tl.min(costs * 16 + multiple, 0)
    per_program = even * (cheapest % 16 + 1)
    # a program per pair, if the longest takes no longer
    whole = (pairs <= programs) & (4 * tl.maximum(longest, reading) <= cheapest // 16)
    if (total == longest * pairs) & (even > longest):
        # all rows equal: whole pairs only, nothing to merge
        per_program = ((even + longest - 1) // longest) * longest

    own_row = program // KV_HEADS
    own_tiles = tl.sum(tl.where(row_index == own_row, tiles, 0), 0)  # 0 beyond the last row
    ends = tl.cumsum(tiles, 0) * KV_HEADS
    before = tl.where(whole, row_index < own_row, ends <= program * per_program)
    before = before & (row_index < rows)
    row = tl.sum(before.to(tl.int32), 0)
    row_start = tl.sum(tl.where(before, tiles, 0), 0) * KV_HEADS
    begin = tl.where(whole, row_start + (program % KV_HEADS) * own_tiles, program * per_program)
    end = tl.where(whole, begin + own_tiles, tl.minimum(begin + per_program, total))
    item = begin

    m_index = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    tokens = tl.arange(0, BLOCK_N)
    m_valid = m_index < GROUP * Q_LEN
    m_query = m_index // GROUP  # which of the row's queries
    m_head = m_index % GROUP

    while item < end:
        length = tl.load(lens_ptr + row)
        row_tiles = tl.maximum((length + BLOCK_N - 1) // BLOCK_N, 1)
        head = (item - row_start) // row_tiles
        pair_start = row_start + head * row_tiles
        first_tile = item - pair_start
        last_tile = tl.minimum(row_tiles, first_tile + end - item)

        q_offsets = (
            (row * Q_LEN + m_query) * (KV_HEADS * GROUP) + head * GROUP + m_head
        ) * HEAD_DIM
        q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=m_valid[:, None], other=0.0)
        # tokens that each query sees: all but those of the row's later queries
        seen = tl.where(m_valid, length - (Q_LEN - 1 - m_query), 0)
        top = tl.full([BLOCK_M], _LOWEST, tl.float32)
        # summed over the tile's tokens at the end: a sum across warps per tile would cost a barrier
        weights = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
        table_row = table_ptr + row * table_width
        # page numbers are read one tile ahead, so that the loads that need them can be early
        if PAGE % BLOCK_N == 0:
            page = tl.load(table_row + (first_tile * BLOCK_N) // PAGE)
        else:
            token = first_tile * BLOCK_N + tokens
            page = tl.load(table_row + token // PAGE, mask=token < length, other=0)
        for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
            token = tile * BLOCK_N + tokens
            inside = token < length
            base = (page.to(tl.int64) * KV_HEADS + head) * (PAGE * HEAD_DIM)
            if PAGE % BLOCK_N == 0:
                base += ((tile * BLOCK_N) % PAGE) * HEAD_DIM
                offsets = base + tokens[:, None] * HEAD_DIM + dims[None, :]
                following = (tile + 1) * BLOCK_N
                page = tl.load(table_row + following // PAGE, mask=following < length, other=0)
            else:
                base += (token % PAGE) * HEAD_DIM
                offsets = base[:, None] + dims[None, :]
                ahead = token + BLOCK_N
                page = tl.load(table_row + ahead // PAGE, mask=ahead < length, other=0)
            # beyond a row's length may lie anything, NaN as well: it is not read
            k = tl.load(k_ptr + offsets, mask=inside[:, None], other=0.0)
            v = tl.load(v_ptr + offsets, mask=inside[:, None], other=0.0)
            k = k.to(q.dtype)
            v = v.to(q.dtype)
            scores = tl.dot(q, tl.trans(k)) * scale_log2
            scores = tl.where(token[None, :] < seen[:, None], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            p = tl.exp2(scores - new_top[:, None])
            keep = tl.exp2(top - new_top)
            weights = weights * keep[:, None] + p
            acc = acc * keep[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc)
            top = new_top
        weight = tl.sum(weights, 1)

        if last_tile - first_tile == row_tiles:
            result = acc * (1.0 / tl.maximum(weight, 1e-30))[:, None]
            tl.store(
                out_ptr + q_offsets[:, None] + dims[None, :],
                result.to(out_ptr.dtype.element_ty),
                mask=m_valid[:, None],
            )
        else:
            slot = 2 * program + (item != begin).to(tl.int32)
            held = m_index < GROUP_ROWS
            stat = stat_ptr + slot * (2 * GROUP_ROWS) + m_index
            tl.store(stat, top, mask=held)
            tl.store(stat + GROUP_ROWS, weight, mask=held)
            tl.store(
                acc_ptr
                + slot * (GROUP_ROWS * HEAD_DIM)
                + m_index[:, None] * HEAD_DIM
                + dims[None, :],
                acc,
                mask=held[:, None],
            )
            parts = (pair_start + row_tiles - 1) // per_program - pair_start // per_program
            counter = count_ptr + row * KV_HEADS + head
            tl.debug_barrier()  # every thread's part is written before one thread says so
            arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if arrived == parts:
                result = _merge(
                    acc_ptr,
                    stat_ptr,
                    pair_start,
                    row_tiles,
                    per_program,
                    GROUP_ROWS,
                    HEAD_DIM,
                    BLOCK_S,
                )
                group_rows = tl.arange(0, GROUP_ROWS)
                merged = (
                    (row * Q_LEN + group_rows // GROUP) * (KV_HEADS * GROUP)
                    + head * GROUP
                    + group_rows % GROUP
                ) * HEAD_DIM
                tl.store(
                    out_ptr + merged[:, None] + dims[None, :],
                    result.to(out_ptr.dtype.element_ty),
                    mask=(group_rows < GROUP * Q_LEN)[:, None],
                )
                tl.store(counter, 0)  # for the next launch

        item += last_tile - first_tile
        if item == row_start + KV_HEADS * row_tiles:
            row_start = item
            row += 1

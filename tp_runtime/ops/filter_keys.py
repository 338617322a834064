"""Keys, bins and numbers of a row that the filter kernels share. Importing this imports Triton.

Keys rise as logits fall.

`state`, int64 [rows, 16]: 0 keys' bits known of the top-k cut, 1 ids before it, 2 weight before it;
3 the weight to reach, 4 bits known of the top-p cut, 5 weight before it; 6 key at the final cut,
7 ids kept of those that have it, or -1 for all; 8 the short form of the best key, and 9 that of
the largest that may be kept.

`hist`, int64 [rows, HIST_WIDTH], zero at first: the bins, see the offsets below.
"""

# The kernel language is not Python: its arguments have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from tp_runtime.ops.sampling_kernel import order_of, score_of_order

BINS = tl.constexpr(4096)
LAST_BINS = tl.constexpr(256)
STATE_WIDTH = 16
HIST_WIDTH = 5 * 4096 + 2 * 256 + 128
STATE = tl.constexpr(STATE_WIDTH)
HIST = tl.constexpr(HIST_WIDTH)
# counts and weights of all ids; of the bin with the top-k cut; of the bin with the top-p cut
COUNT_1 = tl.constexpr(0)
WEIGHT_1 = tl.constexpr(4096)
COUNT_K = tl.constexpr(2 * 4096)
WEIGHT_K = tl.constexpr(3 * 4096)
WEIGHT_P = tl.constexpr(4 * 4096)
LAST_K = tl.constexpr(5 * 4096)
LAST_P = tl.constexpr(5 * 4096 + 256)
LIGHT = tl.constexpr(5 * 4096 + 512)  # the weight of ids that have no bin
ONE = tl.constexpr(2.0**44)
NO_KEY = tl.constexpr(-(2**63))
TOP = tl.constexpr(0x7FFFFFFF)
ALL = tl.constexpr(0xFFFFFFFF)
INF_ORDER = tl.constexpr(0x7F800000)  # the order of inf


@triton.jit
def falling_key(score):
    """uint32 keys that rise as scores fall."""
    return (TOP - order_of(score)).to(tl.uint32, bitcast=True)


@triton.jit
def short_key(falling, DROP: tl.constexpr):
    """The key without its last DROP bits, which logits of 16 bits do not use: int64."""
    return (falling >> DROP).to(tl.int64)


@triton.jit
def full_key(short, DROP: tl.constexpr):
    """The int64 key in 32 bits whose short form this is: the dropped bits repeat the sign."""
    negative = (short >> (31 - DROP)) & 1
    return (short << DROP) + tl.where(negative == 1, 0, (1 << DROP) - 1)


@triton.jit
def score_of(short, DROP: tl.constexpr):
    return score_of_order((TOP - full_key(short, DROP)).to(tl.int32))


@triton.jit
def weights(score, best, inverse_heat):
    """exp((score - best) / heat) as an integer of 2**-44."""
    distance = score.to(tl.float64) - best.to(tl.float64)
    return (tl.exp(distance * inverse_heat) * ONE + 0.5).to(tl.int64)


@triton.jit
def shifts(state, DROP: tl.constexpr):
    """How many bits of a key, counted from the best, the first and the second level leave."""
    span = tl.load(state + 9) - tl.load(state + 8)
    first = tl.zeros([], tl.int64)
    for bit in tl.static_range(12, 32):
        first += (span >> bit > 0).to(tl.int64)
    second = first
    if DROP == 0:
        second = tl.maximum(first - 12, 0)
    return first, second


@triton.jit
def wanted_of(row, best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, vocab):
    """(best logit, temperature, k or 0, p, whether the row is filtered by k, and by p)."""
    order = (tl.load(best_ptr + row) >> 32).to(tl.int32)
    heat = tl.load(temperature_ptr + row)
    k = tl.load(top_k_ptr + row)
    p = tl.load(top_p_ptr + row)
    # a NaN has the highest order; -inf the negative of the order of inf, less one
    usual = (heat > 0.0) & (order < INF_ORDER) & (order > -INF_ORDER - 1)
    return score_of_order(order), heat, k, p, usual & (k > 0) & (k < vocab), usual & (p < 1.0)

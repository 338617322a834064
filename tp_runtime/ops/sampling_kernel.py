"""The Triton kernels that draw a token without filters. Importing this imports Triton.

One pass over the logits as the head wrote them: the noise of `noise.gumbel` is computed in
registers, and a program keeps the best (score, id) of its columns as the packed key of
`sampling._encode`. A second small kernel takes the best of a row's keys.

The uniform numbers are the same bits as in torch. Logarithms are those of CUDA's device library,
and products are not fused with sums, so that scores equal the ones of the torch form on the same
device up to the last bit of a logarithm; against a CPU likewise.
"""

# The kernel language is not Python: its arguments have no Python types.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_SEED_SALT = tl.constexpr(0xD1B54A32D192ED03)
_UNIT = tl.constexpr(2.0**-32)
_HALF_UNIT = tl.constexpr(2.0**-33)
_MAX_V = tl.constexpr(1.0 - 2.0**-24)
_NAN_ORDER = tl.constexpr(0x7FFFFFFF)
_NEG_INF_ORDER = tl.constexpr(-0x7F800001)
_ID_MASK = tl.constexpr(0xFFFFFFFF)
_NO_KEY = tl.constexpr(-(2**63))  # below every key


@triton.jit
def _mix(x):
    """The SplitMix64 finaliser on uint64."""
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def row_key(seed, position):
    """`noise.row_keys` of one row, as uint64."""
    seed = seed.to(tl.uint64, bitcast=True)
    position = position.to(tl.uint64, bitcast=True)
    return _mix(_mix(seed + _SEED_SALT) + position * _GOLDEN)


@triton.jit
def noise_of(key, ids):
    """`noise.gumbel` of int64 vocabulary ids."""
    bits = _mix(key + (ids + 1).to(tl.uint64) * _GOLDEN)
    high = (bits >> 32).to(tl.uint32).to(tl.float32)
    v = tl.minimum(high * _UNIT + _HALF_UNIT, _MAX_V)
    return -libdevice.log(-libdevice.log1p(-v))


@triton.jit
def order_of(score):
    """int32 with the order of float32 scores; -0.0 equals 0.0, NaN is above all numbers."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ _NAN_ORDER, bits)
    return tl.where(score != score, _NAN_ORDER, order)


@triton.jit
def score_of_order(order):
    """The float32 whose order this is; the inverse of `order_of` but for NaN and -0.0."""
    bits = tl.where(order < 0, order ^ _NAN_ORDER, order)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def packed(score, ids):
    """`sampling._encode`: int64 keys ordered by score, then lowest id."""
    return (order_of(score).to(tl.int64) << 32) | (_ID_MASK - ids)


@triton.jit(do_not_specialize=["vocab", "vocab_start", "steps"])
def best_keys_kernel(
    logits_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    keys_ptr,
    stride,
    vocab,
    vocab_start,
    steps,
    RANDOM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (p, r): the best key of columns p * steps * BLOCK .. of row r.

    logits: [rows, vocab], rows stride apart.  temperature: float32 [rows].
    seed, position: int64 [rows].  keys: int64 [rows, programs of a row].
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    best = tl.full([BLOCK], _NO_KEY, tl.int64)
    lanes = tl.arange(0, BLOCK)
    heat = 0.0
    key = tl.zeros([], tl.uint64)
    if RANDOM:
        heat = tl.load(temperature_ptr + row)
        key = row_key(tl.load(seed_ptr + row), tl.load(position_ptr + row))
    for step in range(steps):
        column = (part * steps + step) * BLOCK + lanes
        inside = column < vocab
        score = tl.load(logits_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        ids = column.to(tl.int64) + vocab_start
        if RANDOM:  # noqa: SIM102 - decided when compiled, the inner one when run
            if heat != 0.0:
                score = score + heat * noise_of(key, ids)
        best = tl.maximum(best, tl.where(inside, packed(score, ids), _NO_KEY))
    tl.store(keys_ptr + row * tl.num_programs(0) + part, tl.max(best, 0))


@triton.jit(do_not_specialize=["parts", "row_stride", "part_stride"])
def reduce_keys_kernel(
    keys_ptr,
    out_ptr,
    parts,
    row_stride,
    part_stride,
    DECODE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program r: the best of the keys of row r, or the id in it (-1 if the row has no token)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    keys = tl.load(
        keys_ptr + row * row_stride + part * part_stride, mask=part < parts, other=_NO_KEY
    )
    key = tl.max(keys, 0)
    if DECODE:
        order = key >> 32
        none = (order == _NAN_ORDER) | (order <= _NEG_INF_ORDER)
        tl.store(out_ptr + row, tl.where(none, -1, _ID_MASK - (key & _ID_MASK)))
    else:
        tl.store(out_ptr + row, key)

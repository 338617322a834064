"""The Triton kernel of `peer_reduce`. Importing this imports Triton.

One-shot: every rank pushes its addend into the memory of all others, waits for theirs in its own
memory, and adds in rank order. There are no flags: memory that nothing has arrived in holds a word
that is never sent, and data are there when that word is gone, so that a reduction costs one way
over NVLink and no fence (the idea of NCCL's LL protocol and of the Lamport kernels of TensorRT-LLM,
which mark 8 bytes by a flag and a float by minus zero).

Program p always uses part p of a channel, in two halves that take turns. A half is given back,
filled with the mark again, as soon as it is read. That is early enough: a peer writes the same half
two launches later, after it got what this rank sends in the launch between, and this rank sends
that only once the launch that gave back has ended. Which half is next stands in device memory and
advances in the kernel, so that graphs may be replayed any number of times.

A wait has a limit, which stands with the host's word to stop on a page of the host. A load from
there takes microseconds on the bus, and thousands of waiting threads that all load from it hold up
both this rank and, as that is late then, its peers for good. So one thread of the whole device
looks at most twice per millisecond, and tells the others through a word in device memory.
"""

# The kernel language is not Python: its arguments have no Python types.
# ruff: noqa: ANN001, ANN201, ANN202, RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MARK = -1
"""In every 32-bit word that nothing has arrived in: two not-a-numbers of a 16-bit type."""

# What is sent instead of the mark; not a number either.
_NOT_THE_MARK = tl.constexpr(0x7FFF7FFF)

_LOAD = tl.constexpr("""
{
    .reg .pred inside;
    .reg .b32 a, b, c, d;
    setp.ne.s32 inside, $5, 0;
    mov.b32 a, 0; mov.b32 b, 0; mov.b32 c, 0; mov.b32 d, 0;
    @inside ld.relaxed.sys.global.v4.b32 {a, b, c, d}, [$4];
    mov.b32 $0, a; mov.b32 $1, b; mov.b32 $2, c; mov.b32 $3, d;
}
""")

_STORE = tl.constexpr("""
{
    .reg .pred inside;
    setp.ne.s32 inside, $6, 0;
    @inside st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5};
    mov.b32 $0, 0;
}
""")

# $4-$7: what a first load gave. $8: where from. $9: the page of the host, 64-bit words: stop,
# limit in nanoseconds, given up. $10: two such words of this device: given up, and the time of the
# last look at the page. $11: inside.
_AWAIT = tl.constexpr("""
{
    .reg .pred inside, missing, over;
    .reg .b32 a, b, c, d, polls, low;
    .reg .b64 started, now, word, since, seen;
    setp.ne.s32 inside, $11, 0;
    mov.b32 a, $4; mov.b32 b, $5; mov.b32 c, $6; mov.b32 d, $7;
    mov.b32 polls, 0;
    mov.b64 started, 0;
    POLL:
    setp.eq.s32 missing, a, -1;
    setp.eq.or.s32 missing, b, -1, missing;
    setp.eq.or.s32 missing, c, -1, missing;
    setp.eq.or.s32 missing, d, -1, missing;
    and.pred missing, missing, inside;
    @!missing bra DONE;
    ld.relaxed.sys.global.v4.b32 {a, b, c, d}, [$8];
    add.s32 polls, polls, 1;
    and.b32 low, polls, 255;
    setp.ne.s32 over, low, 0;
    @over bra POLL;
    ld.relaxed.gpu.global.b64 word, [$10];
    setp.ne.s64 over, word, 0;
    @over bra DONE;
    mov.u64 now, %globaltimer;
    setp.ne.u64 over, started, 0;
    @!over mov.b64 started, now;
    ld.relaxed.gpu.global.b64 word, [$10+8];
    sub.s64 since, now, word;
    setp.lt.s64 over, since, 500000;
    @over bra POLL;
    atom.relaxed.gpu.global.cas.b64 seen, [$10+8], word, now;
    setp.ne.s64 over, seen, word;
    @over bra POLL;
    sub.s64 since, now, started;
    ld.relaxed.sys.global.b64 word, [$9+8];
    setp.gt.s64 over, since, word;
    ld.relaxed.sys.global.b64 word, [$9];
    setp.ne.or.s64 over, word, 0, over;
    ld.relaxed.sys.global.b64 word, [$9+16];
    setp.ne.or.s64 over, word, 0, over;
    @!over bra POLL;
    mov.b64 word, 1;
    st.relaxed.sys.global.b64 [$9+16], word;
    st.relaxed.gpu.global.b64 [$10], word;
    DONE:
    mov.b32 $0, a; mov.b32 $1, b; mov.b32 $2, c; mov.b32 $3, d;
}
""")


@triton.jit
def _load(address, inside):
    """The four words of 16 bytes at each address; 0 where not inside."""
    return tl.inline_asm_elementwise(
        _LOAD,
        "=r,=r,=r,=r,l,r",
        [address, inside],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def _store(address, a, b, c, d, inside):
    tl.inline_asm_elementwise(
        _STORE,
        "=r,l,r,r,r,r,r",
        [address, a, b, c, d, inside],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _arrived(a, b, c, d, address, page, notes, inside):
    """Four words at each address, none of them the mark; a, b, c, d: of an earlier load."""
    return tl.inline_asm_elementwise(
        _AWAIT,
        "=r,=r,=r,=r,r,r,r,r,l,l,l,r",
        [a, b, c, d, address, page, notes, inside],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def _unmarked(word):
    return tl.where(word == -1, _NOT_THE_MARK, word)


@triton.jit
def _low(word, dtype: tl.constexpr):
    """The number in a word, or the first of two, in float32."""
    if dtype == tl.float32:
        return word.to(tl.float32, bitcast=True)
    elif dtype == tl.bfloat16:
        return (word << 16).to(tl.float32, bitcast=True)
    else:
        return word.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _high(word, dtype: tl.constexpr):
    """The second of two numbers in a word, in float32; unused where a word is one number."""
    if dtype == tl.float32:
        return word.to(tl.float32, bitcast=True)
    elif dtype == tl.bfloat16:
        return (word & -65536).to(tl.float32, bitcast=True)
    else:
        return (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _word(low, high, dtype: tl.constexpr):
    if dtype == tl.float32:
        return low.to(tl.int32, bitcast=True)
    else:
        first = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 65535
        second = high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16
        return first | second


@triton.jit
def _square(word, dtype: tl.constexpr):
    low = _low(word, dtype)
    if dtype == tl.float32:
        return low * low
    else:
        high = _high(word, dtype)
        return low * low + high * high


@triton.jit
def _normed(word, weight, scale, dtype: tl.constexpr):
    # rounded before the weight, as the reference implementations do
    low = (_low(word, dtype) * scale).to(dtype).to(tl.float32) * _low(weight, dtype)
    high = (_high(word, dtype) * scale).to(dtype).to(tl.float32) * _high(weight, dtype)
    return _word(low, high, dtype)


@triton.jit(do_not_specialize=["total"])
def one_shot(
    x_ptr,
    y_ptr,
    weight_ptr,
    normed_ptr,
    places_ptr,
    launches_ptr,
    total,
    row,
    eps,
    width,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    CHANNEL: tl.constexpr,
    SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = sum of x over the ranks; with NORM also normed = y / sqrt(mean(y^2) + eps) * weight.

    Lengths are in pieces of 16 bytes: x, y and normed have `total`; program p has `row` of them
    (at most BLOCK) from p * row on. y may be x.
    places: int64 [RANKS + 3], the memory of each rank as mapped here, the page of the host, and the
    two words that waiting threads of this device share.
    launches: int32, one per program. CHANNEL: bytes before this channel; it has two halves of RANKS
    slots of SLOT bytes, one for each sender. With NORM a row is one row of `width` numbers.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    program = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    inside = ((index < row) & (program * row + index < total)).to(tl.int32)
    at = (program * row + index).to(tl.int64) * 16
    part = CHANNEL + (program * BLOCK + index).to(tl.int64) * 16
    page = tl.load(places_ptr + RANKS)
    notes = (places_ptr + RANKS + 1).to(tl.int64)
    own = tl.load(places_ptr + RANK)
    if NORM:
        # no kernel writes weights, so they need not wait
        w0, w1, w2, w3 = _load(weight_ptr.to(tl.int64) + index.to(tl.int64) * 16, inside)
    if PDL:
        gdc_wait()
        # not earlier: programs of the next kernel would take their places beside those of the
        # product before this sum, where there is room, and be spread unevenly for all their time
        gdc_launch_dependents()
    launch = tl.load(launches_ptr + program, cache_modifier=".cg")
    x0, x1, x2, x3 = _load(x_ptr.to(tl.int64) + at, inside)
    x0, x1, x2, x3 = _unmarked(x0), _unmarked(x1), _unmarked(x2), _unmarked(x3)
    half = part + (launch & 1).to(tl.int64) * (RANKS * SLOT)
    for step in tl.static_range(1, RANKS):
        # each rank begins with its next, so that no receiver gets from all at once
        there = tl.load(places_ptr + (RANK + step) % RANKS)
        _store(there + half + RANK * SLOT, x0, x1, x2, x3, inside)
    if RANKS > 2:
        # so that the loads of all peers are under way together
        early = ()
        for peer in tl.static_range(RANKS):
            early = early + (_load(own + half + peer * SLOT, inside),)
    for peer in tl.static_range(RANKS):
        if peer == RANK:
            a, b, c, d = x0, x1, x2, x3
        else:
            here = own + half + peer * SLOT
            if RANKS > 2:
                a, b, c, d = early[peer]
            else:
                a, b, c, d = _load(here, inside)
            a, b, c, d = _arrived(a, b, c, d, here, page, notes, inside)
            mark = tl.full([BLOCK], -1, tl.int32)
            _store(here, mark, mark, mark, mark, inside)
        if peer == 0:
            l0, l1, l2, l3 = _low(a, dtype), _low(b, dtype), _low(c, dtype), _low(d, dtype)
            h0, h1, h2, h3 = _high(a, dtype), _high(b, dtype), _high(c, dtype), _high(d, dtype)
        else:
            l0, l1 = l0 + _low(a, dtype), l1 + _low(b, dtype)
            l2, l3 = l2 + _low(c, dtype), l3 + _low(d, dtype)
            h0, h1 = h0 + _high(a, dtype), h1 + _high(b, dtype)
            h2, h3 = h2 + _high(c, dtype), h3 + _high(d, dtype)
    y0, y1 = _word(l0, h0, dtype), _word(l1, h1, dtype)
    y2, y3 = _word(l2, h2, dtype), _word(l3, h3, dtype)
    _store(y_ptr.to(tl.int64) + at, y0, y1, y2, y3, inside)
    if NORM:
        square = _square(y0, dtype) + _square(y1, dtype) + _square(y2, dtype) + _square(y3, dtype)
        scale = tl.rsqrt(tl.sum(square) / width + eps)
        n0, n1 = _normed(y0, w0, scale, dtype), _normed(y1, w1, scale, dtype)
        n2, n3 = _normed(y2, w2, scale, dtype), _normed(y3, w3, scale, dtype)
        _store(normed_ptr.to(tl.int64) + at, n0, n1, n2, n3, inside)
    tl.debug_barrier()  # all threads have read the number of launches
    tl.store(launches_ptr + program, launch + 1)

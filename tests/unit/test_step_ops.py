"""The plain forms of the ops around a decode step against what the model and the runner do."""

from __future__ import annotations

import pytest
import torch

from tp_runtime.attention import KvCache
from tp_runtime.device_state import DeviceState
from tp_runtime.models.base import ModelShape
from tp_runtime.ops.gather import gather_rows
from tp_runtime.ops.kernels import power_of_two, runs_kernels
from tp_runtime.ops.norm import rms_norm
from tp_runtime.ops.rope import RopeTable, rotate
from tp_runtime.ops.rope_append import first_rows, rope_append
from tp_runtime.ops.step_state import begin_step, end_step

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE = 6, 2, 8, 4
CPU = torch.device("cpu")


def cache() -> KvCache:
    shape = ModelShape(
        num_layers=1, q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, vocab_size=10,
        vocab_start=0, vocab_end=10, max_positions=64, dtype=torch.float32,
    )  # fmt: skip
    return KvCache(shape, num_pages=9, page_size=PAGE, device=CPU)


def rope() -> RopeTable:
    return RopeTable(HEAD_DIM, theta=1e4, max_positions=64, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("normed", [False, True])
def test_rope_append_is_norm_rotate_and_append(normed: bool) -> None:
    torch.manual_seed(3)
    positions = torch.tensor([0, 3, 4, 17])
    pages = torch.tensor([8, 1, 5, 2], dtype=torch.int32)
    qkv = torch.randn(4, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM)
    q_norm, k_norm = torch.rand(HEAD_DIM), torch.rand(HEAD_DIM)
    cos, sin = rope().at(positions)

    heads = qkv.view(4, -1, HEAD_DIM)
    q, k, v = torch.split(heads, [Q_HEADS, KV_HEADS, KV_HEADS], 1)
    if normed:
        q, k = rms_norm(q, q_norm, 1e-5), rms_norm(k, k_norm, 1e-5)
    expected = cache()
    expected.append(0, expected.rows_of(pages, positions), rotate(k, cos, sin), v)

    got = cache()
    rows = first_rows(pages, positions, kv_heads=KV_HEADS, page_size=PAGE)
    assert torch.equal(rows, got.rows_of(pages, positions))
    norms = {"q_norm": q_norm, "k_norm": k_norm} if normed else {}
    before = qkv.clone()
    out = rope_append(qkv, cos, sin, rows, got.k[0], got.v[0], eps=1e-5, **norms)
    assert out.is_contiguous()
    torch.testing.assert_close(out, rotate(q, cos, sin))
    torch.testing.assert_close(got.k[0], expected.k[0])
    assert torch.equal(got.v[0], expected.v[0])
    assert torch.equal(qkv, before)


def test_rope_append_says_what_does_not_fit() -> None:
    kv, (cos, sin) = cache(), rope().at(torch.tensor([1, 2]))
    qkv, rows = torch.randn(2, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM), torch.tensor([0, 1])
    k, v = kv.k[0], kv.v[0]
    with pytest.raises(ValueError, match="columns, expected"):
        rope_append(qkv[:, :-1], cos, sin, rows, k, v)
    with pytest.raises(ValueError, match=r"rows: expected int64 \(2,\)"):
        rope_append(qkv, cos, sin, rows.int(), k, v)
    with pytest.raises(ValueError, match="cos, sin: expected 2 rows"):
        rope_append(qkv, cos[:1], sin[:1], rows, k, v)
    with pytest.raises(ValueError, match="both or neither"):
        rope_append(qkv, cos, sin, rows, k, v, q_norm=torch.ones(HEAD_DIM))
    with pytest.raises(ValueError, match="throughout"):
        rope_append(qkv.double(), cos, sin, rows, k, v)
    with pytest.raises(ValueError, match="v_cache"):
        rope_append(qkv, cos, sin, rows, k, v[:1])


def state() -> DeviceState:
    """Four slots and the dummy, with lengths at both sides of a page's border."""
    s = DeviceState(slots=4, table_width=5, pages_per_block=1, device=CPU)
    s.length[:4] = torch.tensor([0, PAGE - 1, PAGE, 5 * PAGE - 1])
    s.last_token[:4] = torch.tensor([5, 6, 7, 8])
    s.block_table[:4] = torch.arange(1, 21, dtype=torch.int32).view(4, 5)
    s.temperature[:4] = torch.tensor([0.0, 0.5, 1.0, 2.0])
    s.seed[:4] = torch.tensor([2**62, 1, 2, 3])
    s.top_k[:4] = torch.tensor([0, 9, 0, 40])
    s.top_p[:4] = torch.tensor([1.0, 0.9, 0.8, 0.7])
    s.min_p[:4] = torch.tensor([0.0, 0.1, 0.2, 0.3])
    return s


def test_begin_step_gathers_by_slot() -> None:
    s, slots = state(), torch.tensor([3, 1, 2, 0, 4, 4])
    got = begin_step(slots, s, kv_heads=KV_HEADS, page_size=PAGE)
    lengths = [5 * PAGE - 1, PAGE - 1, PAGE, 0, 0, 0]
    assert got.positions.tolist() == lengths
    assert got.next_positions.tolist() == [n + 1 for n in lengths]
    assert got.kv_lens.tolist() == [n + 1 for n in lengths]
    assert got.kv_lens.dtype == torch.int32
    assert got.token_ids.tolist() == [8, 6, 7, 5, 0, 0]
    assert torch.equal(got.block_table, s.block_table[slots])
    pages = torch.tensor([20, 6, 12, 1, 0, 0])
    expected = cache().rows_of(pages, got.positions)
    assert torch.equal(got.cache_rows, expected)
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        assert torch.equal(getattr(got, name), getattr(s, name)[slots])


def test_gathered_rows_are_those_of_this_slice() -> None:
    a, b = torch.randn(4, 6), torch.randn(4, 6)
    index = torch.tensor([13, 9, 10, 14, 0])
    for got, table in zip(gather_rows(index, a, b, start=10), (a, b), strict=True):
        expected = torch.zeros(5, 6)
        expected[0], expected[2] = table[3], table[0]
        assert torch.equal(got, expected)
    assert index.tolist() == [13, 9, 10, 14, 0]
    (alone,) = gather_rows(torch.tensor([2]), a)
    assert torch.equal(alone, a[2:3])
    for tables in ((), (a, b, a), (a, b[:3]), (a, b.double())):
        with pytest.raises(ValueError, match="one or two tables"):
            gather_rows(index, *tables)


def test_end_step_advances_all_but_the_dummy() -> None:
    s = state()
    before = s.length.clone()
    end_step(torch.tensor([2, 4, 0, 4]), torch.tensor([70, 71, -1, 72]), s)
    assert s.last_token.tolist() == [0, 6, 70, 8, 0]
    assert (s.length - before).tolist() == [1, 0, 1, 0, 0]
    with pytest.raises(ValueError, match="tokens: expected"):
        end_step(torch.tensor([2]), torch.tensor([1, 2]), s)


def test_a_cpu_runs_the_plain_forms() -> None:
    assert not runs_kernels(CPU)
    assert [power_of_two(n) for n in (1, 2, 3, 4, 5, 126)] == [1, 2, 4, 4, 8, 128]

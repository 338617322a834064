"""The plain forms of the ops around a decode step against what the model and the runner do."""

from __future__ import annotations

import pytest
import torch

from tp_runtime.attention import KvCache
from tp_runtime.models.base import ModelShape
from tp_runtime.ops.norm import rms_norm
from tp_runtime.ops.rope import RopeTable, rotate
from tp_runtime.ops.rope_append import first_rows, rope_append

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
    q, k, v = torch.split(heads, (Q_HEADS, KV_HEADS, KV_HEADS), 1)
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

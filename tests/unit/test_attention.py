"""The paged cache and the attention of a step against plain attention over whole sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F

from tp_runtime.attention import DecodeRows, KvCache, PromptChunk, StepAttention
from tp_runtime.models.base import ModelShape

if TYPE_CHECKING:
    from tp_runtime.selection.base import DecodeShape, DecodeStep, DeviceInfo, PagedKV

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM, PAGE = 6, 2, 8, 4


def shape(layers: int = 2) -> ModelShape:
    return ModelShape(
        num_layers=layers,
        q_heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=10,
        vocab_start=0,
        vocab_end=10,
        max_positions=64,
        dtype=torch.float32,
    )


class Gathering:
    """The plainest decode backend: rebuild each row from its pages."""

    name = "gathering"
    needs_host_lengths = False

    @staticmethod
    def refusal(shape: DecodeShape, device: DeviceInfo) -> str | None:
        return None

    def prepare_for_capture(self, bucket: int) -> None: ...

    def prepare(self, step: DecodeStep) -> None: ...

    def forward(self, q: torch.Tensor, kv: PagedKV, out: torch.Tensor) -> None:
        for row in range(q.shape[0]):
            length = int(kv.kv_lens[row])
            pages = kv.block_table[row].long()
            k = kv.k[pages].transpose(0, 1).reshape(KV_HEADS, -1, HEAD_DIM)[:, :length]
            v = kv.v[pages].transpose(0, 1).reshape(KV_HEADS, -1, HEAD_DIM)[:, :length]
            out[row] = F.scaled_dot_product_attention(
                q[row][None, :, None], k[None], v[None], enable_gqa=True
            )[0, :, 0]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_dim] in, the same out; float64."""
    out = F.scaled_dot_product_attention(
        q.double().transpose(0, 1)[None],
        k.double().transpose(0, 1)[None],
        v.double().transpose(0, 1)[None],
        is_causal=True,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def sequence(length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.randn(length, HEADS, HEAD_DIM),
        torch.randn(length, KV_HEADS, HEAD_DIM),
        torch.randn(length, KV_HEADS, HEAD_DIM),
    )


@pytest.mark.parametrize("chunks", [(13,), (4, 4, 5), (1, 12), (5, 3, 5), (12, 1)])
@pytest.mark.parametrize("poison", [0.0, float("nan")])
def test_a_prompt_in_chunks_is_the_prompt_in_one(chunks: tuple[int, ...], poison: float) -> None:
    torch.manual_seed(0)
    cache = KvCache(shape(), num_pages=9, page_size=PAGE, device=CPU)
    for layer in (0, 1):
        cache.k[layer].fill_(poison)
        cache.v[layer].fill_(poison)
    table = torch.tensor([7, 2, 5, 1])
    q, k, v = sequence(13)
    start, outs = 0, []
    for size in chunks:
        end = start + size
        where = torch.arange(start, end)
        attention = StepAttention(
            cache,
            cache_rows=cache.rows_of(table[where // PAGE], where),
            decode=None,
            chunks=[PromptChunk.make(start=start, end=end, pages=table[: -(-end // PAGE)])],
        )
        outs.append(attention(1, q[start:end], k[start:end], v[start:end]))
        start = end
    torch.testing.assert_close(torch.cat(outs).double(), causal(q, k, v), atol=1e-5, rtol=1e-5)
    keys, values = cache.prefix(1, table, 13)
    assert torch.equal(keys, k.transpose(0, 1))
    assert torch.equal(values, v.transpose(0, 1))
    if poison == 0.0:
        assert not cache.k[0].any(), "another layer was written"


def test_decode_rows_and_chunks_share_a_step() -> None:
    torch.manual_seed(1)
    cache = KvCache(shape(1), num_pages=16, page_size=PAGE, device=CPU)
    tables = torch.tensor([[3, 9, 4], [8, 1, 0], [6, 7, 0]], dtype=torch.int32)
    old = [sequence(9), sequence(4), sequence(6)]
    for row in (0, 1):
        q, k, v = old[row]
        before = torch.arange(len(q) - 1)
        pages = tables[row].long()[before // PAGE]
        cache.append(0, cache.rows_of(pages, before), k[:-1], v[:-1])
    # two rows decode their last token while the third prompt comes in whole
    positions = torch.tensor([8, 3])
    pages = tables[:2].gather(1, (positions // PAGE)[:, None])[:, 0]
    where = torch.arange(6)
    rows = torch.cat(
        [cache.rows_of(pages, positions), cache.rows_of(tables[2].long()[where // PAGE], where)]
    )
    attention = StepAttention(
        cache,
        cache_rows=rows,
        decode=DecodeRows(
            backend=Gathering(), block_table=tables[:2], kv_lens=(positions + 1).int()
        ),
        chunks=[PromptChunk.make(start=0, end=6, pages=tables[2].long()[:2])],
    )
    q, k, v = (torch.cat([old[0][i][-1:], old[1][i][-1:], old[2][i]]) for i in range(3))
    out = attention(0, q, k, v).double()
    for row in (0, 1):
        torch.testing.assert_close(out[row], causal(*old[row])[-1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out[2:], causal(*old[2]), atol=1e-5, rtol=1e-5)

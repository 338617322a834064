"""The kernels around a decode step against their plain forms, eager, captured and in chains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tp_runtime.device_state import DeviceState
from tp_runtime.ops.gather import gather_rows, gather_rows_reference
from tp_runtime.ops.rope import RopeTable
from tp_runtime.ops.rope_append import first_rows, rope_append, rope_append_reference
from tp_runtime.ops.step_state import (
    StepRows,
    begin_step,
    begin_step_reference,
    end_step,
    end_step_reference,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
GUARD = 1e4  # what lies in memory that must not be written


def captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


class Heads:
    """Random inputs of `rope_append` on distinct rows of a cache that is full of GUARD."""

    def __init__(
        self, tokens: int, q_heads: int, kv_heads: int, head_dim: int, page: int,
        dtype: torch.dtype, padded: int = 0, seed: int = 0,
    ) -> None:  # fmt: skip
        torch.manual_seed(seed)
        count = tokens // page + 3
        make: Any = {"dtype": dtype, "device": "cuda"}
        width = (q_heads + 2 * kv_heads) * head_dim
        self.qkv = torch.randn(tokens, width + 16, **make)[:, :width]
        table = RopeTable(
            head_dim, theta=5e5, max_positions=4096, dtype=dtype, device=torch.device("cuda")
        )
        self.positions = torch.randint(0, 4096, (tokens,), device="cuda")
        self.cos, self.sin = table.at(self.positions)
        # distinct places, the first and the last of the cache among them
        place = torch.randperm(count * page - 2, device="cuda")[:tokens] + 1
        place[0] = 0
        place[-1] = count * page - 1
        if padded:
            place[tokens - padded :] = 0
            self.qkv[tokens - padded :] = self.qkv[0]
            self.cos[tokens - padded :] = self.cos[0]
            self.sin[tokens - padded :] = self.sin[0]
        self.rows = first_rows(place // page, place % page, kv_heads=kv_heads, page_size=page)
        self.k = torch.full((count, kv_heads, page, head_dim), GUARD, **make)
        self.v = self.k.clone()
        self.norms: dict[str, Any] = {
            "q_norm": torch.rand(head_dim, **make), "k_norm": torch.rand(head_dim, **make),
        }  # fmt: skip

    def run(self, form: Callable[..., torch.Tensor], normed: bool) -> tuple[torch.Tensor, ...]:
        k, v = self.k.clone(), self.v.clone()
        norms = self.norms if normed else {}
        q = form(self.qkv, self.cos, self.sin, self.rows, k, v, eps=1e-6, **norms)
        return q, k, v


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    "shape",
    [
        (1, 32, 8, 128, 64), (7, 4, 1, 128, 16), (32, 28, 4, 128, 64), (5, 16, 8, 64, 32),
        (512, 32, 8, 128, 64), (33, 8, 4, 256, 128), (3, 3, 1, 64, 16),
    ],
)  # fmt: skip
def test_rope_append(shape: tuple[int, ...], dtype: torch.dtype, normed: bool) -> None:
    tokens, q_heads, kv_heads, head_dim, page = shape
    padded = 2 if 4 < tokens < 100 else 0
    heads = Heads(tokens, q_heads, kv_heads, head_dim, page, dtype, padded)
    got, expected = heads.run(rope_append, normed), heads.run(rope_append_reference, normed)
    limit = TOLERANCE[dtype]
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit)
    # what was not a token's stayed as it was, to the bit
    assert torch.equal(got[1] == GUARD, expected[1] == GUARD)
    assert torch.equal(got[2], expected[2])


def test_rope_append_replayed_in_a_chain() -> None:
    heads = Heads(8, 32, 8, 128, 64, torch.bfloat16)
    layers = [(heads.k.clone(), heads.v.clone()) for _ in range(24)]
    width = heads.qkv.shape[1]

    def chain(form: Any) -> Any:
        # every launch reads what the one before has just written, in the same memory
        qkv = heads.qkv.clone()
        for k, v in layers:
            q = form(qkv, heads.cos, heads.sin, heads.rows, k, v)
            qkv[:, : q.shape[1] * q.shape[2]] = q.flatten(1)
        return qkv

    graph, out = captured(lambda: chain(rope_append))
    for seed in range(5):
        heads.qkv.copy_(Heads(8, 32, 8, 128, 64, torch.bfloat16, seed=seed).qkv)
        expected = chain(rope_append_reference)
        want = [(k.clone(), v.clone()) for k, v in layers]
        for k, v in layers:
            k.fill_(GUARD)
            v.fill_(GUARD)
        graph.replay()
        assert out.shape == (8, width)
        torch.testing.assert_close(out, expected, rtol=0.1, atol=0.1)
        rows = heads.rows[:, None] + torch.arange(8, device="cuda") * 64
        for (k, v), (wanted_k, wanted_v) in zip(layers, want, strict=True):
            assert torch.equal(v, wanted_v)
            got = k.view(-1, 128)[rows.flatten()]
            torch.testing.assert_close(
                got, wanted_k.view(-1, 128)[rows.flatten()], rtol=0.1, atol=0.1
            )


def some_state(slots: int, width: int, page: int, seed: int) -> DeviceState:
    generator = torch.Generator().manual_seed(seed)
    s = DeviceState(slots=slots, table_width=width, pages_per_block=1, device=torch.device("cuda"))

    def draw(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator)

    length = draw(0, width * page, slots)
    borders = torch.tensor([0, page - 1, page, page + 1, width * page - 1, width * page - page])
    length[: len(borders)] = borders[:slots]
    s.length[:slots] = length.cuda()
    s.last_token[:slots] = draw(0, 128_256, slots).cuda()
    s.block_table[:slots] = draw(1, 2**30, slots, width).to(torch.int32).cuda()
    s.temperature[:slots] = torch.rand(slots, generator=generator).cuda()
    s.top_p[:slots] = torch.rand(slots, generator=generator).cuda()
    s.min_p[:slots] = torch.rand(slots, generator=generator).cuda()
    s.top_k[:slots] = draw(0, 100, slots).cuda()
    s.seed[:slots] = draw(0, 2**62, slots).cuda()
    return s


def assert_rows_equal(got: StepRows, expected: StepRows) -> None:
    for name in StepRows.__slots__:
        ours, theirs = getattr(got, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert ours.dtype == theirs.dtype, name
            assert ours.is_contiguous(), name
            assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(
    ("rows", "width", "page"), [(1, 1, 16), (8, 129, 64), (32, 2048, 64), (200, 40, 16)]
)
def test_begin_and_end_of_a_step(rows: int, width: int, page: int) -> None:
    s = some_state(256, width, page, seed=rows)
    # no slot twice, and those at the borders first
    slots = torch.cat((torch.arange(6), torch.randperm(250) + 6))[:rows].cuda()
    slots[rows - rows // 4 :] = s.dummy_slot
    where: Any = {"kv_heads": 8, "page_size": page}
    assert_rows_equal(begin_step(slots, s, **where), begin_step_reference(slots, s, **where))

    other = SimpleNamespace(**vars(s))
    other.last_token, other.length = s.last_token.clone(), s.length.clone()
    tokens = torch.randint(-1, 1000, (rows,), device="cuda")
    end_step(slots, tokens, s)
    end_step_reference(slots, tokens, other)
    assert torch.equal(s.last_token, other.last_token)
    assert torch.equal(s.length, other.length)
    assert s.length[s.dummy_slot] == s.last_token[s.dummy_slot] == 0


def test_steps_in_one_graph_see_each_other() -> None:
    s = some_state(64, 64, 64, seed=1)
    s.length[:64] = torch.randint(0, 60, (64,), device="cuda")
    other = SimpleNamespace(**vars(s))
    slots = torch.arange(32, device="cuda") * 2
    slots[28:] = s.dummy_slot
    where: Any = {"kv_heads": 2, "page_size": 64}

    def steps(state: Any, begin: Any, end: Any) -> StepRows:
        for _ in range(20):
            rows = begin(slots, state, **where)
            end(slots, rows.token_ids * 3 % 1009 + rows.positions, state)
        made: StepRows = begin(slots, state, **where)
        return made

    held = s.length.clone(), s.last_token.clone()
    graph, out = captured(lambda: steps(s, begin_step, end_step))
    for shift in range(4):
        s.length.copy_(held[0])
        s.last_token.copy_(held[1])
        s.last_token[:64] += shift
        other.length, other.last_token = s.length.clone(), s.last_token.clone()
        graph.replay()
        assert_rows_equal(out, steps(other, begin_step_reference, end_step_reference))
        assert torch.equal(s.length, other.length)
        assert torch.equal(s.last_token, other.last_token)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("count", "rows", "width", "tables"),
    [(1, 9, 128, 2), (33, 500, 4096, 1), (7, 40, 1000, 2), (2000, 64, 64, 1), (0, 4, 8, 1)],
)
def test_gather_rows(count: int, rows: int, width: int, tables: int, dtype: torch.dtype) -> None:
    torch.manual_seed(count)
    made = [torch.randn(rows, width, device="cuda").to(dtype) for _ in range(tables)]
    index = torch.randint(100 - rows // 4, 100 + rows + rows // 4, (count,), device="cuda")
    index[:2] = torch.tensor([100, 100 + rows - 1], device="cuda")[:count]
    got = gather_rows(index, *made, start=100)
    for ours, theirs in zip(got, gather_rows_reference(index, *made, start=100), strict=True):
        assert ours.dtype == dtype
        assert ours.is_contiguous()
        assert torch.equal(ours, theirs)

"""Every backend against the reference, and the reference against a few lines of float64."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tp_runtime.errors import SelectionError
from tp_runtime.selection.base import DecodeBackend, DecodeShape, DecodeStep, DeviceInfo, PagedKV
from tp_runtime.selection.registry import PRIORITY, BackendSet

CPU = torch.device("cpu")
FAST = [name for name in PRIORITY if name.startswith("cpu_")]
HERE = [*FAST, "torch_reference"]
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Problem:
    """One random step: garbage in table tails, NaN in page tails, padded rows of length 1."""

    def __init__(
        self,
        shape: DecodeShape,
        lengths: list[int],
        *,
        seed: int,
        padded: int = 0,
        consecutive: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        dtype = DTYPES[shape.dtype]
        rows = len(lengths) + padded
        self.shape = shape
        lens = np.array(lengths + [1] * padded, np.int32)
        needed = [-(-int(n) // shape.page_size) for n in lens]
        total = sum(needed)
        size = (total + 1, shape.kv_heads, shape.page_size, shape.head_dim)
        k = torch.randn(size, generator=generator).to(dtype)
        v = torch.randn(size, generator=generator).to(dtype)
        order = torch.arange(total) if consecutive else torch.randperm(total, generator=generator)
        table = torch.full((rows, shape.table_width), 2**31 - 1, dtype=torch.int32)
        table[:, 1::2] = -7
        start = 0
        for row, count in enumerate(needed):
            table[row, :count] = order[start : start + count].to(torch.int32)
            tail = int(lens[row]) - (count - 1) * shape.page_size
            k[table[row, count - 1], :, tail:] = float("nan")
            v[table[row, count - 1], :, tail:] = float("nan")
            start += count
        k[total], v[total] = float("nan"), float("nan")  # nobody's page
        self.q = torch.randn(
            (rows * shape.q_len, shape.q_heads, shape.head_dim), generator=generator
        ).to(dtype)
        self.kv = PagedKV(k=k, v=v, block_table=table, kv_lens=torch.from_numpy(lens.copy()))
        self.step = DecodeStep(batch_size=len(lengths), kv_lens=lens, bucket=rows)

    def run(self, backend: DecodeBackend) -> torch.Tensor:
        out = torch.full_like(self.q, float("nan"))
        backend.prepare(self.step)
        backend.forward(self.q, self.kv, out)
        return out

    def exact(self) -> torch.Tensor:
        """Plain attention in float64, one row, query and head at a time."""
        shape, kv = self.shape, self.kv
        out = torch.empty(self.q.shape, dtype=torch.float64)
        for row, length in enumerate(self.step.kv_lens.tolist()):
            pages = kv.block_table[row, : -(-length // shape.page_size)].long()
            for place in range(shape.q_len):
                seen = length - (shape.q_len - 1 - place)
                for head in range(shape.q_heads):
                    kv_head = head // shape.group_size
                    k = kv.k[pages, kv_head].reshape(-1, shape.head_dim)[:seen].double()
                    v = kv.v[pages, kv_head].reshape(-1, shape.head_dim)[:seen].double()
                    token = row * shape.q_len + place
                    scores = k @ self.q[token, head].double() / shape.head_dim**0.5
                    out[token, head] = torch.softmax(scores, 0) @ v
        return out


def shape_of(**changes: Any) -> DecodeShape:
    base = DecodeShape(
        q_heads=6, kv_heads=2, head_dim=16, dtype="float32", page_size=16, table_width=12
    )
    return replace(base, **changes)


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_matches_float64(name: str, dtype: str, page_size: int, group: int) -> None:
    shape = shape_of(q_heads=2 * group, dtype=dtype, page_size=page_size, head_dim=8)
    lengths = [1, page_size - 1, page_size, page_size + 1, 5 * page_size, 11 * page_size + 3]
    problem = Problem(shape, lengths, seed=group, padded=2)
    got = problem.run(BackendSet(shape, CPU)[name])
    assert got.isfinite().all()
    torch.testing.assert_close(
        got.double(), problem.exact(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("consecutive", [False, True])
def test_matches_reference_on_random_batches(name: str, consecutive: bool) -> None:
    rng = random.Random(f"{name} {consecutive}")
    reference_of: dict[DecodeShape, BackendSet] = {}
    for case in range(40):
        kv_heads = rng.choice([1, 2, 3])
        shape = shape_of(
            q_heads=kv_heads * rng.choice([1, 3, 4, 7]),
            kv_heads=kv_heads,
            head_dim=rng.choice([16, 64]),
            page_size=rng.choice([16, 64]),
        )
        backends = reference_of.setdefault(shape, BackendSet(shape, CPU))
        lengths = [rng.randint(1, shape.max_kv_len) for _ in range(rng.choice([1, 2, 5, 13]))]
        if rng.random() < 0.3:
            lengths = [lengths[0]] * len(lengths)
        problem = Problem(
            shape, lengths, seed=case, padded=rng.choice([0, 3]), consecutive=consecutive
        )
        expected = problem.run(backends["torch_reference"])
        torch.testing.assert_close(problem.run(backends[name]), expected, rtol=2e-5, atol=2e-5)


def test_batches_larger_than_one_chunk() -> None:
    shape = shape_of(head_dim=64, page_size=64, table_width=40)
    problem = Problem(shape, [2000, 2500, 30, 2490, 2560, 700, 2001], seed=3)
    backends = BackendSet(shape, CPU)
    expected = problem.run(backends["torch_reference"])
    for name in FAST:
        torch.testing.assert_close(problem.run(backends[name]), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", HERE)
def test_next_step_reads_the_new_table(name: str) -> None:
    shape = shape_of()
    backend = BackendSet(shape, CPU)[name]
    problem = Problem(shape, [40, 100], seed=5)
    problem.run(backend)
    # the rows swap places in the same tensors, as a static buffer would have it
    problem.kv.block_table.copy_(problem.kv.block_table.flip(0))
    problem.kv.kv_lens.copy_(problem.kv.kv_lens.flip(0))
    problem.step = DecodeStep(batch_size=2, kv_lens=problem.step.kv_lens[::-1].copy(), bucket=2)
    torch.testing.assert_close(problem.run(backend).double(), problem.exact(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("q_len", [2, 5])
def test_reference_is_causal_over_several_queries(q_len: int) -> None:
    shape = shape_of(q_len=q_len)
    problem = Problem(shape, [q_len, 17, 190], seed=q_len)
    got = problem.run(BackendSet(shape, CPU)["torch_reference"])
    torch.testing.assert_close(got.double(), problem.exact(), rtol=2e-5, atol=2e-5)


def test_reference_does_not_depend_on_the_part_size(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of()
    problem = Problem(shape, [5, 190, 44], seed=2)
    whole = problem.run(BackendSet(shape, CPU)["torch_reference"])
    monkeypatch.setattr("tp_runtime.selection.backends.torch_reference._MAX_GATHERED", 1)
    parts = problem.run(BackendSet(shape, CPU)["torch_reference"])
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", FAST)
def test_refusals_are_static_and_named(name: str) -> None:
    kind = type(BackendSet(shape_of(), CPU)[name])
    cpu = DeviceInfo(type="cpu", name="cpu")
    assert kind.refusal(shape_of(), cpu) is None
    assert "CPU only" in (kind.refusal(shape_of(), DeviceInfo(type="cuda", name="x")) or "")
    assert "q_len 2" in (kind.refusal(shape_of(q_len=2), cpu) or "")
    assert "multiple" in (kind.refusal(shape_of(q_heads=7), cpu) or "")
    assert "float8" in (kind.refusal(shape_of(kv_dtype="float8_e4m3fn"), cpu) or "")


@pytest.mark.parametrize("name", FAST)
def test_forward_before_prepare_is_named(name: str) -> None:
    shape = shape_of()
    problem = Problem(shape, [3], seed=1)
    with pytest.raises(SelectionError, match=f"{name}.*never called"):
        BackendSet(shape, CPU)[name].forward(problem.q, problem.kv, torch.empty_like(problem.q))

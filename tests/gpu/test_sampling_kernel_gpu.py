"""The sampling kernels against the plain forms on the same device."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tp_runtime.ops import sampling, sampling_gpu
from tp_runtime.ops.noise import gumbel, row_keys

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [(1, 128_256), (32, 128_256), (9, 1000), (70, 50_257), (3, 1)]
CLOSE = 1e-5  # two scores this close may come in either order


def batch(rows: int, vocab: int, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    make: Any = {"device": "cuda", "generator": generator}
    values = {
        "logits": (torch.randn(rows, vocab, **make) * 3).to(dtype),
        "temperature": torch.rand(rows, **make) * 1.5,
        "top_k": torch.randint(0, 80, (rows,), **make),
        "top_p": 0.3 + 0.7 * torch.rand(rows, **make),
        "min_p": torch.rand(rows, **make) * 0.1,
        "seed": torch.randint(0, 2**62, (rows,), **make),
        "position": torch.randint(0, 2**20, (rows,), **make),
    }
    values["temperature"][4::7] = 0.0
    values["top_k"][1::3] = 0
    values["top_p"][2::4] = 1.0
    values["min_p"][::2] = 0.0
    if rows > 8:
        logits = values["logits"]
        logits[3, vocab // 2] = torch.nan
        logits[5] = -torch.inf
        logits[6, [vocab // 3, vocab - 1]] = torch.inf
        logits[7] = 0.25  # all equal
        logits[8, 5:] = -torch.inf
    return values


def tokens_of(score: Tensor, ids: Tensor) -> Tensor:
    return sampling._decode(sampling._encode(score, ids))


def scores_of(values: dict[str, Tensor]) -> Tensor:
    logits = values["logits"].float()
    noise = gumbel(row_keys(values["seed"], values["position"]), 0, logits.shape[1])
    return logits + values["temperature"][:, None] * noise


def assert_same_choice(got: Tensor, expected: Tensor, values: dict[str, Tensor]) -> None:
    """Equal, or both at scores so close that a logarithm's last bit decides."""
    score = scores_of(values)
    for row in (got != expected).nonzero().flatten().tolist():
        ours, theirs = int(got[row]), int(expected[row])
        assert ours >= 0, (row, theirs)
        assert theirs >= 0, (row, ours)
        assert abs(float(score[row, ours] - score[row, theirs])) <= CLOSE, (row, ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_greedy_and_random(size: tuple[int, int], dtype: torch.dtype) -> None:
    for seed in range(4):
        values = batch(*size, dtype, seed)
        logits = values["logits"]
        plain = sampling.greedy(logits.float(), 0)
        assert torch.equal(sampling_gpu.best_tokens(logits), tokens_of(*plain))
        noise = (values["temperature"], values["seed"], values["position"])
        expected = tokens_of(*sampling.random(logits.float(), 0, *noise))
        assert_same_choice(sampling_gpu.best_tokens(logits, *noise), expected, values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_of_ranks_make_the_whole(dtype: torch.dtype) -> None:
    values = batch(20, 12_001, dtype, 3)
    logits, noise = values["logits"], (values["temperature"], values["seed"], values["position"])
    borders = [0, 4096, 9001, 12_001]
    for more in ((), noise):
        keys = [sampling_gpu.best_keys(logits[:, a:b], a, *more) for a, b in pairwise(borders)]
        whole = sampling_gpu.best_tokens(logits, *more)
        assert torch.equal(sampling_gpu.tokens_of_keys(torch.stack(keys)), whole)


def kept_by_sort(values: dict[str, Tensor]) -> Tensor:
    """bool [rows, vocab] of top-k and top-p alone, as `sampling.filtered` finds it."""
    logits, heat = values["logits"].float(), values["temperature"][:, None].double()
    vocab = logits.shape[1]
    ordered, order = torch.sort(logits, dim=1, descending=True, stable=True)
    distance = torch.where(ordered == ordered[:, :1], 0.0, ordered.double() - ordered[:, :1])
    weight = torch.exp(distance / heat)
    rank = torch.arange(vocab, device="cuda")[None, :]
    limit = torch.where(values["top_k"] > 0, values["top_k"], vocab)[:, None]
    weight = torch.where(rank < limit, weight, 0.0)
    sums = torch.cumsum(weight, 1)
    p = values["top_p"][:, None].double()
    kept = (rank < limit) & ((sums - weight < p * sums[:, -1:]) | (p >= 1.0))
    return torch.empty_like(kept).scatter_(1, order, kept)


def kept_by_cut(values: dict[str, Tensor]) -> Tensor:
    logits = values["logits"].float()
    _, state = sampling_gpu.find_cut(
        values["logits"], values["temperature"], values["top_k"], values["top_p"]
    )
    bits = (logits + 0.0).view(torch.int32).to(torch.int64)
    falling = 0x7FFFFFFF - torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    tie = falling == state[:, 6:7]
    place = torch.cumsum(tie.int(), 1)
    some = (state[:, 7:8] < 0) | (place <= state[:, 7:8])
    return (falling < state[:, 6:7]) | (tie & some)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(32, 128_256), (40, 3001)])
def test_the_cut_is_exact(size: tuple[int, int], dtype: torch.dtype) -> None:
    for seed in range(4):
        values = batch(*size, dtype, seed)
        values["temperature"].clamp_(min=0.05)
        finite = torch.ones(size[0], dtype=torch.bool, device="cuda")
        finite[[3, 5, 6]] = False
        if seed == 1:  # very flat, and large
            values["logits"] = values["logits"] * 0.01 - 100.0
            finite[:] = True
            finite[[3, 5, 6]] = False
        if seed == 2:
            values["top_k"] *= 700
        expected, got = kept_by_sort(values), kept_by_cut(values)
        # the sums of the sort are rounded: it may miss an id at the cut
        wrong = (expected != got)[finite].sum(1)
        assert int(wrong.max()) <= 1, wrong.tolist()
        assert int((wrong > 0).sum()) <= 2, wrong.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_filtered(size: tuple[int, int], dtype: torch.dtype) -> None:
    for seed in range(6):
        values = batch(*size, dtype, seed)
        logits = values.pop("logits")
        got = sampling_gpu.filtered(logits, **values)
        expected = sampling.filtered(logits.float(), **values)
        assert_same_choice(got, expected, {"logits": logits, **values})


def test_all_in_one_graph() -> None:
    values = batch(32, 32_000, torch.bfloat16, 0)
    logits = values["logits"]
    rest = {name: value for name, value in values.items() if name != "logits"}
    noise = (values["temperature"], values["seed"], values["position"])

    def step() -> tuple[Tensor, ...]:
        # back to back, each over memory that the one before has given back
        made: list[Tensor] = []
        for _ in range(3):
            made = [
                sampling_gpu.best_tokens(logits),
                sampling_gpu.best_tokens(logits, *noise),
                sampling_gpu.filtered(logits, **rest),
            ]
        return tuple(made)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in range(10):
        for name, value in batch(32, 32_000, torch.bfloat16, seed).items():
            values[name].copy_(value)
        graph.replay()
        for ours, eager in zip(out, step(), strict=True):
            assert torch.equal(ours, eager)

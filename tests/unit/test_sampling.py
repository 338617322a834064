from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tp_runtime.ops import noise, sampling, sampling_cpu
from tp_runtime.ops.sampling import INVALID_TOKEN, SamplerMode, gather_vocab_sizes, mode_of, sample
from tp_runtime.sampling import SamplingParams

WAIT_S = 30.0


class FakeGroup:
    """Ranks of one group as threads of this process."""

    def __init__(
        self, rank: int, size: int, shared: list[Tensor], barrier: threading.Barrier
    ) -> None:
        self.rank, self.size, self._shared, self._barrier = rank, size, shared, barrier
        self.gathers = 0

    def all_gather(self, t: Tensor) -> Tensor:
        self.gathers += 1
        self._shared[self.rank] = t.clone()
        self._barrier.wait(WAIT_S)
        out = torch.stack(list(self._shared))
        self._barrier.wait(WAIT_S)
        return out


def fake_groups(size: int) -> list[FakeGroup]:
    barrier = threading.Barrier(size)
    shared = [torch.empty(0)] * size
    return [FakeGroup(rank, size, shared, barrier) for rank in range(size)]


def alone() -> FakeGroup:
    return fake_groups(1)[0]


def columns(rows: int, **changes: Any) -> dict[str, Any]:
    """Per-row arguments of sample(); a number in changes stands for all rows."""
    base: dict[str, Any] = {
        "temperature": torch.full((rows,), 0.8),
        "top_k": torch.zeros(rows, dtype=torch.int64),
        "top_p": torch.ones(rows),
        "min_p": torch.zeros(rows),
        "seed": torch.arange(rows) * 7919 + 3,
        "position": torch.arange(rows) % 5 + 11,
    }
    for name, value in changes.items():
        given = torch.as_tensor(value, dtype=base[name].dtype)
        base[name] = given.expand(rows).clone()
    return base


def draw(logits: Tensor, mode: SamplerMode, **changes: Any) -> list[int]:
    args = columns(logits.shape[0], **changes)
    return sample(logits, vocab_start=0, mode=mode, group=alone(), **args).tolist()


def some_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def chi_squared(counts: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def limit_of(freedom: int) -> float:
    """Exceeded by chance about once in 3e6: five sigma by Wilson and Hilferty."""
    return float(freedom * (1 - 2 / (9 * freedom) + 5 * (2 / (9 * freedom)) ** 0.5) ** 3)


# -- the noise ------------------------------------------------------------------------------------


def test_the_hash_is_splitmix64() -> None:
    # the published first outputs of SplitMix64 seeded with 0
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    v = noise.uniform(torch.zeros(1, dtype=torch.int64), 0, 3)[0]
    assert v.tolist() == [np.float32(np.float32(x >> 32) * 2.0**-32 + 2.0**-33) for x in published]


def test_torch_numpy_and_int_forms_agree_to_the_bit() -> None:
    seeds = torch.tensor([0, 1, 2**63 - 1, 12345678901234])
    positions = torch.tensor([0, 2**40, 7, 131071])
    keys = noise.row_keys(seeds, positions)
    vocab, start = 1001, 49000
    v = noise.uniform(keys, start, vocab)
    weyl = noise.weyl_numpy(start, vocab)
    for row in range(4):
        key = noise.row_key(int(seeds[row]), int(positions[row]))
        assert key == int(keys[row]) % 2**64
        bits, scratch = np.empty((2, vocab), dtype=np.uint64)
        out = np.empty(vocab, dtype=np.float32)
        noise.uniform_numpy(key, weyl, bits, scratch, out)
        assert np.array_equal(out, v[row].numpy())


def test_noise_is_finite_at_both_ends() -> None:
    ends = torch.tensor([2.0**-33, 1.0 - 2.0**-24])
    g = -torch.log(-torch.log1p(-ends))
    assert g.isfinite().all()
    assert float(g[0]) == pytest.approx(noise.MAX_NOISE)


def test_uniform_numbers_fill_their_range_evenly() -> None:
    keys = noise.row_keys(torch.arange(64), torch.arange(64) * 3)
    v = noise.uniform(keys, 0, 8192).flatten()
    assert float(v.min()) > 0.0
    assert float(v.max()) < 1.0
    counts = np.bincount((v * 256).to(torch.int64).numpy(), minlength=256)
    assert chi_squared(counts, np.full(256, len(v) / 256)) < limit_of(255)


@pytest.mark.parametrize("neighbour", ["vocab", "position", "seed", "seed and position swapped"])
def test_neighbours_are_independent(neighbour: str) -> None:
    rows, vocab, cells = 256, 1024, 16
    seeds = torch.arange(rows) + 1000
    positions = torch.full((rows,), 77)
    one = noise.uniform(noise.row_keys(seeds, positions), 0, vocab)
    if neighbour == "vocab":
        one, other = one[:, :-1], one[:, 1:]
    elif neighbour == "position":
        other = noise.uniform(noise.row_keys(seeds, positions + 1), 0, vocab)
    elif neighbour == "seed":
        other = noise.uniform(noise.row_keys(seeds + 1, positions), 0, vocab)
    else:
        other = noise.uniform(noise.row_keys(positions, seeds), 0, vocab)
    pair = ((one * cells).long() * cells + (other * cells).long()).flatten().numpy()
    counts = np.bincount(pair, minlength=cells * cells)
    assert chi_squared(counts, np.full(cells * cells, len(pair) / cells**2)) < limit_of(255)
    assert abs(np.corrcoef(one.flatten().numpy(), other.flatten().numpy())[0, 1]) < 0.01


# -- the distribution of what is drawn ------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("mode", [SamplerMode.RANDOM, SamplerMode.FILTERED])
def test_tokens_over_many_positions_follow_the_softmax(
    temperature: float, mode: SamplerMode
) -> None:
    n, logits = 8000, torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -0.5, 0.1, -2.0])
    ids = draw(
        logits.expand(n, 8).contiguous(), mode, temperature=temperature, seed=5, position=range(n)
    )
    expected = torch.softmax(logits.double() / temperature, 0).numpy() * n
    assert chi_squared(np.bincount(ids, minlength=8), expected) < limit_of(7)


def test_the_torch_form_follows_the_softmax() -> None:
    n, logits = 20000, torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -0.5, 0.1, -2.0])
    seeds, positions = torch.full((n,), 9), torch.arange(n)
    _, ids = sampling.random(logits.expand(n, 8), 0, torch.full((n,), 0.7), seeds, positions)
    expected = torch.softmax(logits.double() / 0.7, 0).numpy() * n
    assert chi_squared(np.bincount(ids.numpy(), minlength=8), expected) < limit_of(7)


@pytest.mark.parametrize("step", ["seed", "position"])
def test_successive_tokens_are_independent(step: str) -> None:
    n, vocab = 8001, 6
    walk = {"seed": 3, "position": 3} | {step: range(n)}
    ids = np.array(draw(torch.zeros(n, vocab), SamplerMode.RANDOM, temperature=1.0, **walk))
    counts = np.bincount(ids[:-1] * vocab + ids[1:], minlength=vocab * vocab)
    assert chi_squared(counts, np.full(36, (n - 1) / 36)) < limit_of(35)


# -- the same token whatever surrounds it ---------------------------------------------------------


@pytest.mark.parametrize("mode", list(SamplerMode))
def test_a_token_does_not_depend_on_the_batch(mode: SamplerMode) -> None:
    logits = some_logits(9, 503)
    args = columns(9, temperature=[0.0, 0.3, 0.7, 1.0, 1.5, 3.0, 0.0, 1.0, 0.9])
    if mode is SamplerMode.FILTERED:
        cut = columns(9, top_k=20, top_p=0.9, min_p=0.01)
        args |= {name: cut[name] for name in ("top_k", "top_p", "min_p")}
    together = sample(logits, vocab_start=0, mode=mode, group=alone(), **args)
    order = torch.tensor([4, 0, 8, 2, 6, 1, 7, 3, 5])
    moved = sample(
        logits[order],
        vocab_start=0,
        mode=mode,
        group=alone(),
        **{k: v[order] for k, v in args.items()},
    )
    assert moved.tolist() == together[order].tolist()
    for row in range(9):
        single = {k: v[row : row + 1] for k, v in args.items()}
        one = sample(logits[row : row + 1], vocab_start=0, mode=mode, group=alone(), **single)
        assert one.tolist() == together[row : row + 1].tolist()


def test_a_larger_mode_draws_the_same_token_for_rows_that_need_less() -> None:
    logits = some_logits(12, 700)
    heat = [0.0, 1.0] * 6
    random = draw(logits, SamplerMode.RANDOM, temperature=heat)
    assert draw(logits, SamplerMode.FILTERED, temperature=heat) == random
    greedy = draw(logits, SamplerMode.GREEDY)
    assert greedy == logits.argmax(1).tolist()
    assert random[::2] == greedy[::2]
    assert random[1::2] != greedy[1::2]


@pytest.mark.parametrize("sizes", [(503,), (252, 251), (170, 200, 133), (1, 501, 1)])
@pytest.mark.parametrize("mode", list(SamplerMode))
def test_every_rank_draws_what_one_rank_would(mode: SamplerMode, sizes: tuple[int, ...]) -> None:
    logits = some_logits(7, sum(sizes))
    logits[2, 100] = logits[2, 400] = 50.0  # a tie between slices
    logits[3, 490] = torch.nan
    logits[4] = -torch.inf
    logits[5, 252:] = -torch.inf
    args = columns(7, temperature=[0.0, 1.0, 0.0, 0.7, 1.0, 0.5, 2.0])
    if mode is SamplerMode.FILTERED:
        args["top_k"][1], args["top_p"][6], args["min_p"][5] = 40, 0.8, 0.05
    expected = sample(logits, vocab_start=0, mode=mode, group=alone(), **args).tolist()
    assert expected[2] == 100
    assert expected[3] == expected[4] == INVALID_TOKEN
    assert all(0 <= expected[row] < sum(sizes) for row in (0, 1, 2, 5, 6))
    starts = [sum(sizes[:r]) for r in range(len(sizes))]

    def rank(group: FakeGroup) -> list[int]:
        mine = logits[:, starts[group.rank] : starts[group.rank] + sizes[group.rank]]
        learned = gather_vocab_sizes(group, mine.shape[1], torch.device("cpu"))
        assert learned == sizes
        before = group.gathers
        ids = sample(
            mine,
            vocab_start=starts[group.rank],
            mode=mode,
            group=group,
            vocab_sizes=learned,
            **args,
        ).tolist()
        expected_gathers = 0 if len(sizes) == 1 else 2 if mode is SamplerMode.FILTERED else 1
        assert group.gathers - before == expected_gathers
        return ids

    with ThreadPoolExecutor(len(sizes)) as pool:
        for ids in pool.map(rank, fake_groups(len(sizes)), timeout=WAIT_S):
            assert ids == expected


def test_greedy_exchanges_eight_bytes_a_row() -> None:
    sent: list[Tensor] = []

    class Spy(FakeGroup):
        def all_gather(self, t: Tensor) -> Tensor:
            sent.append(t)
            return torch.stack([t, t])

    group = Spy(0, 2, [], threading.Barrier(1))
    sample(
        some_logits(5, 300),
        vocab_start=0,
        mode=SamplerMode.GREEDY,
        group=group,
        **columns(5),
    )
    assert [(t.shape, t.element_size()) for t in sent] == [((5,), 8)]


# -- ties, and rows without a token ---------------------------------------------------------------


@pytest.mark.parametrize("form", [sampling, sampling_cpu], ids=["torch", "cpu"])
def test_the_lowest_id_among_equals_wins(form: Any) -> None:
    logits = torch.zeros(3, 1000)
    logits[1, [700, 300, 999]] = 5.0
    logits[2, :] = -0.0
    logits[2, 800] = 0.0  # equal to -0.0
    _, ids = form.greedy(logits, 64)
    assert ids.tolist() == [64, 364, 64]


def test_the_exchange_orders_scores_like_numbers() -> None:
    values = [-torch.inf, -3e38, -1.0, -1e-45, 0.0, 1e-45, 2.5, 3e38, torch.inf]
    keys = sampling._encode(torch.tensor(values), torch.arange(9))
    assert keys.tolist() == sorted(keys.tolist())
    assert sampling._decode(keys).tolist() == [INVALID_TOKEN, *range(1, 9)]
    zero = sampling._encode(torch.tensor([0.0, -0.0]), torch.tensor([4, 4]))
    assert zero[0] == zero[1]
    nan = sampling._encode(torch.tensor([torch.nan, torch.inf]), torch.tensor([4, 0]))
    assert nan[0] > nan[1]
    assert sampling._decode(nan[:1]).tolist() == [INVALID_TOKEN]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", list(SamplerMode))
def test_a_nan_or_an_empty_row_gives_the_invalid_token(
    mode: SamplerMode, temperature: float
) -> None:
    logits = some_logits(4, 600)
    logits[0, 599] = torch.nan
    logits[1] = -torch.inf
    logits[2] = torch.nan
    changes: dict[str, Any] = {"temperature": temperature}
    if mode is SamplerMode.FILTERED:
        changes |= {"top_k": 10, "top_p": 0.9}
    ids = draw(logits, mode, **changes)
    assert ids[:3] == [INVALID_TOKEN] * 3
    assert 0 <= ids[3] < 600


@pytest.mark.parametrize("mode", list(SamplerMode))
def test_an_infinite_logit_is_taken(mode: SamplerMode) -> None:
    logits = some_logits(2, 600)
    logits[:, [17, 333]] = torch.inf
    assert draw(logits, mode, temperature=1.0, top_p=0.9) == [17, 17]


# -- top-k, top-p, min-p --------------------------------------------------------------------------


def reference_kept(line: Tensor, t: float, k: int, p: float, m: float) -> list[int]:
    """The rule as the module states it, in float64 and plain Python."""
    x = line.double().tolist()
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))[: k or None]
    weight = [float(np.exp((x[i] - x[order[0]]) / t)) for i in order]
    total = float(np.sum(np.array(weight)))
    kept: list[int] = []
    reached = 0.0
    for i, w in zip(order, weight, strict=True):
        if kept and ((p < 1.0 and reached >= p * total) or w < m):
            break
        kept.append(i)
        reached += w
    return sorted(kept)


FILTERS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (7, 1.0, 0.0),
    (50, 0.9, 0.0),
    (0, 0.9, 0.0),
    (0, 0.999999, 0.0),
    (0, 1e-6, 0.0),
    (0, 1.0, 0.1),
    (0, 1.0, 1.0),
    (0, 1.0, 1e-9),
    (20, 0.7, 0.02),
    (0, 0.95, 0.001),
    (10**9, 0.5, 0.0),
]


@pytest.mark.parametrize(("k", "p", "m"), FILTERS)
@pytest.mark.parametrize("kind", ["peaked", "flat", "ties", "large", "masked"])
def test_the_kept_ids_are_exact(kind: str, k: int, p: float, m: float) -> None:
    line = {
        "peaked": some_logits(1, 2000, seed=1, scale=4.0)[0],
        "flat": some_logits(1, 2000, seed=2, scale=0.01)[0],
        "ties": some_logits(1, 2000, seed=3).round()[0],
        "large": some_logits(1, 2000, seed=4, scale=1000.0)[0] - 5000.0,
        "masked": some_logits(1, 2000, seed=5)[0],
    }[kind]
    if kind == "masked":
        line[500:] = -torch.inf
    for t in (0.05, 0.8, 5.0):
        # the parameters reach the device as float32
        p32, m32, t32 = (float(np.float32(value)) for value in (p, m, t))
        expected = reference_kept(line, t32, k, p32, m32)
        got = sampling_cpu.kept_ids(line.numpy(), temperature=t32, top_k=k, top_p=p32, min_p=m32)
        if got is None:
            assert (p, m) == (1.0, 0.0)
            assert len(expected) == 2000
        else:
            assert got.tolist() == expected
        # drawn from exactly these, by both forms, and as the noise of the unfiltered row says
        score = (
            line.double()
            + t32
            * -torch.log(
                -torch.log1p(
                    -noise.uniform(noise.row_keys(torch.tensor([5]), torch.tensor([6])), 0, 2000)
                )
            )[0].double()
        )
        masked = torch.full((2000,), -torch.inf).double()
        masked[expected] = score[expected]
        args = columns(1, temperature=t, top_k=k, top_p=p, min_p=m, seed=5, position=6)
        for form in (sampling_cpu, sampling):
            assert form.filtered(line[None], **args).tolist() == [int(masked.argmax())]


def test_filtered_tokens_follow_the_cut_distribution() -> None:
    n, logits = 6000, torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -0.5, 0.1, -2.0])
    ids = draw(
        logits.expand(n, 8).contiguous(),
        SamplerMode.FILTERED,
        temperature=1.0,
        top_k=4,
        seed=5,
        position=range(n),
    )
    kept = [1, 3, 4, 6]
    expected = torch.softmax(logits[kept].double(), 0).numpy() * n
    counts = np.bincount(ids, minlength=8)
    assert counts.sum() == counts[kept].sum()
    assert chi_squared(counts[kept], expected) < limit_of(3)


@pytest.mark.parametrize("scale", [0.1, 3.0, 100.0])
def test_the_cheap_bound_never_misses_the_winner(scale: float) -> None:
    logits = some_logits(40, 3000, seed=8, scale=scale)
    heat = torch.tensor([1e-3, 0.1, 0.7, 1.0, 5.0, 1e4] * 7)[:40]
    seeds, positions = torch.arange(40), torch.arange(40) + 9
    _, fast = sampling_cpu.random(logits, 0, heat, seeds, positions)
    v = noise.uniform(noise.row_keys(seeds, positions), 0, 3000).double()
    plain = (logits + heat[:, None].double() * -torch.log(-torch.log1p(-v))).float()
    assert fast.tolist() == sampling.greedy(plain, 0)[1].tolist()
    _, torch_ids = sampling.random(logits, 0, heat, seeds, positions)
    assert fast.tolist() == torch_ids.tolist()


# -- the call -------------------------------------------------------------------------------------


def test_the_mode_comes_from_the_parameters_alone() -> None:
    assert mode_of(SamplingParams()) is SamplerMode.GREEDY
    assert mode_of(SamplingParams(top_k=5)) is SamplerMode.GREEDY
    assert mode_of(SamplingParams(temperature=1.0)) is SamplerMode.RANDOM
    assert mode_of(SamplingParams(temperature=1.0, top_p=0.5)) is SamplerMode.FILTERED
    assert max(SamplerMode.GREEDY, SamplerMode.FILTERED, SamplerMode.RANDOM) is SamplerMode.FILTERED


@pytest.mark.parametrize("mode", list(SamplerMode))
def test_no_rows_give_no_ids_and_no_exchange(mode: SamplerMode) -> None:
    group = FakeGroup(0, 2, [], threading.Barrier(2))
    args = columns(0)
    ids = sample(torch.empty(0, 8), vocab_start=0, mode=mode, group=group, **args)
    assert ids.shape == (0,)
    assert ids.dtype == torch.int64
    assert group.gathers == 0


@pytest.mark.parametrize("mode", list(SamplerMode))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_types_are_computed_in_float32(mode: SamplerMode, dtype: torch.dtype) -> None:
    logits = some_logits(4, 300).to(dtype)
    assert draw(logits, mode) == draw(logits.float(), mode)


def test_arguments_are_left_alone() -> None:
    logits = some_logits(4, 300)
    for mode in SamplerMode:
        kept, args = logits.clone(), columns(4, top_p=0.5)
        before = {name: value.clone() for name, value in args.items()}
        sample(logits, vocab_start=0, mode=mode, group=alone(), **args)
        assert torch.equal(logits, kept)
        assert all(torch.equal(args[name], value) for name, value in before.items())


def test_shapes_that_do_not_fit_are_refused() -> None:
    logits = some_logits(4, 300)
    args = columns(4) | {"top_p": torch.ones(3)}
    with pytest.raises(ValueError, match=r"top_p: expected shape \(4,\), got \(3,\)"):
        sample(logits, vocab_start=0, mode=SamplerMode.GREEDY, group=alone(), **args)


@pytest.mark.parametrize(
    ("start", "sizes", "message"),
    [
        (300, None, "pass vocab_sizes"),
        (299, (300, 300), "vocab_start is 299"),
        (300, (300, 299), "300 columns for this rank"),
        (300, (300, 300, 300), "name 2 slices"),
    ],
)
def test_slices_that_do_not_add_up_are_refused(
    start: int, sizes: tuple[int, ...] | None, message: str
) -> None:
    group = FakeGroup(1, 2, [], threading.Barrier(2))
    width = 300 if sizes is not None else 200
    with pytest.raises(ValueError, match=message):
        sample(
            some_logits(2, width),
            vocab_start=start,
            mode=SamplerMode.GREEDY,
            group=group,
            vocab_sizes=sizes,
            **columns(2),
        )

"""The recorded H200 measurements: the known rows first, then what the cost models must reach."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tp_runtime.selection.regret import (
    Regret,
    RegretCell,
    load_cells,
    regret_left_out,
    regret_of_one,
    regret_of_pairs,
    regret_of_plan,
)
from tp_runtime.selection.rule import select

DATA = Path(__file__).parents[1] / "data"
BACKENDS = ("flashinfer_xqa", "flashinfer_fa2_tc", "cudnn", "flashinfer_cuda_core")


def load(name: str) -> list[RegretCell]:
    return load_cells(DATA / name, backends=BACKENDS, q_heads=32, kv_heads=8)


@pytest.fixture(scope="module")
def mixed() -> list[RegretCell]:
    return load("h200_decode_attention_ragged.json")


@pytest.fixture(scope="module")
def columns(mixed: list[RegretCell]) -> tuple[list[RegretCell], list[RegretCell]]:
    return [c for c in mixed if not c.ragged], [c for c in mixed if c.ragged]


Columns = tuple[list[RegretCell], list[RegretCell]]


def close(regret: Regret, expected: tuple[float, float, float]) -> bool:
    got = (regret.mean, regret.p95, regret.maximum)
    return all(abs(a - b) <= 0.0101 for a, b in zip(got, expected, strict=True))


def test_cells_are_those_of_the_table(columns: Columns) -> None:
    assert (len(columns[0]), len(columns[1])) == (48, 41)


@pytest.mark.parametrize(
    ("backend", "equal", "ragged"),
    [
        ("flashinfer_xqa", (1.08, 1.19, 1.30), (1.23, 2.18, 2.51)),
        ("flashinfer_fa2_tc", (1.11, 1.57, 1.75), (1.06, 1.28, 1.31)),
        ("cudnn", (1.06, 1.34, 1.39), (1.28, 2.34, 3.19)),
    ],
)
def test_single_backends(
    backend: str,
    equal: tuple[float, float, float],
    ragged: tuple[float, float, float],
    columns: Columns,
) -> None:
    assert close(regret_of_one(columns[0], backend), equal)
    assert close(regret_of_one(columns[1], backend), ragged)


def test_one_stable_winner_learned_from_equal_lengths(columns: Columns) -> None:
    samples = [s for cell in load("h200_decode_attention.json") for s in cell.samples()]
    plan = select(samples, priority=BACKENDS, mode="stable")
    assert close(regret_of_plan(columns[0], plan), (1.03, 1.17, 1.19))
    assert close(regret_of_plan(columns[1], plan), (1.25, 2.18, 2.51))


def test_the_best_pair_bounds_what_two_graphs_can_do(columns: Columns) -> None:
    assert regret_of_pairs(columns[1]).mean < 1.005


def test_three_coefficients_left_out(mixed: list[RegretCell], columns: Columns) -> None:
    """The plain model, to show that it is the one the table speaks of."""
    regret = regret_left_out(
        columns[1], mixed, lambda samples: select(samples, priority=BACKENDS, corrected=False)
    )
    assert close(regret, (1.03, 1.17, 1.28))


def test_corrected_models_left_out(mixed: list[RegretCell], columns: Columns) -> None:
    """Every cell is judged by a plan that did not see it; never worse than the plain model."""
    equal, ragged = (
        regret_left_out(column, mixed, lambda samples: select(samples, priority=BACKENDS))
        for column in columns
    )
    assert equal.mean <= 1.01
    assert equal.p95 <= 1.05
    assert equal.maximum <= 1.11
    assert ragged.mean <= 1.025
    assert ragged.p95 <= 1.13
    assert ragged.maximum <= 1.20


@pytest.mark.parametrize("original", BACKENDS)
def test_neither_a_slower_copy_nor_the_order_of_samples_changes_a_choice(
    original: str, mixed: list[RegretCell]
) -> None:
    samples = [s for cell in mixed for s in cell.samples()]
    plan = select(samples, priority=BACKENDS)
    slower = [
        replace(s, backend="copy", median_us=1.02 * s.median_us)
        for s in samples
        if s.backend == original
    ]
    shuffled = [*slower, *reversed(samples), *samples[::3]]
    other = select(shuffled, priority=(*BACKENDS, "copy"))
    for cell in mixed:
        batch = (cell.batch_size, sum(cell.kv_lens), max(cell.kv_lens))
        size, total_kv, max_kv = batch
        choices = [
            p.choose(batch_size=size, total_kv=total_kv, max_kv=max_kv) for p in (plan, other)
        ]
        assert choices[0] == choices[1], batch


def test_other_head_shapes_stay_near_their_best() -> None:
    """Equal lengths only were recorded for these; half of the cells are held out in turn."""
    for heads in ((16, 4), (4, 1)):
        cells = load_cells(
            DATA / "h200_decode_attention.json",
            backends=BACKENDS,
            q_heads=heads[0],
            kv_heads=heads[1],
        )
        ratios: list[Regret] = []
        for part in (0, 1):
            training = [s for i, c in enumerate(cells) if i % 2 == part for s in c.samples()]
            plan = select(training, priority=BACKENDS)
            ratios.append(regret_of_plan([c for i, c in enumerate(cells) if i % 2 != part], plan))
        assert max(r.mean for r in ratios) <= 1.03, ratios

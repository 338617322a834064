"""The plan as bytes and as a file: exact, strict, and never half written."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tp_runtime.errors import BackendUnavailable, PlanFormatError, SelectionError
from tp_runtime.selection.base import DecodeShape
from tp_runtime.selection.cost_model import (
    CostModel,
    Grid,
    Point,
    fit_backend,
    nonnegative_least_squares,
)
from tp_runtime.selection.plan import BackendPlan, BucketPlan, Choice
from tp_runtime.selection.rule import Sample, select

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = DecodeShape(
    q_heads=6, kv_heads=2, head_dim=64, dtype="float32", page_size=64, table_width=8
)


def make_plan() -> BackendPlan:
    samples = [
        Sample(backend=name, bucket=b, total_kv=b * n, max_kv=n, median_us=a + c * b * n)
        for b in (1, 4)
        for n in (64, 256, 512)
        for name, a, c in (("alpha", 1.0, 0.02), ("beta", 10.0, 0.002), ("gamma", 50.0, 0.05))
    ]
    return select(
        samples, priority=["alpha", "beta", "gamma"], shape=SHAPE, device="cpu", priority_version=3
    )


def test_round_trip() -> None:
    plan = make_plan()
    again = BackendPlan.from_bytes(plan.to_bytes())
    assert again == plan
    assert again.digest == plan.digest
    assert again.shape == SHAPE
    for total in (64, 300, 1000, 2048):
        step: dict[str, Any] = {"batch_size": 3, "total_kv": total, "max_kv": total // 3}
        assert again.choose(**step) == plan.choose(**step)


def test_digest_depends_on_every_field() -> None:
    plan = make_plan()
    data = json.loads(plan.to_bytes())
    digests = {plan.digest}
    for name, value in {
        "priority_version": 4, "mode": "stable", "margin": 0.06, "shape": None, "device": "x",
        "entries": data["entries"][:1], "priority": ["beta", "alpha", "gamma"],
    }.items():  # fmt: skip
        changed = json.dumps({**data, name: value}, sort_keys=True, separators=(",", ":"))
        digests.add(BackendPlan.from_bytes(changed.encode()).digest)
    assert len(digests) == 8


def test_every_truncation_is_refused() -> None:
    data = make_plan().to_bytes()
    for length in range(0, len(data), 37):
        with pytest.raises(PlanFormatError):
            BackendPlan.from_bytes(data[:length])


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        (["format"], "other", "format"),
        (["version"], 2, "version"),
        (["mode"], "best", "mode"),
        (["margin"], "0.05", "margin"),
        (["margin"], True, "margin"),
        (["priority"], [], "priority"),
        (["priority"], ["alpha", "alpha"], "priority"),
        (["priority"], ["gamma"], "not in the priority"),
        (["priority_version"], 1.5, "priority_version"),
        (["shape", "q_heads"], "6", "shape.q_heads"),
        (["shape", "dtype"], 6, "shape.dtype"),
        (["entries", 0, "bucket"], 0, "ascending"),
        (["entries", 1, "bucket"], 1, "ascending"),
        (["entries", 0, "variants"], [], "variants"),
        (["entries", 0, "models"], [], "no model"),
        (["entries", 0, "models", 0, "fixed_us"], -1.0, "negative"),
        (["entries", 0, "models", 0, "factors"], [1.0], "factors"),
        (["entries", 0, "grid", "mean_step"], 0.0, "step"),
        (["entries", 0, "grid", "mean_count"], 1, "nodes"),
    ],
)  # fmt: skip
def test_damage_is_named(path: list[Any], value: object, match: str) -> None:
    data = json.loads(make_plan().to_bytes())
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(PlanFormatError, match=match):
        BackendPlan.from_bytes(json.dumps(data, sort_keys=True, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"\xff\x00", b"{}", b"[" * 100000, b'{"version": NaN}']
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(PlanFormatError):
        BackendPlan.from_bytes(data)


def test_only_canonical_bytes_are_a_plan() -> None:
    with pytest.raises(PlanFormatError, match="canonical"):
        BackendPlan.from_bytes(make_plan().to_bytes() + b" ")


def test_save_and_load(tmp_path: Path) -> None:
    plan = make_plan()
    file = tmp_path / "plan.json"
    file.write_text("an older file")
    plan.save(file)
    assert BackendPlan.load(file) == plan
    assert os.listdir(tmp_path) == ["plan.json"]


def test_load_notices_an_edit(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    make_plan().save(file)
    text = file.read_text()
    file.write_text(text.replace('"device": "cpu"', '"device": "gpu"'))
    with pytest.raises(PlanFormatError, match=r"plan\.json: digest"):
        BackendPlan.load(file)
    file.write_text(text[: len(text) // 2])
    with pytest.raises(PlanFormatError, match="truncated"):
        BackendPlan.load(file)
    file.write_text("{}")
    with pytest.raises(PlanFormatError, match="digest and plan"):
        BackendPlan.load(file)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.json"
    BackendPlan.fixed(["alpha"], [1]).save(file)

    def no_space(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="no space"):
        make_plan().save(file)
    assert BackendPlan.load(file) == BackendPlan.fixed(["alpha"], [1])
    assert os.listdir(tmp_path) == ["plan.json"]


def test_fixed_plan() -> None:
    plan = BackendPlan.fixed(["beta", "alpha"], [8, 1, 4, 4], shape=SHAPE)
    assert not plan.measured
    assert plan.buckets == (1, 4, 8)
    assert plan[4] == ("beta",)
    assert plan.choose(batch_size=2, total_kv=9, max_kv=8) == Choice(4, 0, "beta")
    assert plan.choose(batch_size=9, total_kv=9, max_kv=1) == Choice(None, 0, "beta")
    assert BackendPlan.from_bytes(plan.to_bytes()) == plan


def test_unknown_bucket_and_variant_are_named() -> None:
    plan = make_plan()
    with pytest.raises(SelectionError, match=r"no bucket 2; its buckets are \[1, 4\]"):
        plan.variants(2)
    with pytest.raises(SelectionError, match="bucket 4 has variants 0"):
        plan.backend_of(4, 7)
    assert plan.backend_of(None, 0) == "alpha"


def test_without_drops_everywhere() -> None:
    plan = make_plan()
    assert plan[4] == ("alpha", "beta")
    less = plan.without({"alpha"})
    assert less.priority == ("beta", "gamma")
    assert less[4] == ("beta",)
    assert less.choose(batch_size=99, total_kv=99, max_kv=1).backend == "beta"
    assert less.digest != plan.digest
    assert plan.without({"alpha", "beta"})[4] == ("gamma",)  # no variant left: first of the rest
    assert plan.without(set()) == plan
    with pytest.raises(BackendUnavailable, match="alpha, beta, gamma"):
        plan.without({"alpha", "beta", "gamma"})


def test_the_plan_is_frozen() -> None:
    with pytest.raises(AttributeError):
        make_plan().margin = 0.5  # type: ignore[misc]


def test_a_plan_that_choose_could_not_serve_is_refused() -> None:
    with pytest.raises(PlanFormatError, match="no model"):
        BackendPlan(priority=("a", "b"), entries=(BucketPlan(bucket=1, variants=("a", "b")),))


def test_choose_uses_the_models_as_predict_does() -> None:
    plan = make_plan()
    entry = plan.entries[1]
    for total, longest in [(4, 1), (300, 200), (1000, 250), (2048, 512), (4000, 3000)]:
        predicted = [
            m.predict_us(entry.grid, bucket=4, total_kv=total, max_kv=longest) for m in entry.models
        ]
        chosen = plan.choose(batch_size=4, total_kv=total, max_kv=longest)
        assert chosen.variant == predicted.index(min(predicted))


def test_fit_recovers_a_law_it_can_express() -> None:
    points = [
        Point(bucket=8, total_kv=t, max_kv=m, us=7.0 + 0.01 * t + 0.03 * m)
        for t, m in [(800, 100), (800, 700), (8000, 1000), (8000, 5000), (40000, 6000), (300, 290)]
    ]
    grids = {8: Grid.over(points)}
    model = fit_backend(points, grids)[8]
    assert model.error < 1e-4
    for t, m in [(1000, 500), (20000, 3000)]:
        got = model.predict_us(grids[8], bucket=8, total_kv=t, max_kv=m)
        assert got == pytest.approx(7.0 + 0.01 * t + 0.03 * m, rel=1e-4)


def test_corrections_stay_at_their_edge_beyond_what_was_measured() -> None:
    grid = Grid(
        mean_low=1.0, mean_step=1.0, mean_count=2, ragged_low=0.0, ragged_step=1.0, ragged_count=2
    )
    model = CostModel(
        fixed_us=10.0, per_token_us=0.0, per_longest_us=0.0, factors=(1.0, 2.0, 3.0, 4.0)
    )
    assert grid.locate(-50.0, -50.0) == (0, 0.0, 0.0)
    assert grid.locate(50.0, 50.0) == (0, 1.0, 1.0)
    assert model.predict_us(grid, bucket=1, total_kv=10**9, max_kv=10**9) == pytest.approx(30.0)


def test_nonnegative_least_squares_meets_its_optimality_conditions() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        a, b = rng.normal(size=(9, 3)), rng.normal(size=9)
        x = nonnegative_least_squares(a, b)
        gradient = a.T @ (a @ x - b)
        assert (x >= 0).all()
        assert (gradient >= -1e-9).all()  # no coefficient wants to grow from zero
        assert abs(float(gradient @ x)) < 1e-9  # and the positive ones are at their optimum

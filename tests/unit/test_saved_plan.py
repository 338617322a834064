"""A saved plan that the settings name: taken as it is, cut to the run's buckets, or refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tp_runtime import planning
from tp_runtime.config import RuntimeConfig
from tp_runtime.errors import ConfigError
from tp_runtime.launch import select as select_verb
from tp_runtime.launch.__main__ import main
from tp_runtime.launch.plan import misfits
from tp_runtime.launch.problem import problem_of
from tp_runtime.planning import Decision, decide
from tp_runtime.selection import (
    PRIORITY_VERSION,
    BackendPlan,
    DecodeShape,
    DeviceInfo,
    Sample,
    select,
)

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = DecodeShape(
    q_heads=6, kv_heads=2, head_dim=64, dtype="float32", page_size=64, table_width=8
)
CPU = torch.device("cpu")


def plan_for(
    *,
    shape: DecodeShape = SHAPE,
    device: str | None = None,
    priority: tuple[str, ...] = ("cpu_grouped", "cpu_rowwise", "torch_reference"),
    version: int = PRIORITY_VERSION,
) -> BackendPlan:
    """cpu_rowwise for one row, cpu_grouped for two, four and eight."""
    return select(
        [
            Sample(backend=name, bucket=bucket, total_kv=bucket * n, max_kv=n, median_us=us * n)
            for bucket in (1, 2, 4, 8)
            for n in (64, 128, 256)
            for name, us in (("cpu_grouped", 3.0), ("cpu_rowwise", 2.0 * bucket))
            if name in priority
        ],
        priority=priority,
        mode="stable",
        priority_version=version,
        shape=shape,
        device=DeviceInfo.of(CPU).name if device is None else device,
    )


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the plan is; nothing may be measured."""

    def refuse(*words: object, **named: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(planning, "measure_in_child", refuse)
    path = tmp_path / "plan.json"
    plan_for().save(path)
    return path


def decided(file: Path, buckets: tuple[int, ...] = (1, 2, 4, 8), **settings: Any) -> Decision:
    config = RuntimeConfig(decode_plan=str(file), **settings)
    return decide(config, SHAPE, CPU, buckets=buckets, layers=4, threads=1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_plan_is_taken_and_nothing_measured(file: Path, dynamic: bool) -> None:
    decision = decided(file, enable_dynamic_decode_backend=dynamic)
    assert decision.plan == plan_for()
    assert decision.source == "from file"
    assert decision.report is None
    assert "flashinfer_xqa" in decision.refusals
    assert not (file.parent / "cache").exists()


@pytest.mark.parametrize(
    ("buckets", "taken"),
    [((1,), (1,)), ((1, 2, 3), (1, 2, 4)), ((1, 2, 4), (1, 2, 4)), ((1, 2, 4, 5), (1, 2, 4, 8))],
)
def test_a_smaller_run_takes_a_part(
    file: Path, buckets: tuple[int, ...], taken: tuple[int, ...]
) -> None:
    plan = decided(file, buckets).plan
    assert plan.buckets == taken
    assert all(plan.variants(bucket) == plan_for().variants(bucket) for bucket in taken)
    assert plan.measured


def test_buckets_that_a_person_names_are_all_there_or_refused(file: Path) -> None:
    assert decided(file, (2, 8), decode_buckets=(2, 8)).plan.buckets == (2, 8)
    for buckets in ((1, 3), (2, 16)):
        said = rf"buckets: expected each of \[{buckets[0]}, {buckets[1]}\] here, got \[1, 2, 4, 8\]"
        with pytest.raises(ConfigError, match=said):
            decided(file, buckets, decode_buckets=buckets)


def test_a_run_with_larger_batches_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"buckets: expected one of at least 9 here, got \[1, 2,"):
        decided(file, (1, 2, 4, 8, 9))


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (plan_for(device="another CPU"), "device: expected '.*' here, got 'another CPU'"),
        (plan_for(version=9), f"priority_version: expected {PRIORITY_VERSION} here, got 9"),
        (plan_for(shape=replace(SHAPE, q_heads=8)), "shape.q_heads: expected 6 here, got 8"),
        (plan_for(shape=replace(SHAPE, page_size=32)), "shape.page_size: expected 64 here, got 32"),
        (plan_for(shape=replace(SHAPE, dtype="float16")), "shape.dtype: expected 'float32' here"),
        (replace(plan_for(), shape=None), "shape.head_dim: expected 64 here, got None"),
        (BackendPlan.fixed(["cudnn"], (8,), shape=SHAPE), "cudnn: "),
    ],
)
def test_a_plan_for_something_else_is_refused(file: Path, plan: BackendPlan, said: str) -> None:
    plan.save(file)
    with pytest.raises(ConfigError, match=said) as caught:
        decided(file)
    assert str(caught.value).startswith(f"decode_plan={str(file)!r} does not fit this run: ")
    assert "`tp-runtime select --save` with the settings of this run" in str(caught.value)


def test_settings_that_contradict_the_plan_are_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="cpu_grouped: disabled by the configuration"):
        decided(file, disable_decode_backend=("cpu_grouped",))
    with pytest.raises(ConfigError, match="cpu_grouped: not asked for: cpu_rowwise is pinned"):
        decided(file, decode_backend="cpu_rowwise")
    # what the plan does not use may be excluded
    assert decided(file, disable_decode_backend=("cpu_padded",)).plan == plan_for()
    pinned = plan_for(priority=("cpu_rowwise",))
    pinned.save(file)
    assert decided(file, decode_backend="cpu_rowwise").plan == pinned


def newer(text: str) -> str:
    document = json.loads(text)
    document["plan"]["version"] = 99
    return json.dumps(document)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[: len(text) // 2], "truncated or not JSON"),
        (lambda text: "{}", "expected the fields digest and plan"),
        (newer, "plan.version: expected 1, got 99"),
        (lambda text: text.replace("cpu_grouped", "cpu_padded"), "but the plan in it has"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_is_no_plan_is_named(file: Path, damage: Any, said: str) -> None:
    if damage is None:
        file.unlink()
    else:
        file.write_text(damage(file.read_text()))
    with pytest.raises(ConfigError, match=re.escape(f"decode_plan={str(file)!r}: ")) as caught:
        decided(file)
    assert said in str(caught.value)
    assert "`tp-runtime select --save`" in str(caught.value)


def test_verify_says_what_a_run_would() -> None:
    config = RuntimeConfig(device="cpu", max_batch_size=3, max_seq_len=128)
    problem = problem_of(config, "random:tiny", tp_size=1)
    plan = plan_for(shape=problem.shape)
    assert misfits(plan, config, "random:tiny") == []
    (one,) = misfits(plan, replace(config, decode_buckets=(1, 3)), "random:tiny")
    assert one == "buckets: expected each of [1, 3] here, got [1, 2, 4, 8]"
    (one,) = misfits(plan, replace(config, max_seq_len=64), "random:tiny")
    assert one == "shape.table_width: expected 1 here, got 2"


def test_select_measures_also_where_a_plan_is_set(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        pass

    def note(config: RuntimeConfig, *words: object, **named: object) -> None:
        assert config.enable_dynamic_decode_backend
        assert config.decode_plan is None
        raise Asked

    monkeypatch.setattr(select_verb, "decide", note)
    words = ["select", "--model", "random:tiny", "--device", "cpu", "--max-seq-len", "128"]
    with pytest.raises(Asked):
        main([*words, "--decode-plan", str(file)])

"""Kept plans: used again only where they are whole and everything is as it was."""

from __future__ import annotations

import json
import logging
import re
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tp_runtime import planning
from tp_runtime.config import RuntimeConfig
from tp_runtime.errors import BackendUnavailable, SelectionError
from tp_runtime.planning import Decision, decide
from tp_runtime.selection import (
    BenchReport,
    BenchRequest,
    DecodeShape,
    DeviceInfo,
    Sample,
    fingerprint,
    plan_cache,
    select,
)
from tp_runtime.selection.fingerprint import fingerprint_of
from tp_runtime.selection.plan_cache import KeptPlan, PlanCache

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = DecodeShape(
    q_heads=6, kv_heads=2, head_dim=64, dtype="float32", page_size=64, table_width=8
)
REQUEST = BenchRequest(shape=SHAPE, buckets=(1, 4), threads=1)
CPU = DeviceInfo(type="cpu", name="a CPU")
RULE: dict[str, Any] = {"mode": "adaptive", "margin": 0.05, "pin": None, "disabled": ()}


def samples_of(request: BenchRequest, factor: float = 1.0) -> tuple[Sample, ...]:
    return tuple(
        Sample(
            backend=name, bucket=bucket, total_kv=bucket * n, max_kv=n, median_us=factor * us * n
        )
        for bucket in request.buckets
        for n in (64, 128, 256)
        for name, us in (("cpu_grouped", 3.0), ("cpu_rowwise", 2.0))
    )


def kept_plan(factor: float = 1.0) -> KeptPlan:
    report = BenchReport(
        samples=samples_of(REQUEST, factor), refusals={"cpu_padded": "too\nslow"}, seconds=2.5
    )
    priority = ("cpu_grouped", "cpu_rowwise")
    plan = select(report.samples, priority=priority, mode="stable", shape=SHAPE)
    return KeptPlan(plan=plan, report=report)


@pytest.fixture
def known() -> dict[str, Any]:
    return fingerprint_of(REQUEST, CPU, rule=RULE)


def test_what_was_kept_comes_back(tmp_path: Path, known: dict[str, Any]) -> None:
    cache = PlanCache(tmp_path / "not" / "yet" / "there")
    assert cache.load(known) is None
    assert cache.store(known, kept_plan())
    again = cache.load(known)
    assert again == kept_plan()
    assert again is not None
    assert again.plan.digest == kept_plan().plan.digest
    assert cache.store(known, kept_plan(2.0))  # replaced as a whole
    assert cache.load(known) == kept_plan(2.0)
    assert [p.name for p in cache.path_of(known).parent.iterdir()] == [cache.path_of(known).name]


def test_every_circumstance_counts(
    known: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(request: BenchRequest = REQUEST, device: DeviceInfo = CPU, **rule: Any) -> Any:
        return fingerprint_of(request, device, rule={**RULE, **rule})

    gpu = DeviceInfo(type="cuda", name="a GPU", capability=(9, 0))
    monkeypatch.setattr(fingerprint, "driver_version", lambda: "580.1")
    found = [
        known,
        *(
            other(replace(REQUEST, shape=replace(SHAPE, **change)))
            for change in (
                {"q_heads": 8}, {"head_dim": 128}, {"dtype": "bfloat16"}, {"page_size": 32},
                {"table_width": 16}, {"kv_dtype": "float8_e4m3fn"}, {"q_len": 2},
            )
        ),
        other(replace(REQUEST, buckets=(1, 2, 4))),
        other(replace(REQUEST, kv_lens=(100,))),
        other(replace(REQUEST, batches=((3, 4),))),
        other(replace(REQUEST, candidates=("cpu_padded",))),
        other(replace(REQUEST, threads=2)),
        other(device=replace(CPU, name="another CPU")),
        other(device=gpu),
        other(device=replace(gpu, capability=(10, 0))),
        other(mode="stable"), other(margin=0.1), other(pin="cpu_padded"),
        other(disabled=("cpu_padded",)), other(max_variants=3), other(priority_version=9),
    ]  # fmt: skip
    monkeypatch.setattr(fingerprint, "driver_version", lambda: "590.2")
    found.append(other(device=gpu))
    monkeypatch.setattr(fingerprint, "_version", lambda name: "9.9")
    found.append(other())
    cache = PlanCache(tmp_path)
    assert len({cache.path_of(one) for one in found}) == len(found)
    # but not the number of the device, nor where a child went on
    assert other(replace(REQUEST, device="cpu:0", first_cell=3)) == found[-1]


def test_what_cannot_be_read_is_no_fingerprint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fingerprint, "_DRIVER_FILE", tmp_path / "absent")
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    with pytest.raises(SelectionError, match="version of the NVIDIA driver cannot be read"):
        fingerprint_of(REQUEST, DeviceInfo(type="cuda", name="a GPU"), rule=RULE)
    (tmp_path / "version").write_text("NVRM version: 580.95\nGCC version: 13\n")
    monkeypatch.setattr(fingerprint, "_DRIVER_FILE", tmp_path / "version")
    assert fingerprint.driver_version() == "NVRM version: 580.95"
    monkeypatch.setattr("importlib.metadata.version", lambda name: None)
    with pytest.raises(SelectionError, match="version of torch cannot be read"):
        fingerprint_of(REQUEST, CPU, rule=RULE)


def altered(**changes: Any) -> Any:
    def alter(text: str) -> str:
        return json.dumps({**json.loads(text), **changes})

    return alter


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[: len(text) // 2], "truncated or not JSON"),
        (lambda text: "", "truncated or not JSON"),
        (lambda text: "[1, 2]", "expected an object"),
        (lambda text: '{"digest": "x", "plan": {}}', "expected the fields"),
        (lambda text: "\udcff\udcfe", "truncated or not JSON"),
        (altered(version=2), "expected tp_runtime.cached_plan version 1"),
        (altered(format="another"), "expected tp_runtime.cached_plan version 1"),
        (altered(digest="0" * 64), "but the plan in it has"),
        (altered(plan=None), "plan: expected an object"),
        (altered(samples=[{"backend": "x"}]), r"samples\[0\]: expected the fields"),
        (altered(samples=3), "samples: expected a list"),
        (altered(refusals={"x": 1}), "refusals.x: expected a string"),
        (altered(seconds="long"), "seconds: expected a finite number"),
        (altered(fingerprint={}), "under other circumstances"),
        (lambda text: text.replace('"stable"', '"fixed"'), "but the plan in it has"),
    ],
)
def test_a_file_that_is_not_that_is_named_and_replaced(
    damage: Any,
    said: str,
    tmp_path: Path,
    known: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = PlanCache(tmp_path)
    cache.store(known, kept_plan())
    path = cache.path_of(known)
    path.write_text(damage(path.read_text()), errors="surrogateescape")
    with caplog.at_level(logging.WARNING):
        assert cache.load(known) is None
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert "measuring again" in record.getMessage()
    assert re.search(said, record.getMessage())
    cache.store(known, kept_plan())
    assert cache.load(known) == kept_plan()


def test_a_plan_of_another_shape_under_this_name_is_not_used(
    tmp_path: Path, known: dict[str, Any]
) -> None:
    """A file that was copied to the name of another fingerprint."""
    cache = PlanCache(tmp_path)
    elsewhere = fingerprint_of(replace(REQUEST, shape=replace(SHAPE, head_dim=128)), CPU, rule=RULE)
    cache.store(elsewhere, kept_plan())
    cache.path_of(elsewhere).rename(cache.path_of(known))
    assert cache.load(known) is None


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path,
    known: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read_only(path: Path, text: str) -> None:  # root may write everywhere
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(plan_cache, "replace_file", read_only)
    assert not PlanCache(tmp_path).store(known, kept_plan())
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert not PlanCache(blocked / "plans").store(known, kept_plan())
    assert PlanCache(blocked / "plans").load(known) is None
    assert "Permission denied" in caplog.text
    assert "the next start measures again" in caplog.text


def test_two_writers_at_once_leave_one_whole_plan(tmp_path: Path, known: dict[str, Any]) -> None:
    cache = PlanCache(tmp_path)
    plans = [kept_plan(1.0), kept_plan(2.0)]
    cache.store(known, plans[0])
    start = threading.Barrier(3)

    def write(kept: KeptPlan) -> None:
        start.wait()
        for _ in range(40):
            assert cache.store(known, kept)

    writers = [threading.Thread(target=write, args=(kept,)) for kept in plans]
    for writer in writers:
        writer.start()
    start.wait()
    for _ in range(200):
        assert cache.load(known) in plans
    for writer in writers:
        writer.join()
    assert len(list(tmp_path.iterdir())) == 1


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[BenchRequest]:
    """Measuring without a child: every request that was measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    requests: list[BenchRequest] = []

    def measure(request: BenchRequest, timeout_s: float, *, progress: object) -> BenchReport:
        requests.append(request)
        samples = tuple(s for s in samples_of(request) if s.backend in request.candidates)
        return BenchReport(samples=samples, refusals={"cpu_padded": "lies"}, seconds=1.0)

    monkeypatch.setattr(planning, "measure_in_child", measure)
    return requests


def decided(**settings: Any) -> Decision:
    config = RuntimeConfig(**{"enable_dynamic_decode_backend": True, **settings})
    return decide(config, SHAPE, torch.device("cpu"), buckets=(1, 4), layers=4, threads=1)


def test_a_second_start_measures_nothing(measured: list[BenchRequest]) -> None:
    first, second = decided(), decided()
    assert (first.source, second.source) == ("measured", "cached")
    assert len(measured) == 1
    assert second.plan == first.plan
    assert second.report == first.report
    assert second.refusals == first.refusals
    assert second.refusals["cpu_padded"] == "lies"
    assert decided(plan_cache=False).source == "measured"
    assert decided(selection_mode="stable").source == "measured"
    assert decided(disable_decode_backend=("cpu_rowwise",)).source == "measured"
    assert decided().source == "cached"


def test_the_cache_follows_the_content_of_a_histogram(
    measured: list[BenchRequest], tmp_path: Path
) -> None:
    file = tmp_path / "lengths.txt"
    sources = []
    for text in ("30\n", "30\n", "30 1\n40 9\n", "40 9\n30\n"):
        file.write_text(text)
        sources.append(decided(length_histogram=str(file)).source)
    # the same lengths in other words are the same
    assert sources == ["measured", "cached", "measured", "cached"]
    assert all(set(batch) <= {30, 40} for request in measured for batch in request.batches)


def test_half_a_measurement_or_noise_is_not_kept(
    measured: list[BenchRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: Any = vars(planning)["measure_in_child"]
    with monkeypatch.context() as patch:
        patch.setattr(planning, "disturbed", lambda plan: True)
        assert decided().source == "measured"
    with monkeypatch.context() as patch:
        patch.setattr(
            planning,
            "measure_in_child",
            lambda *words, **named: replace(whole(*words, **named), complete=False),
        )
        assert decided().source == "measured"
    assert decided().source == "measured"
    assert decided().source == "cached"
    assert len(measured) == 3


def test_backends_that_all_failed_when_measured_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def refuse(request: BenchRequest, *words: object, **named: object) -> BenchReport:
        refusals = dict.fromkeys(request.candidates, "gave no sign for 21 s and was ended")
        return BenchReport(samples=(), refusals=refusals, seconds=1.0)

    monkeypatch.setattr(planning, "measure_in_child", refuse)
    with pytest.raises(BackendUnavailable, match="cpu_rowwise: gave no sign for 21 s"):
        decided(decode_backend="cpu_rowwise")


def test_when_nothing_can_be_measured_the_priority_holds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fail(*words: object, **named: object) -> BenchReport:
        raise SelectionError("the measuring child process failed: no memory")

    monkeypatch.setattr(planning, "measure_in_child", fail)
    decision = decided()
    assert decision.source == "fixed priority"
    assert not decision.plan.measured
    assert "no memory" in caplog.text
    assert list(tmp_path.iterdir()) == []

"""Listing, settings, and the one dispatcher; and the report as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tp_runtime.errors import BackendUnavailable, ConfigError, SelectionError
from tp_runtime.selection import (
    PRIORITY,
    BackendPlan,
    BackendSet,
    BenchReport,
    BenchRequest,
    DecodeShape,
    DecodeStep,
    DeviceInfo,
    Eligibility,
    Sample,
    available_backends,
    measure,
    prepare_decode_backend,
    select,
)
from tp_runtime.selection.bench import cells_of
from tp_runtime.selection.registry import CPU_FACTORIES, FACTORIES, GPU_FACTORIES, usable_backends
from tp_runtime.selection.report import plan_table, selection_report

if TYPE_CHECKING:
    from collections.abc import Mapping

SHAPE = DecodeShape(
    q_heads=6, kv_heads=2, head_dim=16, dtype="float32", page_size=16, table_width=8
)
CPU = DeviceInfo(type="cpu", name="cpu")
HERE = (*CPU_FACTORIES, "torch_reference")


def step_of(rows: int, bucket: int | None = None, variant: int = 0) -> DecodeStep:
    return DecodeStep(
        batch_size=rows,
        kv_lens=np.full(bucket or rows, 5, np.int32),
        bucket=bucket,
        variant=variant,
    )


def test_listing_is_in_priority_order() -> None:
    listed = available_backends(SHAPE, CPU)
    assert tuple(name for name, _ in listed) == PRIORITY == tuple(FACTORIES)
    usable = [name for name, reason in listed if reason is None]
    assert usable == [*CPU_FACTORIES, "torch_reference"]
    assert all("GPUs only" in (dict(listed)[name] or "") for name in GPU_FACTORIES)


def test_elsewhere_the_cpu_backends_say_why() -> None:
    listed = dict(available_backends(SHAPE, DeviceInfo(type="cuda", name="a GPU")))
    assert listed["torch_reference"] is None
    assert all("CPU only" in (listed[name] or "") for name in CPU_FACTORIES)


def test_disabled_and_pinned() -> None:
    listed = dict(
        available_backends(SHAPE, CPU, eligibility=Eligibility(disabled=frozenset({"cpu_padded"})))
    )
    refused = [n for n, reason in listed.items() if reason and n not in GPU_FACTORIES]
    assert refused == ["cpu_padded"]
    listed = dict(available_backends(SHAPE, CPU, eligibility=Eligibility(pin="cpu_rowwise")))
    assert usable_backends(listed.items()) == ("cpu_rowwise",)
    assert listed["cpu_padded"] == "not asked for: cpu_rowwise is pinned"
    with pytest.raises(BackendUnavailable, match=r"cpu_rowwise.*CPU only"):
        available_backends(
            SHAPE, DeviceInfo(type="cuda", name="x"), eligibility=Eligibility(pin="cpu_rowwise")
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda: Eligibility(pin="xqa"),
        lambda: Eligibility(disabled=frozenset({"xqa", "cpu_padded"})),
    ],
)
def test_unknown_names_list_the_known(make: object) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match="'xqa' is unknown; known: flashinfer_trtllm_gen"):
        make()
    with pytest.raises(ConfigError, match="both asked for and disabled"):
        Eligibility(pin="cpu_padded", disabled=frozenset({"cpu_padded"}))


def test_a_backend_that_cannot_be_imported_is_a_refusal() -> None:
    factories = {"absent": "no_such_module_at_all:Backend", **FACTORIES}
    listed = dict(available_backends(SHAPE, CPU, factories=factories))
    assert "no_such_module_at_all" in (listed["absent"] or "")
    assert listed["cpu_padded"] is None


def test_nothing_usable_lists_every_reason() -> None:
    with pytest.raises(BackendUnavailable, match=r"a: too old; b: disabled"):
        usable_backends([("a", "too old"), ("b", "disabled")])


def test_backends_are_built_once_and_late() -> None:
    backends = BackendSet(SHAPE, torch.device("cpu"))
    assert not backends.built
    assert backends["cpu_padded"] is backends["cpu_padded"]
    assert list(backends.built) == ["cpu_padded"]
    with pytest.raises(BackendUnavailable, match="'xqa' is unknown"):
        backends["xqa"]


def test_dispatch_follows_bucket_and_variant() -> None:
    samples = [
        Sample(backend=name, bucket=4, total_kv=4 * n, max_kv=n, median_us=us)
        for n in (10, 100)
        for name, us in (("cpu_grouped", n), ("cpu_padded", 110 - n), ("torch_reference", 500))
    ]
    plan = select(samples, priority=HERE, shape=SHAPE)
    assert plan[4] == ("cpu_grouped", "cpu_padded")
    backends = BackendSet(SHAPE, torch.device("cpu"))
    for variant, name in enumerate(plan[4]):
        assert prepare_decode_backend(plan, step_of(3, 4, variant), backends=backends).name == name
    assert prepare_decode_backend(plan, step_of(9), backends=backends).name == "cpu_grouped"
    assert prepare_decode_backend(plan, step_of(3, 4)).name == "cpu_grouped"  # the default set
    with pytest.raises(SelectionError, match="variants"):
        prepare_decode_backend(plan, step_of(3, 4, 2), backends=backends)
    with pytest.raises(SelectionError, match="no bucket 5"):
        prepare_decode_backend(plan, step_of(3, 5), backends=backends)
    with pytest.raises(BackendUnavailable, match="backends="):
        prepare_decode_backend(BackendPlan.fixed(PRIORITY, [1]), step_of(1, 1))


def test_cells_are_seeded_and_within_limits() -> None:
    request = BenchRequest(
        shape=SHAPE, buckets=(1, 8, 64), kv_lens=(16, 100, 5000), max_total_kv=1000
    )
    cells = cells_of(request)
    assert cells == cells_of(request)
    assert {cell.bucket for cell in cells} == {1, 8, 64}
    assert max(max(cell.kv_lens) for cell in cells) <= SHAPE.max_kv_len
    assert any(len(set(cell.kv_lens)) > 1 for cell in cells)
    ragged = [c for c in cells_of(BenchRequest(shape=SHAPE, seed=1)) if len(set(c.kv_lens)) > 1]
    assert ragged != [c for c in cells_of(BenchRequest(shape=SHAPE)) if len(set(c.kv_lens)) > 1]


class Wrong:
    """Answers at once, with zeros."""

    name = "wrong"
    needs_host_lengths = False

    def __init__(self, shape: DecodeShape, device: torch.device) -> None:
        pass

    @staticmethod
    def refusal(shape: DecodeShape, device: DeviceInfo) -> str | None:
        return None

    def prepare_for_capture(self, bucket: int) -> None:
        pass

    def prepare(self, step: DecodeStep) -> None:
        pass

    def forward(self, q: torch.Tensor, kv: object, out: torch.Tensor) -> None:
        out.zero_()


class NotANumber(Wrong):
    def forward(self, q: torch.Tensor, kv: object, out: torch.Tensor) -> None:
        out.fill_(torch.nan)


class Raises(Wrong):
    def forward(self, q: torch.Tensor, kv: object, out: torch.Tensor) -> None:
        raise RuntimeError("no kernel image")


def small_request(extra: Mapping[str, str]) -> BenchRequest:
    factories = {**{name: f"{__name__}:{kind}" for name, kind in extra.items()}, **FACTORIES}
    return BenchRequest(
        shape=SHAPE, buckets=(1, 3), kv_lens=(20, 60), repeats=2, factories=factories
    )


def test_measuring_refuses_by_name_and_goes_on() -> None:
    report = measure(small_request({"wrong": "Wrong", "nan": "NotANumber", "raises": "Raises"}))
    assert "differs from float32" in report.refusals["wrong"]
    assert "not finite" in report.refusals["nan"]
    assert report.refusals["raises"] == "RuntimeError: no kernel image"
    assert len(report.refusals) == 3
    names = {s.backend for s in report.samples}
    assert names == {"cpu_grouped", "cpu_rowwise", "cpu_padded"}
    cells = cells_of(small_request({}))
    assert len(report.samples) == 3 * len(cells)
    assert all(s.median_us > 0 and s.spread_us >= 0 and s.host_us >= 0 for s in report.samples)
    plan = select(report.samples, priority=HERE)
    assert plan.measured
    assert plan.buckets == (1, 3)


def test_unknown_candidates_are_named() -> None:
    with pytest.raises(SelectionError, match="unknown candidates"):
        measure(BenchRequest(shape=SHAPE, candidates=("xqa",)))


def test_request_survives_json() -> None:
    import json

    request = small_request({"wrong": "Wrong"})
    assert BenchRequest.from_dict(json.loads(json.dumps(request.to_dict()))) == request


def test_report_is_aligned_and_says_what_was_refused() -> None:
    samples = [
        Sample(backend=name, bucket=4, total_kv=4 * n, max_kv=n * r, median_us=us)
        for n in (10, 100)
        for r in (1, 3)
        for name, us in (("cpu_grouped", n + 1.0), ("cpu_padded", 110.0 - n))
    ]
    plan = select(samples, priority=HERE, shape=SHAPE, buckets=[8])
    report = BenchReport(samples=tuple(samples), refusals={"xqa": "no\n GPU"}, seconds=1.5)
    text = selection_report(plan, report)
    lines = text.splitlines()
    assert lines[0].split() == [
        "bucket",
        "mean",
        "kv",
        "max",
        "kv",
        "backend",
        "us",
        "gain",
        "variants",
    ]
    assert len({line.index("cpu_") for line in lines[1:6]}) == 1
    assert lines[4].split() == ["100", "300", "cpu_padded", "10", "10.10x"]
    assert "xqa  no GPU" in text
    assert plan.digest[:12] in lines[-3]
    assert lines[-2].endswith("8 samples in 1.5 s")
    # no kernel gets faster with more tokens, as the second one does here
    assert "disturbed" in lines[-1]
    assert max(map(len, lines)) <= 100
    assert "cpu_grouped" in plan_table(BackendPlan.fixed(HERE, [1, 2]))

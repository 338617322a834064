from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tp_runtime.errors import CaptureError, ConfigError
from tp_runtime.graphs import DecodeGraphs

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@dataclass(frozen=True)
class Step:
    batch_size: Any
    bucket: Any
    variant: Any = 0


class Doubler:
    """A step function that remembers how it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, tuple[int, ...]]] = []

    def __call__(self, inputs: dict[str, Tensor], bucket: int, variant: int) -> dict[str, Tensor]:
        self.calls.append((bucket, variant, tuple(inputs["x"].shape)))
        return {"y": inputs["x"] * (variant + 2)}


def make(
    device: torch.device = CPU, *, buckets: Any = (1, 4, 2), variants: Any = None, **kwargs: Any
) -> tuple[DecodeGraphs, Tensor, Doubler]:
    x = torch.zeros(max(buckets), 3, device=device)
    fn = Doubler()
    if variants is None:
        variants = dict.fromkeys(buckets, 2)
    graphs = DecodeGraphs(
        fn, inputs={"x": x}, buckets=buckets, variants=variants, device=device, **kwargs
    )
    return graphs, x, fn


def test_the_static_step_runs_over_the_filled_buffers() -> None:
    graphs, x, fn = make()
    graphs.capture()
    x[:2] = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    out = graphs.replay(Step(2, 2, 1))
    assert out["y"].tolist() == [[3.0, 6.0, 9.0], [12.0, 15.0, 18.0]]
    x[1] = 1.0
    assert graphs.replay(Step(1, 2, 1))["y"][1].tolist() == [3.0, 3.0, 3.0]
    assert fn.calls == [(2, 1, (2, 3))] * 2
    assert graphs.statistics().replays == 2


def test_without_a_gpu_it_says_that_nothing_is_captured() -> None:
    graphs, _, fn = make()
    report = graphs.capture()
    assert not graphs.captures
    assert not report.captures
    assert report.device_bytes == 0
    assert fn.calls == []  # running a step here would change the host's state for nothing
    assert graphs.statistics().graphs == 6


def test_the_largest_bucket_comes_first() -> None:
    graphs, _, _ = make(buckets=[2, 8, 2, 4], variants=lambda bucket: 1 if bucket == 8 else 2)
    seen: list[tuple[int, int]] = []
    report = graphs.capture(lambda done, total: seen.append((done, total)))
    assert graphs.buckets == (2, 4, 8)
    assert [(g.bucket, g.variant) for g in report.graphs] == [
        (8, 0),
        (4, 0),
        (4, 1),
        (2, 0),
        (2, 1),
    ]
    assert seen[0] == (0, 5)
    assert seen[-1] == (5, 5)


def test_capture_is_done_once() -> None:
    graphs, _, _ = make()
    assert graphs.capture() is graphs.capture()


def test_views_share_the_largest_buffers() -> None:
    graphs, x, _ = make(buckets=(1, 4))
    for bucket in (1, 4):
        view = graphs.views(bucket)["x"]
        assert view.shape == (bucket, 3)
        assert view.data_ptr() == x.data_ptr()


def test_buffers_may_have_a_row_per_token() -> None:
    shapes: list[tuple[int, ...]] = []

    def fn(inputs: dict[str, Tensor], bucket: int, variant: int) -> Tensor:
        shapes.extend(tuple(t.shape) for t in inputs.values())
        return inputs["tokens"]

    inputs = {"tokens": torch.zeros(12), "slots": torch.zeros(4)}
    graphs = DecodeGraphs(
        fn, inputs=inputs, buckets=[2, 4], variants={2: 1, 4: 1}, device=CPU, q_len=3
    )
    report = graphs.capture()
    assert report.graphs[0].q_len == 3
    graphs.replay(Step(2, 2))
    assert shapes == [(6,), (2,)]


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (Step(1, None), "names no bucket"),
        (Step(1, 3), "bucket 3 is not one of (1, 2, 4)"),
        (Step(1, 2, 2), "variants 0 .. 1, not 2"),
        (Step(1, 2, -1), "not -1"),
        (Step(3, 2), "a batch of 3 does not fit bucket 2"),
        (Step(0, 2), "a batch of 0"),
        (Step(-1, 2), "a batch of -1"),
        (Step("2", 2), "not a step"),
        (Step(2, "2"), "not a step"),
        (Step(2, 2, None), "not a step"),
        (Step(True, True), "not a step"),
        (object(), "names no bucket"),
        (None, "names no bucket"),
    ],
)
def test_can_run_says_why_not_and_never_raises(step: Any, reason: str) -> None:
    graphs, _, fn = make()
    graphs.capture()
    able, why = graphs.can_run(step)
    assert not able
    assert reason in why
    with pytest.raises(CaptureError, match="cannot replay"):
        graphs.replay(step)
    assert fn.calls == []


def test_can_run_follows_the_life_of_the_graphs() -> None:
    graphs, _, _ = make()
    assert graphs.can_run(Step(1, 1)) == (False, "nothing is captured yet")
    graphs.capture()
    before = graphs.statistics()
    for rows, bucket in ((1, 1), (1, 2), (2, 2), (3, 4), (4, 4)):
        assert graphs.can_run(Step(rows, bucket, 1)) == (True, "")
    assert graphs.statistics() == before
    graphs.close()
    assert graphs.can_run(Step(1, 1)) == (False, "the graphs are closed")
    with pytest.raises(CaptureError, match="closed"):
        graphs.replay(Step(1, 1))


def test_a_dropped_graph_is_refused_with_its_reason_and_the_others_stay() -> None:
    graphs, _, _ = make()
    with pytest.raises(CaptureError, match="before capture"):
        graphs.drop({(4, 1): "too large"})
    whole = graphs.capture()
    rest = graphs.drop({(4, 1): "rank 1 had no memory"})
    assert graphs.dropped == {(4, 1): "rank 1 had no memory"}
    assert graphs.can_run(Step(4, 4, 1)) == (False, "bucket 4 variant 1: rank 1 had no memory")
    assert graphs.can_run(Step(4, 4, 0)) == (True, "")
    assert [g for g in whole.graphs if (g.bucket, g.variant) != (4, 1)] == list(rest.graphs)
    assert rest.digest != whole.digest
    assert graphs.drop({}).digest == rest.digest


def test_close_is_final_and_idempotent() -> None:
    graphs, _, _ = make()
    with graphs:
        graphs.capture()
    graphs.close()
    assert graphs.statistics().graphs == 0
    with pytest.raises(CaptureError, match="after close"):
        graphs.capture()


def test_a_buffer_that_is_not_the_captured_one_is_refused() -> None:
    graphs, x, _ = make()
    graphs.capture()
    step = Step(2, 2)
    with pytest.raises(CaptureError, match=r"input x is not the static buffer.*expected.*got"):
        graphs.replay(step, inputs={"x": x.clone()})
    with pytest.raises(CaptureError, match="input x"):
        graphs.replay(step, inputs={"x": x[:2]})
    with pytest.raises(CaptureError, match="input x"):
        graphs.replay(step, inputs={"x": x.view(torch.int32)})
    with pytest.raises(CaptureError, match=r"inputs \['x'\], got \['z'\]"):
        graphs.replay(step, inputs={"z": x})
    graphs.replay(step, inputs={"x": x})
    x.set_(torch.zeros(4, 3))  # type: ignore[call-overload]
    with pytest.raises(CaptureError, match="input x"):
        graphs.replay(step)


def test_the_digest_is_equal_for_equal_graphs_only() -> None:
    def digest(**kwargs: Any) -> str:
        return make(**kwargs)[0].capture().digest

    same = digest()
    assert digest() == same
    assert len(same) == 64
    others = [
        digest(buckets=(1, 4)),
        digest(variants=lambda bucket: 1),
        digest(describe=lambda bucket, variant: {"backend": "a"}),
        digest(describe=lambda bucket, variant: {"backend": "b"}),
    ]
    assert len({same, *others}) == 5


def test_details_are_part_of_the_descriptor() -> None:
    graphs, _, _ = make(describe=lambda bucket, variant: {"width": 7, "backend": f"b{variant}"})
    first = graphs.capture().graphs[0]
    assert first.details == (("backend", "b0"), ("width", 7))
    assert first.inputs == (("x", (4, 3), "float32"),)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"buckets": (0, 4)}, "positive"),
        ({"buckets": (2.0, 4)}, "positive"),
        ({"variants": {1: 1, 2: 1}}, "variants of bucket 4"),
        ({"variants": lambda bucket: 0}, "at least 1, got 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(kwargs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**kwargs)


def test_no_buckets_and_wrong_buffers_are_refused() -> None:
    def build(buckets: list[int], x: Tensor) -> None:
        DecodeGraphs(Doubler(), inputs={"x": x}, buckets=buckets, variants=lambda b: 1, device=CPU)

    with pytest.raises(ConfigError, match="positive"):
        build([], torch.zeros(4))
    with pytest.raises(ConfigError, match="input x: expected 4 rows"):
        build([4], torch.zeros(5, 3))
    with pytest.raises(ConfigError, match="input x: expected 4 rows"):
        build([4], torch.tensor(1.0))
    with pytest.raises(ConfigError, match="input x: expected cpu"):
        build([4], torch.zeros(4, device="meta"))


@pytest.mark.gpu
@needs_gpu
def test_a_replay_equals_the_eager_step() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    graphs, x, fn = make(device, buckets=(1, 2, 8))
    barriers: list[int] = []
    report = graphs.capture(before_each=lambda: barriers.append(1))
    assert report.captures
    assert len(barriers) == 6
    assert report.graphs[0].outputs == (("y", (8, 3), "float32"),)
    captured_calls = len(fn.calls)
    for bucket in (1, 2, 8):
        for variant in (0, 1):
            for seed in range(3):
                x.copy_(torch.randn(8, 3, generator=torch.Generator().manual_seed(seed)))
                out = graphs.replay(Step(bucket, bucket, variant))["y"]
                assert torch.equal(out, x[:bucket] * (variant + 2))
    assert len(fn.calls) == captured_calls
    # outputs of one graph live on while another runs
    first = graphs.replay(Step(8, 8, 0))["y"]
    graphs.replay(Step(8, 8, 1))
    assert torch.equal(first, x * 2)
    graphs.close()
    assert graphs.statistics().graphs == 0


@pytest.mark.gpu
@needs_gpu
def test_a_step_that_cannot_be_captured_is_named() -> None:
    device = torch.device("cuda", torch.cuda.current_device())

    def waits(inputs: dict[str, Tensor], bucket: int, variant: int) -> Tensor:
        return inputs["x"] * float(inputs["x"].sum().item())

    graphs = DecodeGraphs(
        waits,
        inputs={"x": torch.ones(2, device=device)},
        buckets=[1, 2],
        variants=lambda b: 1,
        device=device,
    )
    with pytest.raises(
        CaptureError, match=r"bucket 2 variant 0 could not be captured after 0 of 2"
    ):
        graphs.capture()
    assert graphs.can_run(Step(1, 1)) == (False, "nothing is captured yet")
    torch.cuda.synchronize(device)
    assert float(torch.ones(2, device=device).sum()) == 2.0


@needs_gpu
@pytest.mark.gpu
def test_a_graph_without_memory_is_left_out() -> None:
    device = torch.device("cuda", 0)

    def step(inputs: dict[str, Tensor], bucket: int, variant: int) -> Tensor:
        if bucket == 4 and variant == 1:
            torch.empty(1 << 50, dtype=torch.uint8, device=device)
        return inputs["x"] + variant

    x = torch.zeros(4, 3, device=device)
    graphs = DecodeGraphs(
        step, inputs={"x": x}, buckets=(2, 4), variants={2: 2, 4: 2}, device=device
    )
    report = graphs.capture()
    assert len(report.graphs) == 3
    assert "no memory" in graphs.can_run(Step(4, 4, 1))[1]
    assert graphs.replay(Step(2, 2, 1))[0].tolist() == [1.0] * 3
    # where other ranks wait in the collectives of the eager run, nobody may go on without it
    several = DecodeGraphs(
        step, inputs={"x": x}, buckets=(2, 4), variants={2: 2, 4: 2}, device=device
    )
    with pytest.raises(CaptureError, match="bucket 4 variant 1 could not be captured after 1 of 4"):
        several.capture(before_each=lambda: None)

"""Every decode backend against float32 attention: one body of checks for all of them."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tp_runtime.errors import SelectionError
from tp_runtime.selection import (
    BenchRequest,
    DecodeShape,
    DecodeStep,
    DeviceInfo,
    PagedKV,
    measure_in_child,
    select,
)
from tp_runtime.selection.numerics import TOLERANCE, GateBatch, mismatch
from tp_runtime.selection.registry import (
    FACTORIES,
    GPU_FACTORIES,
    BackendSet,
    available_backends,
)
from tp_runtime.testing import run_ranks

if TYPE_CHECKING:
    from tp_runtime.selection import DecodeBackend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

NAMES = [*GPU_FACTORIES, "torch_reference"]
PLANNED = ["flashinfer_fa2_tc", "flashinfer_cuda_core", "flashinfer_fa3"]
UNREPEATABLE = ["cudnn"]  # two eager runs of it differ in the last bit as well
BUCKET = 8


def shape_of(
    heads: str, head_dim: int, page_size: int, dtype: str = "bfloat16", **more: Any
) -> DecodeShape:
    q_heads, kv_heads = map(int, heads.split("/"))
    return DecodeShape(
        q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype,
        page_size=page_size, table_width=4096 // page_size, **more,
    )  # fmt: skip


SHAPES = [
    shape_of("32/8", 128, 64),
    shape_of("28/4", 128, 64),
    shape_of("6/2", 64, 16, "float16"),
    shape_of("16/2", 256, 128),
    shape_of("8/8", 128, 32),
    shape_of("4/1", 128, 16),
]


def named(shape: DecodeShape) -> str:
    heads = f"{shape.q_heads}-{shape.kv_heads}"
    return f"{heads}-d{shape.head_dim}-p{shape.page_size}-{shape.dtype}-q{shape.q_len}"


def backend_of(name: str, shape: DecodeShape) -> DecodeBackend:
    device = torch.device("cuda", 0)
    listed = dict(available_backends(shape, DeviceInfo.of(device), named=[name]))
    if listed[name] is not None:
        pytest.skip(listed[name] or "")
    if name == "flashinfer_fa3" and (shape.head_dim, shape.dtype) != (128, "bfloat16"):
        pytest.skip("only one of its kernels is built for tests: each takes minutes")
    return BackendSet(shape, device)[name]


@dataclass(frozen=True, kw_only=True)
class Static:
    """The buffers of a captured step, and the pages that its rows may name."""

    shape: DecodeShape
    batch: GateBatch
    order: np.ndarray[Any, np.dtype[np.int64]]

    @classmethod
    def make(cls, shape: DecodeShape, rows: int) -> Static:
        device = torch.device("cuda", 0)
        pages = rows * shape.table_width
        size = (pages + 2, shape.kv_heads, shape.page_size, shape.head_dim)
        dtype = getattr(torch, shape.dtype)
        k, v = (torch.randn(size, device=device).to(dtype) for _ in range(2))
        k[pages] = v[pages] = torch.nan  # what the entries beyond a row's length name
        heads = (rows * shape.q_len, shape.q_heads, shape.head_dim)
        batch = GateBatch(
            shape=shape,
            step=DecodeStep(batch_size=rows, bucket=rows, kv_lens=np.ones(rows, np.int32)),
            q=torch.randn(heads, device=device).to(dtype),
            kv=PagedKV(
                k=k,
                v=v,
                block_table=torch.full(
                    (rows, shape.table_width), pages + 1, dtype=torch.int32, device=device
                ),
                kv_lens=torch.full((rows,), shape.q_len, dtype=torch.int32, device=device),
            ),
        )
        return cls(shape=shape, batch=batch, order=np.random.default_rng(1).permutation(pages))

    def fill(self, lengths: list[int]) -> GateBatch:
        """Write a step into the buffers; rows beyond `lengths` are padding on the dummy page."""
        batch, rows = self.batch, self.batch.kv.block_table.shape[0]
        nan_page = self.batch.kv.k.shape[0] - 2
        padded = np.array([*lengths, *[self.shape.q_len] * (rows - len(lengths))], np.int32)
        table = np.full((rows, self.shape.table_width), nan_page, np.int32)
        start = 0
        for row, length in enumerate(lengths):
            count = -(-length // self.shape.page_size)
            table[row, :count] = self.order[start : start + count]
            start += count
        table[len(lengths) :, 0] = nan_page + 1
        batch.kv.block_table.copy_(torch.from_numpy(table))
        batch.kv.kv_lens.copy_(torch.from_numpy(padded))
        batch.q.normal_()
        step = DecodeStep(batch_size=len(lengths), bucket=rows, kv_lens=padded)
        return replace(batch, step=step)


class Captured:
    """A backend's launch in a graph, captured as the engine does: with the shortest rows."""

    def __init__(self, backend: DecodeBackend, static: Static) -> None:
        self.backend, self.static = backend, static
        self.out = torch.full_like(static.batch.q, torch.nan)
        rows = static.batch.kv.block_table.shape[0]
        backend.prepare_for_capture(rows)
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                backend.forward(static.batch.q, static.batch.kv, self.out)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            backend.forward(static.batch.q, static.batch.kv, self.out)

    def check(self, lengths: list[int]) -> None:
        """Replay is what an eager run gives, bit for bit, and what float32 attention gives."""
        batch = self.static.fill(lengths)
        self.out.fill_(torch.nan)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.backend.prepare(batch.step)
            self.graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        eager = torch.full_like(self.out, torch.nan)
        self.backend.forward(batch.q, batch.kv, eager)
        if self.backend.name in UNREPEATABLE:
            torch.testing.assert_close(self.out, eager, rtol=2**-6, atol=2**-8)
        else:
            assert torch.equal(self.out, eager), f"graph and eager differ at {lengths}"
        far = (self.out.float() - batch.expected()).abs().max().item()
        assert far <= TOLERANCE[self.static.shape.dtype], f"{far} from float32 at {lengths}"


def lengths_of(seed: int, shape: DecodeShape) -> list[int]:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, BUCKET + 1))
    drawn = np.exp(rng.uniform(np.log(shape.q_len), np.log(shape.max_kv_len), rows))
    return [int(n) for n in np.clip(drawn.round(), shape.q_len, shape.max_kv_len)]


@pytest.mark.parametrize("shape", SHAPES, ids=named)
@pytest.mark.parametrize("name", NAMES)
def test_matches_float32(name: str, shape: DecodeShape) -> None:
    backend = backend_of(name, shape)
    device = torch.device("cuda", 0)
    for seed, rows in enumerate((1, 2, 5, 33, 130)):
        reason = mismatch(GateBatch.random(shape, rows, device, seed=seed), backend)
        assert reason is None, f"{rows} rows: {reason}"


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("shape", SHAPES, ids=named)
@pytest.mark.parametrize("name", NAMES)
def test_replays_follow_the_lengths(name: str, shape: DecodeShape) -> None:
    captured = Captured(backend_of(name, shape), Static.make(shape, BUCKET))
    longest, page = shape.max_kv_len, shape.page_size
    # the largest plan, then smaller ones in the same bucket: nothing of it may be left
    captured.check([longest] * BUCKET)
    captured.check([1])
    captured.check([page, page + 1, 1])
    captured.check([longest, 1, 1, 1, 1, 1, 1, 1])
    for seed in range(4):
        captured.check(lengths_of(seed, shape))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", NAMES)
def test_several_query_tokens(name: str) -> None:
    shape = shape_of("32/8", 128, 64, q_len=3)
    backend = backend_of(name, shape)
    device = torch.device("cuda", 0)
    for seed, rows in enumerate((1, 5, 33)):
        assert mismatch(GateBatch.random(shape, rows, device, seed=seed), backend) is None
    captured = Captured(backend, Static.make(shape, BUCKET))
    for seed in range(3):
        captured.check(lengths_of(seed, shape))


@pytest.mark.parametrize("name", NAMES)
def test_8_bit_pages(name: str) -> None:
    shape = shape_of("32/8", 128, 64, kv_dtype="float8_e4m3fn")
    batch = GateBatch.random(shape, 7, torch.device("cuda", 0), seed=1)
    assert mismatch(batch, backend_of(name, shape)) is None


def replay_often(name: str) -> int:
    """In a child: many replays of small and large plans in turn; a hang ends with the child."""
    import warnings

    warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
    shape = SHAPES[0]
    captured = Captured(backend_of(name, shape), Static.make(shape, BUCKET))
    for seed in range(100):
        captured.check(lengths_of(seed, shape))
        captured.check([shape.max_kv_len] * BUCKET if seed % 2 else [1])
    return 200


@pytest.mark.parametrize("name", [*PLANNED, "flashinfer_xqa", "triton_splitkv"])
def test_no_replay_hangs(name: str) -> None:
    backend_of(name, SHAPES[0])
    assert run_ranks(replay_often, 1, 120, args=(name,)) == [200]


@pytest.mark.parametrize("name", ["flashinfer_xqa", "triton_splitkv"])
def test_counters_are_zero_after_a_launch(name: str) -> None:
    shape = SHAPES[0]
    backend: Any = backend_of(name, shape)
    for seed, rows in enumerate((3, 40)):
        assert (
            mismatch(GateBatch.random(shape, rows, torch.device("cuda"), seed=seed), backend)
            is None
        )
    if name == "triton_splitkv":
        buffers = list(backend._counters._buffers.values())
    else:
        buffers = [b[: 1 << 20] for b in backend._workspaces._buffers.values()]
    assert buffers
    assert not any(bool(buffer.any()) for buffer in buffers)


@pytest.mark.parametrize("name", ["triton_splitkv", "flashinfer_fa2_tc"])
def test_what_does_not_fit_is_named(name: str) -> None:
    shape = SHAPES[0]
    backend = backend_of(name, shape)
    batch = GateBatch.random(shape, 3, torch.device("cuda"), seed=0)
    narrow = replace(batch.kv, block_table=batch.kv.block_table[:, :-1])
    with pytest.raises(SelectionError, match="expected a block table 64 pages wide, got 63"):
        backend.forward(batch.q, narrow, torch.empty_like(batch.q))
    with pytest.raises(SelectionError, match="expected q"):
        backend.forward(batch.q[:2], batch.kv, torch.empty_like(batch.q[:2]))


def test_the_benchmark_measures_in_a_child_and_leaves_nothing() -> None:
    shape = SHAPES[0]
    free_before, _ = torch.cuda.mem_get_info()
    request = BenchRequest(
        shape=shape, device="cuda", buckets=(1, 16), kv_lens=(200, 2000), repeats=3
    )
    report = measure_in_child(request, 200.0)
    free_after, _ = torch.cuda.mem_get_info()
    raced = {sample.backend for sample in report.samples}
    assert report.complete
    assert {"flashinfer_xqa", "flashinfer_fa2_tc", "triton_splitkv"} <= raced, report.refusals
    assert "torch_reference" not in raced
    assert set(report.refusals) <= {"flashinfer_trtllm_gen", "flashinfer_fa3", "cudnn"}
    assert all(1.0 < sample.median_us < 2000.0 for sample in report.samples)
    planned = [s.host_us for s in report.samples if s.backend in PLANNED]
    assert min(planned) > 5.0 > max(s.host_us for s in report.samples if s.backend not in PLANNED)
    if "PYTEST_XDIST_WORKER" not in os.environ:  # other tests take memory at the same time
        assert abs(free_before - free_after) < 64 << 20
    plan = select(report.samples, priority=[n for n in NAMES if n in raced])
    assert set(plan[16]) <= raced


def test_candidates_that_fault_or_lie_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here), *sys.path]))
    faulty = {"faults": "faulty_gpu_backends:Faults", "lies": "faulty_gpu_backends:Lies"}
    request = BenchRequest(
        shape=SHAPES[0],
        device="cuda",
        buckets=(2,),
        kv_lens=(300,),
        repeats=2,
        candidates=(*faulty, "triton_splitkv"),
        factories={**faulty, **FACTORIES},
    )
    report = measure_in_child(request, 200.0)
    assert set(report.refusals) == set(faulty)
    assert "the process ended" in report.refusals["faults"]
    assert "not finite" in report.refusals["lies"]
    assert {sample.backend for sample in report.samples} == {"triton_splitkv"}
    assert report.complete

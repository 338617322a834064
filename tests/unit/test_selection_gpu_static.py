"""What can be said about the GPU backends without a GPU: who refuses what, and what is imported."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tp_runtime.errors import SelectionError
from tp_runtime.selection import (
    BenchRequest,
    DecodeShape,
    DecodeStep,
    DeviceInfo,
    Eligibility,
    available_backends,
)
from tp_runtime.selection.backends import gpu_support
from tp_runtime.selection.bench import candidates_of, cells_of
from tp_runtime.selection.registry import GPU_FACTORIES, PRIORITY

HOPPER = DeviceInfo(type="cuda", name="H200", capability=(9, 0))
BLACKWELL = DeviceInfo(type="cuda", name="B200", capability=(10, 0))
AMPERE = DeviceInfo(type="cuda", name="A100", capability=(8, 0))
TURING = DeviceInfo(type="cuda", name="T4", capability=(7, 5))


def shape_of(**changes: Any) -> DecodeShape:
    usual: dict[str, Any] = {
        "q_heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16",
        "page_size": 64, "table_width": 128,
    }  # fmt: skip
    return DecodeShape(**{**usual, **changes})


@pytest.fixture
def _all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_support, "find_spec", lambda name: object())
    monkeypatch.setattr(gpu_support, "can_compile", lambda: True)


def refusals(shape: DecodeShape, device: DeviceInfo = HOPPER, **more: Any) -> dict[str, str | None]:
    listed = dict(available_backends(shape, device, **more))
    return {name: listed[name] for name in GPU_FACTORIES}


def usable(shape: DecodeShape, device: DeviceInfo = HOPPER, **more: Any) -> list[str]:
    return [name for name, reason in refusals(shape, device, **more).items() if reason is None]


def test_the_order_is_part_of_the_contract() -> None:
    assert PRIORITY == (
        "flashinfer_trtllm_gen",
        "flashinfer_xqa",
        "flashinfer_fa2_tc",
        "cudnn",
        "flashinfer_cuda_core",
        "triton_splitkv",
        "flashinfer_fa3",
        "cpu_grouped",
        "cpu_rowwise",
        "cpu_padded",
        "torch_reference",
    )


@pytest.mark.usefixtures("_all_installed")
def test_who_serves_what() -> None:
    hopper = ["flashinfer_xqa", "flashinfer_fa2_tc", "cudnn", "flashinfer_cuda_core"]
    assert usable(shape_of()) == [*hopper, "triton_splitkv"]
    assert usable(shape_of(), BLACKWELL)[0] == "flashinfer_trtllm_gen"
    assert "flashinfer_xqa" not in usable(shape_of(), AMPERE)
    assert usable(shape_of(), TURING) == []
    seven = refusals(shape_of(q_heads=28, kv_heads=4))
    assert "group of query heads per KV head 7" in (seven["flashinfer_cuda_core"] or "")
    assert seven["flashinfer_xqa"] is seven["triton_splitkv"] is None
    three = usable(shape_of(q_heads=6, kv_heads=2))
    assert three == [*hopper, "triton_splitkv"]
    assert usable(shape_of(q_len=4)) == ["flashinfer_fa2_tc", "triton_splitkv"]
    assert usable(shape_of(dtype="float32")) == []
    eight_bits = usable(shape_of(kv_dtype="float8_e4m3fn"))
    assert eight_bits == ["flashinfer_fa2_tc", "flashinfer_cuda_core", "triton_splitkv"]
    assert "flashinfer_xqa" not in usable(shape_of(page_size=8))
    assert usable(shape_of(head_dim=96)) == []
    assert "no multiple" in (refusals(shape_of(q_heads=30))["triton_splitkv"] or "")
    assert "more than 64" in (refusals(shape_of(q_len=32))["triton_splitkv"] or "")


@pytest.mark.usefixtures("_all_installed")
def test_fa3_only_when_named() -> None:
    assert refusals(shape_of())["flashinfer_fa3"] == "used only when it is asked for by name"
    assert refusals(shape_of(), named=["flashinfer_fa3"])["flashinfer_fa3"] is None
    pinned = Eligibility(pin="flashinfer_fa3")
    assert usable(shape_of(), eligibility=pinned) == ["flashinfer_fa3"]
    raced, _ = candidates_of(BenchRequest(shape=shape_of(), device="cuda"), HOPPER)
    assert "flashinfer_fa3" not in raced
    assert not any(name.startswith("cpu_") for name in raced)
    named = BenchRequest(shape=shape_of(), device="cuda", candidates=("flashinfer_fa3",))
    assert candidates_of(named, HOPPER)[0] == ["flashinfer_fa3"]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"flashinfer", "cudnn", "triton", "flashinfer_jit_cache"}
    monkeypatch.setattr(gpu_support, "find_spec", lambda n: None if n in absent else object())
    found = refusals(shape_of())
    assert found["cudnn"] == "the package cudnn is not installed"
    assert found["triton_splitkv"] == "the package triton is not installed"
    absent -= {"flashinfer"}
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for variable in ("FLASHINFER_NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert "no nvcc was found" in (refusals(shape_of())["flashinfer_xqa"] or "")
    monkeypatch.setenv("FLASHINFER_NVCC", "/opt/nvcc")
    assert refusals(shape_of())["flashinfer_xqa"] is None


def test_listing_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from tp_runtime.selection import DecodeShape, DeviceInfo, available_backends\n"
        "shape = DecodeShape(q_heads=8, kv_heads=2, head_dim=128, dtype='bfloat16',"
        " page_size=16, table_width=8)\n"
        "available_backends(shape, DeviceInfo(type='cuda', name='x', capability=(9, 0)))\n"
        "heavy = {'flashinfer', 'cudnn', 'triton', 'tvm_ffi'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_page_counts_and_lengths_that_do_not_fit() -> None:
    shape = shape_of(page_size=16, table_width=4)

    def pages(*lengths: int) -> list[int]:
        step = DecodeStep(batch_size=len(lengths), kv_lens=np.array(lengths, np.int32))
        return [int(n) for n in gpu_support.host_pages("it", shape, step)]

    assert pages(1, 16, 17, 64) == [1, 1, 2, 4]
    for lengths in ((0,), (65,), ()):
        with pytest.raises(SelectionError, match="it: expected KV lengths from 1 to 64"):
            pages(*lengths)


def test_a_users_own_batches_are_cells() -> None:
    request = BenchRequest(
        shape=shape_of(), device="cuda", buckets=(1, 4), kv_lens=(100,),
        batches=((5, 6), (7, 900, 3, 1)),
    )  # fmt: skip
    cells = [cell.kv_lens for cell in cells_of(request)]
    assert (5, 6) in cells
    assert (7, 900, 3, 1) in cells
    assert [len(cell) for cell in cells] == sorted(len(cell) for cell in cells)
    assert BenchRequest.from_dict(request.to_dict()) == request


def test_usual_lengths_depend_on_the_device() -> None:
    assert max(BenchRequest(shape=shape_of()).kv_lens) == 1024
    on_gpu = BenchRequest(shape=shape_of(), device="cuda:1")
    assert max(on_gpu.kv_lens) > 8192
    assert on_gpu.max_total_kv == 1 << 20

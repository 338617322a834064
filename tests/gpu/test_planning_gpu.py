"""Deciding on a GPU: it leaves no memory behind, and a kept plan needs no kernel library."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tp_runtime.testing import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LIBRARIES = ("flashinfer", "triton", "cudnn", "matplotlib")


def decide_here(again: bool) -> dict[str, Any]:
    """In a process of its own: one decision, and what it left behind."""
    from tp_runtime.config import RuntimeConfig
    from tp_runtime.planning import decide
    from tp_runtime.selection import DecodeShape

    def refuse(*words: object, **named: object) -> None:
        raise AssertionError("a process was started")

    if again:
        subprocess.Popen.__init__ = refuse  # type: ignore[method-assign]
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)  # the context itself takes memory
    before = set(sys.modules)
    free_before, _ = torch.cuda.mem_get_info(device)
    reserved_before = torch.cuda.memory_reserved(device)
    stages: list[str] = []
    decision = decide(
        RuntimeConfig(enable_dynamic_decode_backend=True),
        DecodeShape(
            q_heads=32, kv_heads=8, head_dim=128, dtype="bfloat16", page_size=64, table_width=32
        ),
        device,
        buckets=(1, 16),
        layers=32,
        threads=0,
        progress=lambda stage, done, total: stages.append(stage),
    )
    torch.cuda.synchronize()
    free_after, _ = torch.cuda.mem_get_info(device)
    loaded = {name.split(".")[0] for name in set(sys.modules) - before}
    return {
        "source": decision.source,
        "digest": decision.plan.digest,
        "stages": sorted(set(stages)),
        "extra_bytes": free_before - free_after,
        "extra_reserved_bytes": torch.cuda.memory_reserved(device) - reserved_before,
        "libraries": sorted(loaded & set(LIBRARIES)),
        "seconds": decision.seconds,
    }


def test_a_decision_leaves_nothing_behind_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (first,) = run_ranks(decide_here, 1, 240, args=(False,))
    (second,) = run_ranks(decide_here, 1, 120, args=(True,))
    assert (first["source"], second["source"]) == ("measured", "cached")
    assert first["digest"] == second["digest"]
    assert first["stages"] == ["build", "selection"]
    assert second["stages"] == []
    for decision in (first, second):
        assert decision["extra_reserved_bytes"] == 0
        # of the whole device, so only where no test runs beside this one; the driver itself has
        # been seen to move 64 KiB around
        if "PYTEST_XDIST_WORKER" not in os.environ:
            assert abs(decision["extra_bytes"]) < 1 << 20
    assert first["libraries"] == second["libraries"] == []

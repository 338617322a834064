from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tp_runtime.group import TpGroup
from tp_runtime.ops.sampling import INVALID_TOKEN, SamplerMode, gather_vocab_sizes, sample
from tp_runtime.ranks import RankInfo
from tp_runtime.testing import run_ranks

VOCAB, ROWS, STEPS = 1009, 6, 40
CPU = torch.device("cpu")


def draw_on(group: TpGroup) -> list[list[list[int]]]:
    """Tokens of every mode, step and row, from this rank's slice of seeded logits."""
    width = -(-VOCAB // group.size)  # uneven: the last slice is narrower
    start, end = width * group.rank, min(VOCAB, width * (group.rank + 1))
    sizes = gather_vocab_sizes(group, end - start, CPU)
    generator = torch.Generator().manual_seed(1)
    drawn: list[list[list[int]]] = [[] for _ in SamplerMode]
    for step in range(STEPS):
        logits = torch.randn(ROWS, VOCAB, generator=generator) * 3
        logits[5, 1000] = torch.nan
        for mode in SamplerMode:
            ids = sample(
                logits[:, start:end],
                vocab_start=start,
                temperature=torch.tensor([0.0, 0.5, 0.8, 1.0, 1.5, 1.0]),
                top_k=torch.tensor([0, 5, 0, 50, 0, 0]),
                top_p=torch.tensor([1.0, 1.0, 0.9, 0.95, 1.0, 0.9]),
                min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.05, 0.0]),
                seed=torch.arange(ROWS) + 100,
                position=torch.full((ROWS,), step),
                mode=mode,
                group=group,
                vocab_sizes=sizes,
            )
            drawn[mode].append(ids.tolist())
    return drawn


def on_rank() -> Any:
    group = TpGroup.create(RankInfo.from_env(), device=CPU, timeout_s=30)
    try:
        return draw_on(group)
    finally:
        group.close()


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_ranks_draw_what_one_rank_would(size: int) -> None:
    expected = draw_on(TpGroup.single(CPU))
    assert all(row[5] == INVALID_TOKEN for mode in expected for row in mode)
    assert len({json.dumps(mode) for mode in expected}) == 3
    for drawn in run_ranks(on_rank, size, timeout_s=90):
        assert drawn == expected

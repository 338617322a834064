from __future__ import annotations

import pytest
import torch

from tp_runtime.config import RuntimeConfig
from tp_runtime.errors import ConfigError
from tp_runtime.models.base import ModelShape
from tp_runtime.sizing import block_bytes, default_buckets, resolve_sizes

SHAPE = ModelShape(
    num_layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=8,
    vocab_size=100,
    vocab_start=0,
    vocab_end=100,
    max_positions=1000,
    dtype=torch.float32,
)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (40, (1, 2, 4, 8, 16, 24, 32, 40)),
        (70, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 70)),
    ],
)
def test_default_buckets(most: int, expected: tuple[int, ...]) -> None:
    assert default_buckets(most) == expected


@pytest.mark.parametrize("most", range(1, 400, 7))
def test_buckets_ascend_without_repeats_and_end_at_the_maximum(most: int) -> None:
    buckets = default_buckets(most)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == most


def test_sizes_follow_from_the_model() -> None:
    config = RuntimeConfig(model="m", max_batch_size=4, kv_block_size=64, kernel_page_size=16)
    sizes = resolve_sizes(config, SHAPE, device=CPU, ranks_on_host=1)
    assert sizes.max_seq_len == 1000
    assert sizes.pages_per_block == 4
    assert sizes.table_width == 16 * 4
    assert sizes.num_blocks == 4 * 16 + 1
    assert sizes.num_pages == sizes.num_blocks * 4
    assert block_bytes(SHAPE, 64) == 2 * 2 * 2 * 8 * 4 * 64


def test_the_cache_is_as_large_as_asked() -> None:
    config = RuntimeConfig(model="m", kv_cache_tokens=640)
    assert resolve_sizes(config, SHAPE, device=CPU, ranks_on_host=1).num_blocks == 11
    with pytest.raises(ConfigError, match="at least one block"):
        resolve_sizes(
            RuntimeConfig(model="m", kv_cache_tokens=63), SHAPE, device=CPU, ranks_on_host=1
        )


def test_a_sequence_longer_than_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_seq_len 1001: the model has 1000"):
        resolve_sizes(
            RuntimeConfig(model="m", max_seq_len=1001), SHAPE, device=CPU, ranks_on_host=1
        )

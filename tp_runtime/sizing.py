"""How large things are: buckets, sequence length, block table and KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tp_runtime.errors import ConfigError
from tp_runtime.pages import resolve_kernel_page

if TYPE_CHECKING:
    import torch

    from tp_runtime.config import RuntimeConfig
    from tp_runtime.models.base import ModelShape

CPU_KV_TOKENS = 65_536
"""Default bound of the cache on a CPU, where memory is shared with everything else."""

KV_MEMORY_SHARE = 0.85
"""Share of the memory that is free after loading which an unset cache may take on a GPU."""

CPU_KV_MEMORY_SHARE = 0.5


def default_buckets(max_batch_size: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then every 8 up to 64, every 16 up to 256, then every 32; ends at the maximum."""
    steps = [1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, max_batch_size, 32)]
    return (*(size for size in steps if size < max_batch_size), max_batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes that follow from the configuration and the model; equal on every rank.

    Args:
        max_seq_len: longest prompt and answer, in tokens.
        page_size: kernel page in tokens.  block_size: unit of allocation in tokens.
        num_blocks: blocks of the cache, the dummy included.
        buckets: batch sizes of the graphs, ascending; the last is the largest batch.
    """

    max_seq_len: int
    page_size: int
    block_size: int
    num_blocks: int
    slots: int
    buckets: tuple[int, ...]

    @property
    def pages_per_block(self) -> int:
        return self.block_size // self.page_size

    @property
    def num_pages(self) -> int:
        return self.num_blocks * self.pages_per_block

    @property
    def table_width(self) -> int:
        """Kernel pages of the longest sequence, in whole blocks."""
        return -(-self.max_seq_len // self.block_size) * self.pages_per_block


def block_bytes(shape: ModelShape, block_size: int) -> int:
    """Bytes of one block in all layers of one rank, keys and values."""
    per_token = 2 * shape.num_layers * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
    return per_token * block_size


def resolve_sizes(
    config: RuntimeConfig, shape: ModelShape, *, device: torch.device, ranks_on_host: int
) -> Sizes:
    """Decide all sizes. Rank 0's answer is what counts: it may look at free memory.

    Raises:
        ConfigError: the model is shorter than asked, or the cache cannot hold one sequence.
    """
    max_seq_len = config.max_seq_len or shape.max_positions
    if max_seq_len > shape.max_positions:
        raise ConfigError(
            f"max_seq_len {max_seq_len}: the model has {shape.max_positions} positions"
        )
    block_size = config.kv_block_size
    buckets = config.decode_buckets or default_buckets(config.max_batch_size)
    blocks = _num_blocks(config, shape, max_seq_len, device, ranks_on_host)
    return Sizes(
        max_seq_len=max_seq_len,
        page_size=resolve_kernel_page(block_size, config.kernel_page_size),
        block_size=block_size,
        num_blocks=blocks + 1,
        slots=config.max_batch_size,
        buckets=tuple(buckets),
    )


def _num_blocks(
    config: RuntimeConfig,
    shape: ModelShape,
    max_seq_len: int,
    device: torch.device,
    ranks_on_host: int,
) -> int:
    block_size = config.kv_block_size
    if config.kv_cache_tokens is not None:
        blocks = config.kv_cache_tokens // block_size
        if blocks < 1:
            raise ConfigError(
                f"kv_cache_tokens {config.kv_cache_tokens}: expected at least one block of "
                f"{block_size} tokens"
            )
        return blocks
    per_sequence = -(-max_seq_len // block_size)
    wanted = config.max_batch_size * per_sequence
    if device.type == "cpu":
        wanted = min(wanted, max(CPU_KV_TOKENS // block_size, per_sequence))
    affordable = free_bytes(device, ranks_on_host) // block_bytes(shape, block_size)
    if affordable < 1:
        raise ConfigError(
            f"no memory for a KV cache: one block needs {block_bytes(shape, block_size)} bytes"
        )
    return min(wanted, affordable)


def free_bytes(device: torch.device, ranks_on_host: int) -> int:
    """Memory that one rank may take on this device, of what is free now."""
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return int(free * KV_MEMORY_SHARE)
    import psutil

    return int(psutil.virtual_memory().available * CPU_KV_MEMORY_SHARE / ranks_on_host)

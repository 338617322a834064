"""Our own decode attention kernel: no host plan, any batch divided evenly by the GPU itself.

See `splitkv_kernel` for how. It reads lengths on the device, so that one captured graph serves any
batch, takes any group of query heads and several query tokens per row, and never reads beyond a
row's length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tp_runtime.selection.backends.gpu_support import DTYPES, Support, Workspaces, checked_rows

if TYPE_CHECKING:
    from torch import Tensor

    from tp_runtime.selection.base import DecodeShape, DecodeStep, DeviceInfo, PagedKV

SUPPORT = Support(
    modules=("triton",), page_sizes=(8, 16, 32, 64, 128, 256), fp8_kv=True, long_queries=True
)
_LOG2_E = 1.4426950408889634
_MOST_QUERY_ROWS = 64
_BYTES_IN_FLIGHT = 9 << 19  # what keeps the memory of a large GPU busy: bandwidth times latency


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """How the kernel is compiled and how many programs run.

    Args:
        block_n: KV tokens per tile.  stages: tiles in flight, one less than this many.
        per_sm: programs per multiprocessor, all resident at once.
        merge_cost, merge_step_cost: what cutting a batch costs, and each turn of adding up its
            parts, in quarters of the time of one tile.
        merged_elements: of partial results in registers at once, when they are added up.
        max_registers: per thread; None leaves it to the compiler.
    """

    block_n: int = 64
    stages: int = 3
    warps: int = 4
    per_sm: int = 2
    merge_cost: int = 6
    merge_step_cost: int = 7
    merged_elements: int = 16384
    max_registers: int | None = None
    dependent_launch: bool = True


def launch_config(shape: DecodeShape, major: int) -> LaunchConfig:
    """The configuration for a shape; fixed, never tuned at run time."""
    return LaunchConfig(block_n=64 if shape.head_dim <= 128 else 32, dependent_launch=major >= 9)


class TritonSplitKv:
    name = "triton_splitkv"
    needs_host_lengths = False

    def __init__(
        self, shape: DecodeShape, device: torch.device, config: LaunchConfig | None = None
    ) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._shape = shape
        self._config = config or launch_config(shape, properties.major)
        self._programs = properties.multi_processor_count * self._config.per_sm
        kv_dtype = DTYPES[shape.kv_dtype or shape.dtype]
        tile_bytes = 2 * self._config.block_n * shape.head_dim * kv_dtype.itemsize
        self._saturating = max(1, _BYTES_IN_FLIGHT // tile_bytes)
        self._group_rows = _power_of_two(shape.group_size * shape.q_len)
        self._results = Workspaces(self.name, device)
        self._counters = Workspaces(self.name, device)
        self._kernel: Any = None

    @staticmethod
    def refusal(shape: DecodeShape, device: DeviceInfo) -> str | None:
        reason = SUPPORT.refusal(shape, device)
        if reason is None and shape.group_size * shape.q_len > _MOST_QUERY_ROWS:
            return (
                f"{shape.group_size} query heads per KV head times q_len {shape.q_len} are more "
                f"than {_MOST_QUERY_ROWS} query rows"
            )
        return reason

    def prepare_for_capture(self, bucket: int) -> None:
        self._buffers(bucket)

    def prepare(self, step: DecodeStep) -> None:
        """Reads lengths on the device."""

    def forward(self, q: Tensor, kv: PagedKV, out: Tensor) -> None:
        shape, config = self._shape, self._config
        rows = checked_rows(self.name, shape, q, kv)
        if self._kernel is None:
            from tp_runtime.selection.backends.splitkv_kernel import splitkv

            self._kernel = splitkv
        acc, stat, count = self._buffers(rows)
        try:
            self._kernel[(self._programs,)](
                q,
                kv.k,
                kv.v,
                kv.block_table,
                kv.kv_lens,
                out,
                acc,
                stat,
                count,
                rows,
                shape.table_width,
                _LOG2_E * shape.head_dim**-0.5,
                KV_HEADS=shape.kv_heads,
                GROUP=shape.group_size,
                Q_LEN=shape.q_len,
                HEAD_DIM=shape.head_dim,
                PAGE=shape.page_size,
                ROWS_POW2=32 if rows <= 32 else max(128, _power_of_two(rows)),
                BLOCK_M=max(16, self._group_rows),
                BLOCK_N=config.block_n,
                BLOCK_S=max(1, config.merged_elements // (self._group_rows * shape.head_dim)),
                GROUP_ROWS=self._group_rows,
                SATURATING=self._saturating,
                MERGE_COST=config.merge_cost,
                MERGE_STEP_COST=config.merge_step_cost,
                STAGES=config.stages,
                PDL=config.dependent_launch,
                num_warps=config.warps,
                maxnreg=config.max_registers,
                launch_pdl=config.dependent_launch,
            )
        except RuntimeError:
            self._counters.reset()
            raise

    def _buffers(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Partial results, their maxima and weights, and the counters of arrivals."""
        slots = 2 * self._programs * self._group_rows
        size = slots * self._shape.head_dim
        results = self._results.get(4 * (size + 2 * slots)).view(torch.float32)
        # grows with the batch; counters are back at zero after each launch
        count = self._counters.get(4 * max(1024, rows * self._shape.kv_heads))
        return results[:size], results[size:], count.view(torch.int32)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()

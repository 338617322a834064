"""What the contenders of the broadcast benchmark send, and how a peer reads it.

A steady-decode step of 64 rows is, for ours, the runtime's own `StepPlan`, and for the rivals the
dict that serving engines ship: request ids, token counts, computed counts, block deltas, finished
requests. With blocks of 16 tokens, 4 of the 64 rows cross into a new block per step on average.
"""

from __future__ import annotations

import pickle  # noqa: TID251 - only to tell how large the rivals' step is
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tp_runtime.step_plan import StepKind, StepPlan

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = 64
BLOCK_TOKENS = 16
RAW_BYTES = 1 << 10
LARGE_BYTES = 1 << 20
# A server that has been up for a while: small numbers would flatter every codec.
FIRST_STEP = 100_000
_SEED = 20261129


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """One kind of message.

    Args:
        make: message number i as rank 0 hands it over; made before the clock starts.
        read: what the peer does with a received one before the clock stops.
        index: the number that a read message carries, looked up after the clock stopped.
    """

    name: str
    make: Callable[[int], Any]
    read: Callable[[Any], Any] | None
    index: Callable[[Any], int]


def _crossings(index: int) -> list[tuple[int, int, int]]:
    """Slots that cross into a new block in step `index`: (slot, block index, block)."""
    position = FIRST_STEP + index
    crossed = []
    for slot, offset in enumerate(_OFFSETS):
        if (position + offset) % BLOCK_TOKENS == 0:
            block_index = 40 + (index + offset) // BLOCK_TOKENS
            crossed.append((slot, block_index, _BLOCKS[(slot * 131 + index) % len(_BLOCKS)]))
    return crossed


_rng = random.Random(_SEED)
_OFFSETS = [_rng.randrange(BLOCK_TOKENS) for _ in range(ROWS)]
_BLOCKS = [_rng.randrange(20_000) for _ in range(4096)]
_REQUEST_IDS = [f"cmpl-{_rng.getrandbits(128):032x}" for _ in range(ROWS)]


def step_plan(index: int) -> StepPlan:
    """Steady decode of 64 rows: the rows are those of the step before."""
    return StepPlan(
        step=FIRST_STEP + index,
        kind=StepKind.DECODE,
        bucket=ROWS,
        variant=0,
        rows=None,
        num_rows=ROWS,
        blocks=tuple(_crossings(index)),
    )


def step_dict(index: int) -> dict[str, Any]:
    """The same step as serving engines ship it."""
    crossed = {slot: block for slot, _, block in _crossings(index)}
    return {
        "step": FIRST_STEP + index,
        "num_scheduled_tokens": dict.fromkeys(_REQUEST_IDS, 1),
        "total_num_scheduled_tokens": ROWS,
        "num_computed_tokens": [640 + index + offset for offset in _OFFSETS],
        "new_block_ids": [[crossed[slot]] if slot in crossed else None for slot in range(ROWS)],
        "finished_req_ids": [_REQUEST_IDS[index % ROWS]],
        "num_common_prefix_blocks": [0],
    }


def step_dict_bytes() -> int:
    return len(pickle.dumps(step_dict(0), protocol=pickle.HIGHEST_PROTOCOL))


def _numbered(index: int, rest: bytes) -> bytes:
    return index.to_bytes(8, "little") + rest


def _first_number(message: Any) -> int:
    return int.from_bytes(bytes(memoryview(message)[:8]), "little")


def _sum_all(message: Any) -> int:
    """Read every byte of a large body; the sum minus that of the constant part is its number."""
    return int(np.frombuffer(message, dtype=np.uint64).sum()) - _LARGE_SUM


_RAW_REST = _rng.randbytes(RAW_BYTES - 8)
# Small numbers, so that a 64-bit sum cannot wrap.
_LARGE_REST = np.arange(1, LARGE_BYTES // 8, dtype=np.uint64)
_LARGE_SUM = int(_LARGE_REST.sum())
_LARGE_REST_BYTES = _LARGE_REST.tobytes()

RAW = Payload(
    name="1 KiB",
    make=lambda index: _numbered(index, _RAW_REST),
    read=None,
    index=_first_number,
)
LARGE = Payload(
    name="1 MiB",
    make=lambda index: _numbered(index, _LARGE_REST_BYTES),
    read=_sum_all,
    index=lambda total: int(total),
)
PLAN = Payload(
    name="step",
    make=step_plan,
    read=None,
    index=lambda plan: int(plan.step) - FIRST_STEP,
)
DICT = Payload(
    name="step",
    make=step_dict,
    read=None,
    index=lambda step: int(step["step"]) - FIRST_STEP,
)

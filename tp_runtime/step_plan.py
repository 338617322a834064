"""The only per-step message: what every rank does next.

Rank 0 decides, once; the plan names the graph (bucket and variant) or eager, and no rank decides
alone. Tokens, positions and lengths are not in it: they advance on the device. What travels is
what changed: a slot that was taken, a block that a slot crossed into, a chunk of a prompt, and the
rows of the decode batch when they are not those of the decode step before.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np

    from tp_runtime.sampling import SamplingParams

    TokenArray = np.ndarray[tuple[int], np.dtype[np.int32]]


class StepKind(IntEnum):
    """What a step is made of. IDLE and STOP run nothing, but every rank takes part in them."""

    DECODE = 0
    PREFILL = 1
    MIXED = 2
    IDLE = 3
    STOP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """A slot begins a new request: its length is zero and this is how its tokens are drawn.

    Only what the sampler reads travels: temperature, top_k, top_p, min_p and the seed. Where a
    request ends is rank 0's affair.
    """

    slot: int
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Part of a prompt. `samples`: it is the last part, so the first new token comes from it."""

    slot: int
    start: int
    token_ids: TokenArray
    samples: bool

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


# An entry of a slot's block table that changes: slot, position in the table, block.
BlockEntry: TypeAlias = tuple[int, int, int]


class StepPlan(NamedTuple):
    """One step, as every rank runs it.

    A named tuple, with plain tuples in it: peers make one in every step, and this way that takes a
    fifth of the time.

    Args:
        step: consecutive number, from 0.
        bucket: rows of the graph to replay; None: eager.
        variant: which of the bucket's graphs.
        rows: slots of the decode batch in row order; None: those of the decode step before.
        num_rows: how many rows decode, also when `rows` is None.
        blocks, admits: applied before the step runs, admits first.
        chunks: prompts in this step.
    """

    step: int
    kind: StepKind
    bucket: int | None = None
    variant: int = 0
    rows: tuple[int, ...] | None = ()
    num_rows: int = 0
    admits: tuple[Admit, ...] = ()
    blocks: tuple[BlockEntry, ...] = ()
    chunks: tuple[Chunk, ...] = ()

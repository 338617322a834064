"""The only per-step message: what every rank does next.

Rank 0 decides, once; the plan names the graph (bucket and variant) or eager, and no rank decides
alone. Tokens, positions and lengths are not in it: they advance on the device. What travels is
what changed: a slot that was taken, a block that a slot crossed into, a chunk of a prompt, and the
rows of the decode batch when they are not those of the decode step before.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from tp_runtime.errors import ProtocolError
from tp_runtime.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    def to_message(self) -> list[Any]:
        s = self.sampling
        return [self.slot, s.temperature, s.top_k, s.top_p, s.min_p, self.seed]

    @classmethod
    def from_message(cls, message: Sequence[Any]) -> Admit:
        slot, temperature, top_k, top_p, min_p, seed = message
        sampling = SamplingParams(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
        )
        return cls(slot=slot, sampling=sampling, seed=seed)


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

    def to_message(self) -> list[Any]:
        return [self.slot, self.start, self.samples, self.token_ids.tobytes()]

    @classmethod
    def from_message(cls, message: Sequence[Any]) -> Chunk:
        slot, start, samples, tokens = message
        token_ids = np.frombuffer(tokens, dtype=np.int32)
        return cls(slot=slot, start=start, samples=bool(samples), token_ids=token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEntry:
    """Entry `index` of a slot's block table becomes `block`."""

    slot: int
    index: int
    block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step, as every rank runs it.

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

    def to_message(self) -> list[Any]:
        """The form that travels: small integers and arrays in a fixed order."""
        blocks = [(entry.slot, entry.index, entry.block) for entry in self.blocks]
        return [
            self.step,
            int(self.kind),
            -1 if self.bucket is None else self.bucket,
            self.variant,
            self.num_rows,
            None if self.rows is None else np.array(self.rows, dtype=np.int32),
            np.array(blocks, dtype=np.int32).reshape(-1) if blocks else None,
            [admit.to_message() for admit in self.admits] or None,
            [chunk.to_message() for chunk in self.chunks] or None,
        ]

    @classmethod
    def from_message(cls, message: object) -> StepPlan:
        """Raises ProtocolError when the message is not a step plan."""
        try:
            return cls._parse(message)
        except (TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"expected a step plan from rank 0, got {error}") from error

    @classmethod
    def _parse(cls, message: object) -> StepPlan:
        if not isinstance(message, list) or len(message) != 9:
            raise TypeError(f"{type(message).__name__} instead of a list of 9")
        step, kind, bucket, variant, num_rows, rows, blocks, admits, chunks = message
        flat = [] if blocks is None else np.asarray(blocks, dtype=np.int64).reshape(-1, 3).tolist()
        return cls(
            step=int(step),
            kind=StepKind(kind),
            bucket=None if bucket == -1 else int(bucket),
            variant=int(variant),
            num_rows=int(num_rows),
            rows=None if rows is None else tuple(int(slot) for slot in rows),
            admits=tuple(Admit.from_message(entry) for entry in admits or ()),
            blocks=tuple(BlockEntry(slot=s, index=i, block=b) for s, i, b in flat),
            chunks=tuple(Chunk.from_message(entry) for entry in chunks or ()),
        )

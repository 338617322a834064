"""A step plan as it travels: whole, or only what changed since the step before.

Whole, a list of 9: step, kind, bucket (-1: eager), variant, number of rows, rows (null: as
before), blocks, admits, chunks (null: none). Blocks are slot, position, block, slot, ...

A steady decode step, which has kind, graph and rows of the step before, is a delta: the step number
and its blocks, 1 + 3n integers. Its base is the message before; the channel is ordered and ends at
the first failure, so the base is always there, and the step number shows that it is the right one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tp_runtime.errors import ProtocolError
from tp_runtime.sampling import SamplingParams
from tp_runtime.step_plan import Admit, Chunk, StepKind, StepPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tp_runtime.step_plan import BlockEntry

_WHOLE = 9
_INTEGERS = frozenset({int})


class StepEncoder:
    """Rank 0's side; one for a channel, used for every step in order."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: StepPlan | None = None

    def encode(self, plan: StepPlan) -> list[Any]:
        """The message for the peers, small integers in a fixed order."""
        last, self._last = self._last, plan
        if last is not None and _is_steady(plan, last):
            message = [plan.step]
            for entry in plan.blocks:
                message += entry
            return message
        return [
            plan.step,
            int(plan.kind),
            -1 if plan.bucket is None else plan.bucket,
            plan.variant,
            plan.num_rows,
            None if plan.rows is None else list(plan.rows),
            [number for entry in plan.blocks for number in entry] or None,
            [_from_admit(admit) for admit in plan.admits] or None,
            [_from_chunk(chunk) for chunk in plan.chunks] or None,
        ]


def _is_steady(plan: StepPlan, last: StepPlan) -> bool:
    return (
        plan.rows is None
        and plan.kind is last.kind is StepKind.DECODE
        and plan.bucket == last.bucket
        and plan.variant == last.variant
        and plan.num_rows == last.num_rows
        and not plan.admits
    )


class StepDecoder:
    """A peer's side; one for a channel, used for every message in order."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: StepPlan | None = None

    def decode(self, message: object) -> StepPlan:
        """Raises ProtocolError: it is no step plan, or not the one after the plan before."""
        try:
            if type(message) is not list:
                raise TypeError(f"a {type(message).__name__} instead of a list")
            plan = _whole(message) if len(message) == _WHOLE else _delta(message, self._last)
        except (TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"expected a step plan from rank 0, got {error}") from error
        last = self._last
        if last is not None and plan.step != last.step + 1:
            raise ProtocolError(f"expected step {last.step + 1} from rank 0, got {plan.step}")
        self._last = plan
        return plan


def _whole(message: list[Any]) -> StepPlan:
    step, kind, bucket, variant, num_rows, rows, blocks, admits, chunks = message
    return StepPlan(
        step=_number(step),
        kind=StepKind(kind),
        bucket=None if bucket == -1 else _number(bucket),
        variant=_number(variant),
        num_rows=_number(num_rows),
        rows=None if rows is None else tuple(map(_number, rows)),
        blocks=_blocks(list(map(_number, blocks or ()))),
        admits=tuple(map(_to_admit, admits or ())),
        chunks=tuple(map(_to_chunk, chunks or ())),
    )


def _delta(message: list[Any], last: StepPlan | None) -> StepPlan:
    if last is None or last.kind is not StepKind.DECODE:
        raise ValueError(f"{len(message)} values that change no decode step before")
    if not _INTEGERS.issuperset(map(type, message)):
        raise TypeError("something else than numbers in a delta")
    blocks = _blocks(message[1:]) if len(message) > 1 else ()
    _, kind, bucket, variant, _, num_rows, _, _, _ = last
    return StepPlan(message[0], kind, bucket, variant, None, num_rows, (), blocks)


def _number(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} where a number must be")
    return value


def _blocks(flat: list[int]) -> tuple[BlockEntry, ...]:
    each = iter(flat)
    # strict: slot, position and block of every entry
    return tuple(zip(each, each, each, strict=True))


def _from_admit(admit: Admit) -> list[Any]:
    s = admit.sampling
    return [admit.slot, s.temperature, s.top_k, s.top_p, s.min_p, admit.seed]


def _to_admit(message: Sequence[Any]) -> Admit:
    slot, temperature, top_k, top_p, min_p, seed = message
    sampling = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    return Admit(slot=slot, sampling=sampling, seed=seed)


def _from_chunk(chunk: Chunk) -> list[Any]:
    return [chunk.slot, chunk.start, chunk.samples, chunk.token_ids.tobytes()]


def _to_chunk(message: Sequence[Any]) -> Chunk:
    slot, start, samples, tokens = message
    token_ids = np.frombuffer(tokens, dtype=np.int32)
    return Chunk(slot=slot, start=start, token_ids=token_ids, samples=bool(samples))

"""A step plan as it travels: whole, or only what changed since the step before.

Whole, a list of 9: step, kind, bucket (-1: eager), variant, number of rows, rows (null: as
before), blocks, admits, chunks (null: none). Blocks are slot, position, block, slot, ...

A steady decode step, which has kind, graph and rows of the step before, is a delta: the step number
and its blocks, 1 + 3n integers. Its base is the message before; the channel is ordered and ends at
the first failure, so the base is always there, and the step number shows that it is the right one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from tp_runtime.errors import ProtocolError
from tp_runtime.sampling import SamplingParams
from tp_runtime.step_plan import Admit, Chunk, StepKind, StepPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tp_runtime.step_plan import BlockEntry

_WHOLE = 9
_INTEGERS = frozenset({int})
_DECODE = StepKind.DECODE
_new = tuple.__new__


class StepEncoder:
    """Rank 0's side; one for a channel, used for every step in order."""

    __slots__ = ("_before",)

    def __init__(self) -> None:
        # Kind, bucket, variant and number of rows of the step before.
        self._before: tuple[StepKind, int | None, int, int] | None = None

    def encode(self, plan: StepPlan) -> list[Any]:
        """The message for the peers, small integers in a fixed order."""
        step, kind, bucket, variant, rows, num_rows, admits, blocks, chunks = plan
        before, now = self._before, (kind, bucket, variant, num_rows)
        if rows is None and kind is _DECODE and now == before and not admits:
            message = [step]
            for entry in blocks:
                message += entry
            return message
        self._before = now
        return [
            step,
            int(kind),
            -1 if bucket is None else bucket,
            variant,
            num_rows,
            None if rows is None else list(rows),
            [number for entry in blocks for number in entry] or None,
            [_from_admit(admit) for admit in admits] or None,
            [_from_chunk(chunk) for chunk in chunks] or None,
        ]


class StepDecoder:
    """A peer's side; one for a channel, used for every message in order."""

    __slots__ = ("_base", "_next")

    def __init__(self) -> None:
        # Kind, bucket, variant and number of rows that a delta leaves as they are; None: no delta.
        self._base: tuple[StepKind, int | None, int, int] | None = None
        self._next: int | None = None

    def decode(self, message: object) -> StepPlan:
        """Raises ProtocolError: it is no step plan, or not the one after the plan before."""
        # A delta in one straight line: every rank waits for it in every step, and a step of the
        # model has put this code out of the caches.
        base = self._base
        if (
            base is not None
            and type(message) is list
            and len(message) % 3 == 1
            and message[0] == self._next
            and _INTEGERS.issuperset(map(type, message))
        ):
            kind, bucket, variant, num_rows = base
            each = iter(message)
            step = next(each)
            blocks = tuple(zip(each, each, each))  # noqa: B905 - the length was looked at
            self._next = step + 1
            # what StepPlan(...) does, without the call between
            return _new(StepPlan, (step, kind, bucket, variant, None, num_rows, (), blocks, ()))
        return self._decode_other(message)

    def _decode_other(self, message: object) -> StepPlan:
        """A plan that is whole; and what is wrong with any other message."""
        try:
            if type(message) is not list:
                raise TypeError(f"a {type(message).__name__} instead of a list")
            if len(message) != _WHOLE:
                self._refuse_delta(message)
            plan = _whole(message)
        except (TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"expected a step plan from rank 0, got {error}") from error
        self._check_order(plan.step)
        self._next = plan.step + 1
        steady = plan.kind is _DECODE
        self._base = (plan.kind, plan.bucket, plan.variant, plan.num_rows) if steady else None
        return plan

    def _refuse_delta(self, message: list[Any]) -> NoReturn:
        if self._base is None:
            raise ValueError(f"{len(message)} values that change no decode step before")
        if not message or not _INTEGERS.issuperset(map(type, message)):
            raise TypeError("something else than numbers in a delta")
        if len(message) % 3 == 1:
            self._check_order(message[0])
        raise ValueError(f"{len(message)} values, expected a step and three for each block")

    def _check_order(self, step: int) -> None:
        if self._next is not None and step != self._next:
            raise ProtocolError(f"expected step {self._next} from rank 0, got {step}")

    def rehearse(self, message: object) -> None:
        """Decode the delta that was decoded last once more, without effect.

        So this code is in the caches when the next message comes; see
        `CpuTpBroadcaster.rehearse_with`.
        """
        step = self._next
        if (
            step is not None
            and type(message) is list
            and len(message) % 3 == 1
            and message[0] == step - 1
        ):
            self._next = step - 1
            try:
                self.decode(message)
            finally:
                self._next = step


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

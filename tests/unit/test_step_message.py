from __future__ import annotations

import numpy as np
import pytest

from tp_runtime.broadcast.codec import decode, encode
from tp_runtime.broadcast.wire import HEADER_BYTES
from tp_runtime.errors import ProtocolError
from tp_runtime.sampling import SamplingParams
from tp_runtime.step_message import StepDecoder, StepEncoder
from tp_runtime.step_plan import Admit, Chunk, StepKind, StepPlan

MIXED = StepPlan(
    step=12,
    kind=StepKind.MIXED,
    bucket=None,
    variant=0,
    rows=(3, 1),
    num_rows=2,
    admits=(
        Admit(slot=5, sampling=SamplingParams(temperature=0.5, top_k=7, seed=2**62), seed=2**62),
    ),
    blocks=((5, 0, 9), (3, 4, 2)),
    chunks=(Chunk(slot=5, start=0, token_ids=np.array([4, 5, 6], dtype=np.int32), samples=True),),
)
DECODE = StepPlan(step=0, kind=StepKind.DECODE, bucket=8, variant=1, rows=(1, 2, 4), num_rows=3)


def assert_equal(a: StepPlan, b: StepPlan) -> None:
    for name in ("step", "kind", "bucket", "variant", "rows", "num_rows", "blocks"):
        assert getattr(a, name) == getattr(b, name), name
    assert [(x.slot, x.seed, x.sampling) for x in a.admits] == [
        (x.slot, x.seed, x.sampling) for x in b.admits
    ]
    assert [(x.slot, x.start, x.samples, x.token_ids.tolist()) for x in a.chunks] == [
        (x.slot, x.start, x.samples, x.token_ids.tolist()) for x in b.chunks
    ]


def steps(*plans: StepPlan) -> list[StepPlan]:
    return [plan._replace(step=step) for step, plan in enumerate(plans)]


SAME = DECODE._replace(rows=None)
CROSSING = SAME._replace(blocks=((2, 7, 70_000),))


@pytest.mark.parametrize(
    "plan",
    [
        MIXED,
        StepPlan(step=0, kind=StepKind.IDLE),
        StepPlan(step=1, kind=StepKind.STOP),
        DECODE,
        # the first message of a channel has no base, whatever it says
        SAME,
    ],
    ids=lambda plan: plan.kind.name,
)
def test_a_single_plan_comes_back_equal(plan: StepPlan) -> None:
    message = decode(encode(StepEncoder().encode(plan)))
    assert_equal(StepDecoder().decode(message), plan)


def test_steady_decode_sends_only_what_changed() -> None:
    variant, narrow = SAME._replace(variant=0), SAME._replace(num_rows=2)
    other_bucket = SAME._replace(bucket=16)
    plans = steps(
        MIXED, SAME, SAME, CROSSING, variant, variant, other_bucket, other_bucket, narrow,
        DECODE, SAME,
    )  # fmt: skip
    encoder, decoder = StepEncoder(), StepDecoder()
    sizes = []
    for plan in plans:
        message = encoder.encode(plan)
        sizes.append(len(message))
        assert_equal(decoder.decode(decode(encode(message))), plan)
    assert sizes == [9, 9, 1, 4, 9, 1, 9, 1, 9, 9, 1]


def test_a_steady_step_of_64_rows_fits_64_bytes_on_the_wire() -> None:
    # with blocks of 16 tokens, four of 64 rows cross into a new one in a usual step
    blocks = tuple((s, 99, 20_000 + s) for s in (1, 20, 40, 60))
    first = DECODE._replace(step=10_000, bucket=64, num_rows=64, rows=tuple(range(64)))
    steady = first._replace(step=10_001, rows=None, blocks=blocks)
    encoder = StepEncoder()
    encoder.encode(first)
    assert HEADER_BYTES + len(encode(encoder.encode(steady))) <= 64


def test_a_delta_without_its_base_is_refused() -> None:
    with pytest.raises(ProtocolError, match="change no decode step before"):
        StepDecoder().decode([7])
    after_mixed = StepDecoder()
    after_mixed.decode(StepEncoder().encode(MIXED))
    with pytest.raises(ProtocolError, match="change no decode step before"):
        after_mixed.decode([13])
    decoder = StepDecoder()
    decoder.decode(StepEncoder().encode(DECODE))
    with pytest.raises(ProtocolError, match="expected step 1 from rank 0, got 2"):
        decoder.decode([2])
    with pytest.raises(ProtocolError, match="expected step 1 from rank 0, got 0"):
        decoder.decode(StepEncoder().encode(DECODE))


@pytest.mark.parametrize(
    "message",
    [
        None,
        {"step": 1},
        [],
        [1, 99, -1, 0, 0, None, None, [], []],
        ["1", 0, -1, 0, 0, None, None, [], []],
        [1, 0, -1, 0, 1, None, [1, 2], [], []],
        [1, 0, -1, 0, 1, None, [1, 2, "3"], [], []],
        [1, 0, -1, 0, 1, [None], None, [], []],
        [1, 0, -1, 0, 1, None, None, [[1, 2]], []],
        [1, 1, -1, 0, 0, None, None, [], [[0, 0, True, b"abc"]]],
        [1, 1, -1, 0, 0, None, None, [[0, -1.0, 0, 1.0, 0.0, 1]], []],
        [1, 4, 5],
        [1, 4, 5, None],
        [True],
    ],
)
def test_what_is_no_plan_is_refused(message: object) -> None:
    decoder = StepDecoder()
    decoder.decode(StepEncoder().encode(DECODE))
    with pytest.raises(ProtocolError, match="expected a step plan"):
        decoder.decode(message)

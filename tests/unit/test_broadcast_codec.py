"""What may travel, what comes back, and what is refused by the path to it."""

from __future__ import annotations

import array
import enum
import random

import msgpack
import numpy as np
import pytest

from tp_runtime.broadcast.codec import LARGE_BYTES, MAX_DEPTH, decode, encode, encode_parts
from tp_runtime.errors import ProtocolError

SEED = 20261129


def random_message(rng: random.Random, depth: int = 0) -> object:
    choices = ["none", "bool", "int", "float", "str", "bytes"] + ["list", "dict"] * (depth < 4)
    kind = rng.choice(choices)
    if kind == "list":
        return [random_message(rng, depth + 1) for _ in range(rng.randrange(6))]
    if kind == "dict":
        return {f"k{i}": random_message(rng, depth + 1) for i in range(rng.randrange(6))}
    return {
        "none": None,
        "bool": rng.random() < 0.5,
        "int": rng.randrange(-(1 << 63), 1 << 64),
        "float": rng.uniform(-1e300, 1e300),
        "str": "".join(
            chr(rng.choice([65, 228, 0x4E2D, 0x1F600])) for _ in range(rng.randrange(9))
        ),
        "bytes": rng.randbytes(rng.randrange(300)),
    }[kind]


def test_random_messages_come_back_equal_and_of_the_same_types() -> None:
    rng = random.Random(SEED)
    for _ in range(500):
        message = random_message(rng)
        back = decode(encode(message))
        assert back == message
        assert type(back) is type(message)


def test_tuples_and_byte_views_come_back_as_lists_and_bytes() -> None:
    back = decode(encode({"t": (1, (2, 3)), "a": bytearray(b"x"), "m": memoryview(b"yz")}))
    assert back == {"t": [1, [2, 3]], "a": b"x", "m": b"yz"}


@pytest.mark.parametrize("name", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (3, 0, 2)])
def test_integer_arrays_keep_dtype_shape_and_values(name: str, shape: tuple[int, ...]) -> None:
    dtype = np.dtype(name)
    numbers = np.random.default_rng(SEED).integers(
        np.iinfo(dtype).min, np.iinfo(dtype).max, size=shape, dtype=dtype, endpoint=True
    )
    back = decode(encode({"x": numbers}))["x"]
    assert back.dtype == dtype
    assert back.shape == shape
    assert back.flags.writeable
    np.testing.assert_array_equal(back, numbers)


def test_arrays_of_any_order_are_taken() -> None:
    numbers = np.arange(12, dtype=np.int64).reshape(3, 4)
    for variant in (numbers.T, numbers[:, ::2], numbers.astype(">i8"), array.array("i", [1, -2])):
        np.testing.assert_array_equal(decode(encode([variant]))[0], np.asarray(variant))


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"a": [1, {"b": {1, 2}}]}, "$.a[1].b: a builtins.set"),
        ({"a": object()}, "$.a: a builtins.object"),
        ({1: 2}, "$: dict keys must be str, got int"),
        ({"x": {b"y": 1}}, "$.x: dict keys must be str, got bytes"),
        ({"x": 1 << 64}, "$.x: "),
        ([0, -(1 << 63) - 1], "$[1]: "),
        ({"x": ["\ud800"]}, "$.x[0]: "),
        ({"x": np.int64(3)}, "$.x: a numpy.int64"),
        ({"x": np.zeros(2, dtype=np.float32)}, "$.x: array of float32"),
        ({"x": np.zeros(2, dtype=np.bool_)}, "$.x: array of bool"),
        ({"x": Colour.RED}, "Colour may not travel"),
        (lambda: None, "$: a builtins.function"),
    ],
)
def test_what_may_not_travel_is_named_by_its_path(message: object, named: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        encode(message)
    assert named in str(caught.value)


def test_cycles_and_deep_nesting_are_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    deep: object = 1
    for _ in range(MAX_DEPTH + 2):
        deep = [deep]
    for message in (loop, deep):
        with pytest.raises(ProtocolError, match="nested deeper"):
            encode(message)


def test_every_truncation_and_any_trailing_byte_is_refused() -> None:
    body = encode({"ids": np.arange(40, dtype=np.int32), "t": ["abc", 1.5, None, b"\x00" * 9]})
    assert decode(body)["t"][0] == "abc"
    for end in range(len(body)):
        with pytest.raises(ProtocolError):
            decode(body[:end])
    with pytest.raises(ProtocolError):
        decode(body + b"\xc0")


def test_damaged_bodies_never_raise_anything_else() -> None:
    rng = random.Random(SEED)
    body = encode({"ids": np.arange(6, dtype=np.int16), "t": [{"a": 1}, "abc", 1.5]})
    refused = 0
    for bit in range(len(body) * 8):
        damaged = bytearray(body)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            decode(bytes(damaged))
        except ProtocolError:
            refused += 1
    assert refused > len(body)
    for _ in range(2000):
        try:
            decode(rng.randbytes(rng.randrange(1, 60)))
        except ProtocolError:
            refused += 1
    assert refused > 1000


@pytest.mark.parametrize(
    "body",
    [
        msgpack.packb({1: 2}),
        msgpack.packb({b"k": 2}),
        msgpack.packb(msgpack.ExtType(5, b"abc")),
        msgpack.packb(msgpack.ExtType(1, b"\x01")),
        # one dimension of 2**31 elements in no bytes
        msgpack.packb(msgpack.ExtType(1, b"\x04\x01\x00\x00\x00\x00\x00\x80")),
        # list of 2**32 - 1 items
        b"\xdd\xff\xff\xff\xff",
    ],
)
def test_hostile_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(body)


LARGE = [
    bytes(range(256)) * 300,
    bytearray(LARGE_BYTES),
    memoryview(bytes(LARGE_BYTES)),
    np.arange(40_000, dtype=np.int16).reshape(2, -1),
    np.arange(80_000, dtype=">i4")[::2],
    {"a": np.arange(20_000), "small": [1, {"b": (2, 3)}], "c": bytes(LARGE_BYTES), "d": None},
]


@pytest.mark.parametrize("message", LARGE, ids=lambda message: type(message).__name__)
def test_large_buffers_are_taken_as_they_lie(message: object) -> None:
    parts = encode_parts(message)
    assert len(parts) > 1
    assert b"".join(parts) == encode(message)


def test_a_large_contiguous_array_is_not_copied() -> None:
    column = np.arange(20_000, dtype=np.int64)
    elements = encode_parts({"column": column})[-1]
    assert np.shares_memory(np.frombuffer(elements, dtype=np.int64), column)


@pytest.mark.parametrize("message", [[1, 2], {"a": b"x"}, b"x", None, np.arange(3), {}])
def test_a_small_message_is_one_part(message: object) -> None:
    assert encode_parts(message) == [encode(message)]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"a": bytes(LARGE_BYTES), 2: 1}, "dict keys must be str"),
        ({"a": bytes(LARGE_BYTES), "b": [{1}]}, r"\$\.b\[0\]: a builtins.set may not travel"),
        ({"a": np.zeros(LARGE_BYTES)}, r"\$\.a: array of float64"),
        ({"a": memoryview(bytes(2 * LARGE_BYTES))[::2]}, r"\$\.a: a view that is not contiguous"),
    ],
)
def test_beside_large_buffers_everything_is_checked_too(message: object, named: str) -> None:
    with pytest.raises(ProtocolError, match=named):
        encode_parts(message)


def test_a_receiver_takes_no_deeper_nesting_than_a_sender() -> None:
    deepest: object = []
    for _ in range(MAX_DEPTH):
        deepest = [deepest]
    assert decode(encode(deepest)) == deepest
    for deeper in ([deepest], {"k": deepest}, [1, "a", [deepest]]):
        body = msgpack.packb(deeper)
        with pytest.raises(ProtocolError, match="nested deeper"):
            decode(body)
        with pytest.raises(ProtocolError, match="nested deeper"):
            encode(deeper)


def test_a_time_stamp_of_messagepack_comes_out_as_a_number() -> None:
    stamp = msgpack.packb(msgpack.Timestamp(1_000, 500_000_000))
    assert decode(stamp) == 1000.5

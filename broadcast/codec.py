"""Messages as MessagePack: the types that may travel, and nothing else.

A message is None, bool, int (64 bit), float, str, bytes, a list, a dict with str keys, or an
integer array. Tuples and bytearrays are taken too and come back as lists and bytes. Integer
arrays (numpy, or `array.array`) come back as writable numpy arrays of the same dtype and shape.

MessagePack's own time stamps, which nothing here sends, come out as a float.

Extension type 1 is an integer array: dtype code (1 byte), ndim (1), zero (2), each dimension
(4 bytes), zeros up to a multiple of 8, then the elements, little-endian, C order.
"""

from __future__ import annotations

import array
import struct
import sys
import threading
from typing import Any, TypeAlias

import msgpack
import numpy as np

from tp_runtime.errors import ProtocolError

Message: TypeAlias = Any

ARRAY_EXT = 1
MAX_DEPTH = 64
MAX_ITEMS = 1 << 20
# From here on a copy costs more than a piece of its own in the system call.
LARGE_BYTES = 64 << 10
_MSGPACK_BIN32 = 0xC6
_MSGPACK_EXT32 = 0xC9
_MAX_DIMS = 8
_ARRAY_HEAD = struct.Struct("<BBH")
_DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in enumerate(("<i1", "<i2", "<i4", "<i8", "<u1", "<u2", "<u4", "<u8"), start=1)
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
# One global name instead of two on the way of every message.
_unpackb = msgpack.unpackb
_NESTING = frozenset({list, dict})
_SCALARS = frozenset({type(None), bool, int, float, str, bytes, bytearray, memoryview})


class _Local(threading.local):
    """A packer for each thread: making one allocates a buffer far larger than a step message."""

    def __init__(self) -> None:
        self.packer = msgpack.Packer(default=_default, strict_types=True)


def encode(message: Message) -> bytes:
    """Encode a message.

    Raises:
        ProtocolError: something in it may not travel; the message names the path to it.
    """
    _check(message, "$", 0)
    return _pack(message)


def _pack(message: Message) -> bytes:
    """Encode what `_check` has let pass."""
    packer = _local.packer
    try:
        packed: bytes = packer.pack(message)
    except (OverflowError, UnicodeEncodeError, ValueError, TypeError, BufferError) as error:
        packer.reset()  # it keeps what it had packed by then
        raise ProtocolError(f"message cannot be encoded: {_culprit(message, '$')}{error}") from None
    return packed


def make_packer() -> msgpack.Packer:
    """A packer of one thread for messages that were checked to be integers or bytes."""
    return msgpack.Packer(strict_types=True)


def encode_parts(message: Message) -> list[bytes | memoryview]:
    """As `encode`, in pieces to be written in a row: large buffers are taken as they lie.

    Such are bytes, views and arrays of `LARGE_BYTES` and more, as the message itself or as a value
    of a dict that is the message. They must not change before the message is sent.

    Raises:
        ProtocolError: as `encode`.
    """
    kind = type(message)
    if kind is list or (kind is dict and not any(map(_is_large, message.values()))):
        return [encode(message)]
    if kind is not dict:
        return _large_parts(message, "$") if _is_large(message) else [encode(message)]
    _check_count(len(message), "$")
    parts: list[bytes | memoryview] = [_local.packer.pack_map_header(len(message))]
    for key, item in message.items():
        if type(key) is not str:
            raise ProtocolError(f"$: dict keys must be str, got {type(key).__name__}")
        parts.append(_pack(key))
        if _is_large(item):
            parts += _large_parts(item, f"$.{key}")
        else:
            _check(item, f"$.{key}", 1)
            parts.append(_pack(item))
    return parts


def _is_large(value: Message) -> bool:
    kind = type(value)
    if kind is bytes or kind is bytearray:
        return len(value) >= LARGE_BYTES
    if kind is memoryview or kind is np.ndarray:
        return bool(value.nbytes >= LARGE_BYTES)
    return False


def _large_parts(value: Message, path: str) -> list[bytes | memoryview]:
    if isinstance(value, np.ndarray):
        _check_array(value, path)
        head, elements = _array_parts(value)
        length, prefix = len(head) + elements.nbytes, bytes((_MSGPACK_EXT32,))
        head = struct.pack(">IB", length, ARRAY_EXT) + head
    else:
        try:
            elements = memoryview(value).cast("B")
        except TypeError as error:
            raise ProtocolError(f"{path}: a view that is not contiguous ({error})") from None
        length, prefix = elements.nbytes, bytes((_MSGPACK_BIN32,))
        head = struct.pack(">I", length)
    if length >= 1 << 32:
        raise ProtocolError(f"{path}: {length} bytes, one buffer may have less than 4 GiB")
    return [prefix + head, elements]


def decode(body: bytes | memoryview) -> Message:
    """Decode exactly one message.

    Raises:
        ProtocolError: the bytes are truncated, damaged, or followed by others.
    """
    size = len(body)
    try:
        # nothing in it can be longer than the body itself, which is what msgpack checks
        message = _unpackb(
            body,
            raw=False,
            use_list=True,
            strict_map_key=True,
            object_hook=_check_keys,
            ext_hook=_extension,
            timestamp=1,
            max_array_len=size if size < MAX_ITEMS else MAX_ITEMS,
            max_map_len=size if size < MAX_ITEMS else MAX_ITEMS,
        )
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise ProtocolError(f"body of {size} bytes cannot be decoded: {error}") from None
    if size > MAX_DEPTH and type(message) in _NESTING and _is_deeper(message, MAX_DEPTH):
        raise ProtocolError(f"body of {size} bytes: nested deeper than {MAX_DEPTH} levels")
    return message


def _is_deeper(value: Message, levels: int) -> bool:
    """Whether lists and dicts are nested in more than so many levels."""
    kind = type(value)
    if kind is not list and kind is not dict:
        return False
    items = value if kind is list else value.values()
    if _SCALARS.issuperset(map(type, items)):
        return False
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in items)


def _check(value: Message, path: str, depth: int) -> None:
    kind = type(value)
    if kind in _SCALARS:
        return
    if depth > MAX_DEPTH:
        raise ProtocolError(f"{path}: nested deeper than {MAX_DEPTH} levels")
    if kind is dict:
        _check_count(len(value), path)
        for key, item in value.items():
            if type(key) is not str:
                raise ProtocolError(f"{path}: dict keys must be str, got {type(key).__name__}")
            if type(item) not in _SCALARS:
                _check(item, f"{path}.{key}", depth + 1)
    elif kind is list or kind is tuple:
        _check_count(len(value), path)
        # one pass in C decides the common case, a list of scalars
        if not _SCALARS.issuperset(map(type, value)):
            for index, item in enumerate(value):
                _check(item, f"{path}[{index}]", depth + 1)
    elif isinstance(value, (np.ndarray, array.array)):
        _check_array(value, path)
    else:
        raise ProtocolError(
            f"{path}: a {kind.__module__}.{kind.__qualname__} may not travel; allowed are None, "
            "bool, int, float, str, bytes, list, dict with str keys, integer arrays"
        )


def _check_count(count: int, path: str) -> None:
    if count > MAX_ITEMS:
        raise ProtocolError(f"{path}: {count} items, at most {MAX_ITEMS}; send an integer array")


def _check_array(value: np.ndarray[Any, Any] | array.array[Any], path: str) -> None:
    numbers = np.asarray(value)
    if numbers.dtype.newbyteorder("<") not in _CODES:
        raise ProtocolError(f"{path}: array of {numbers.dtype}, only integer arrays may travel")
    if numbers.ndim > _MAX_DIMS:
        raise ProtocolError(f"{path}: array of {numbers.ndim} dimensions, at most {_MAX_DIMS}")


def _culprit(value: Message, path: str) -> str:
    """Path of the scalar that does not fit, for the message of an error; "" if none is found."""
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        return f"{path}: "
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"{path}: "
    if type(value) is dict:
        pairs = [(f"{path}.{key}", item) for key, item in value.items()]
        pairs += [(f"{path} (key)", key) for key in value]
    elif type(value) is list or type(value) is tuple:
        pairs = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return ""
    for at, item in pairs:
        found = _culprit(item, at)
        if found:
            return found
    return ""


def _default(value: Any) -> Any:
    if type(value) is tuple:
        return list(value)
    if type(value) is int:
        raise OverflowError(f"integer of {value.bit_length()} bits, at most 64 may travel")
    head, elements = _array_parts(np.asarray(value))
    return msgpack.ExtType(ARRAY_EXT, head + elements.tobytes())


def _array_parts(numbers: np.ndarray[Any, Any]) -> tuple[bytes, memoryview]:
    """Header and elements of extension type 1."""
    little = np.ascontiguousarray(numbers, dtype=numbers.dtype.newbyteorder("<"))
    # ascontiguousarray gives a 0-d array one dimension: the shape is that of the original
    shape = numbers.shape
    head = _ARRAY_HEAD.pack(_CODES[little.dtype], len(shape), 0)
    head += struct.pack(f"<{len(shape)}I", *shape)
    head += bytes(-len(head) % 8)
    return head, little.reshape(-1).view(np.uint8).data


def _extension(code: int, data: bytes) -> np.ndarray[Any, Any]:
    if code != ARRAY_EXT:
        raise ValueError(f"extension type {code} is unknown")
    if len(data) < _ARRAY_HEAD.size:
        raise ValueError(f"integer array of {len(data)} bytes has no header")
    dtype_code, dims, zero = _ARRAY_HEAD.unpack_from(data)
    dtype = _DTYPES.get(dtype_code)
    if dtype is None or dims > _MAX_DIMS or zero:
        raise ValueError(f"integer array with dtype code {dtype_code}, {dims} dimensions")
    head_bytes = _ARRAY_HEAD.size + 4 * dims
    if len(data) < head_bytes:
        raise ValueError("integer array with a truncated shape")
    shape = struct.unpack_from(f"<{dims}I", data, _ARRAY_HEAD.size)
    start = head_bytes + -head_bytes % 8
    count = 1
    for size in shape:
        count *= size
    if len(data) != start + count * dtype.itemsize:
        raise ValueError(f"integer array of shape {shape} and {dtype} in {len(data)} bytes")
    if any(data[head_bytes:start]):
        raise ValueError("integer array with padding that is not zero")
    numbers = np.frombuffer(data, dtype=dtype, count=count, offset=start).reshape(shape)
    # A copy is writable and owns its memory; consumers such as torch refuse read-only arrays.
    return numbers.astype(dtype.newbyteorder("="), copy=True)


def _check_keys(value: dict[Any, Any]) -> dict[str, Any]:
    for key in value:
        if type(key) is not str:
            raise ValueError(f"dict keys must be str, got {type(key).__name__}")
    return value


def field(body: Message, name: str, kind: type) -> Any:
    """A field of a control body that came from another process.

    Raises:
        ProtocolError: the body is no dict, or the field is missing or of another type.
    """
    if not isinstance(body, dict) or type(body.get(name)) is not kind:
        got = type(body.get(name)).__name__ if isinstance(body, dict) else type(body).__name__
        raise ProtocolError(f"field {name}: expected {kind.__name__}, got {got}")
    return body[name]


if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("tp_runtime.broadcast is written for little-endian hosts")


_local = _Local()

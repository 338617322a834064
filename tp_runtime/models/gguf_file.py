"""The header of a GGUF file, and the bytes of its tensors without reading the others.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package knows the
quantisation types and dequantises them; its reader is not used, because it builds an object per
vocabulary entry (6 s for a 135M model, on every rank) and reports a short file as an index error.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tp_runtime.errors import ModelError, ModelFormatError, UnsupportedModel

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ARRAY, _STRING, _BOOL = 9, 8, 7
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_MAX_DIMENSIONS = 4
_CHUNK_VALUES = 1 << 23  # dequantised at a time, bounds the temporaries to some 100 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Where a tensor lies. `shape` is [out, in] or [n]; `offset` and `nbytes` are in the file.

    Quantised rows are whole blocks of `block_values` values in `block_bytes` bytes.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    nbytes: int
    block_values: int
    block_bytes: int


class GgufFile:
    """A GGUF file, mapped into memory.

    Attributes:
        metadata: scalars, strings and arrays of numbers by key.
        string_array_lengths: the number of entries of arrays of strings, which are skipped.
        tensors: by GGUF name.

    Raises:
        ModelFormatError: the file is truncated or damaged, or no GGUF file.
        UnsupportedModel: a version or a tensor type that is not known.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.string_array_lengths: dict[str, int] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelFormatError(f"{path}: cannot be read as a GGUF file: {error}") from error
        self._position = 0
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise ModelFormatError(
                f"{path}: truncated or damaged GGUF header near byte {self._position} of "
                f"{len(self._data)}: {error}"
            ) from error

    def read(
        self,
        tensor: GgufTensor,
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Dequantise a part of a tensor; only the blocks that hold it are touched.

        Args:
            tensor: one of `tensors`.
            rows, columns: half-open ranges of the first and the last dimension.

        Returns:
            float32, [rows, columns] or [n].
        """
        matrix = tensor.shape if len(tensor.shape) == 2 else (1, tensor.shape[0])
        if len(tensor.shape) == 1:
            rows, columns = None, rows
        row_start, row_stop = rows or (0, matrix[0])
        start, stop = columns or (0, matrix[1])
        row_bytes = matrix[1] // tensor.block_values * tensor.block_bytes
        raw = np.frombuffer(self._data, np.uint8, tensor.nbytes, tensor.offset)
        raw = raw.reshape(matrix[0], row_bytes)
        first = start // tensor.block_values
        last = -(-stop // tensor.block_values)
        raw = raw[row_start:row_stop, first * tensor.block_bytes : last * tensor.block_bytes]
        out = np.empty((row_stop - row_start, stop - start), np.float32)
        step = max(1, _CHUNK_VALUES // max(1, stop - start))
        skip = start - first * tensor.block_values
        for begin in range(0, len(out), step):
            values = _dequantize(np.ascontiguousarray(raw[begin : begin + step]), tensor)
            out[begin : begin + step] = values[:, skip : skip + stop - start]
        return out if len(tensor.shape) == 2 else out[0]

    # -- header ----------------------------------------------------------------------------------

    def _read_header(self) -> None:
        magic = self._data[:4]
        if magic != _MAGIC:
            raise ModelFormatError(f"{self.path}: starts with {magic!r}, expected {_MAGIC!r}")
        self._position = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise UnsupportedModel(
                f"{self.path}: GGUF version {version}; supported: 2 and 3, little-endian"
            )
        tensor_count, entry_count = self._scalar("Q"), self._scalar("Q")
        for _ in range(entry_count):
            self._read_entry()
        infos = [self._read_tensor_info() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelFormatError(f"{self.path}: general.alignment is {alignment!r}")
        data_start = -(-self._position // alignment) * alignment
        for name, shape, type_id, offset in infos:
            self.tensors[name] = self._place(name, shape, type_id, data_start + offset)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._position)
        self._position += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        end = self._position + length
        if end > len(self._data):
            raise struct.error(f"a string of {length} bytes reaches past the end")
        value = self._data[self._position : end].decode("utf-8")
        self._position = end
        return value

    def _read_entry(self) -> None:
        key = self._string()
        kind = self._scalar("I")
        if kind == _STRING:
            self.metadata[key] = self._string()
        elif kind == _ARRAY:
            self._read_array(key)
        elif kind in _SCALARS:
            self.metadata[key] = self._scalar(_SCALARS[kind])
        else:
            raise ModelFormatError(f"{self.path}: {key} has unknown value type {kind}; damaged")

    def _read_array(self, key: str) -> None:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            self._skip_strings(count)
            self.string_array_lengths[key] = count
        elif kind in _SCALARS:
            code = f"<{count}{_SCALARS[kind]}"
            if count > len(self._data):
                raise struct.error(f"{key}: an array of {count} values reaches past the end")
            self.metadata[key] = struct.unpack_from(code, self._data, self._position)
            self._position += struct.calcsize(code)
        else:
            raise ModelFormatError(
                f"{self.path}: {key} is an array of unknown type {kind}; damaged"
            )

    def _skip_strings(self, count: int) -> None:
        unpack, data, position = struct.Struct("<Q").unpack_from, self._data, self._position
        for _ in range(count):
            position += 8 + unpack(data, position)[0]
        self._position = position

    def _read_tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._scalar("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ModelFormatError(f"{self.path}: {name} has {dimensions} dimensions; damaged")
        # GGUF writes the contiguous dimension first
        shape = tuple(reversed([self._scalar("Q") for _ in range(dimensions)]))
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _place(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GgufTensor:
        constants = _gguf()
        try:
            kind = constants.GGMLQuantizationType(type_id)
            block_values, block_bytes = constants.GGML_QUANT_SIZES[kind]
        except (KeyError, ValueError):
            raise UnsupportedModel(
                f"{self.path}: {name} has tensor type {type_id}, which the installed gguf package "
                "does not know"
            ) from None
        values = 1
        for length in shape:
            values *= length
        if shape[-1] % block_values:
            raise ModelFormatError(
                f"{self.path}: {name} has rows of {shape[-1]} values, not whole blocks of "
                f"{block_values} ({kind.name}); damaged"
            )
        nbytes = values // block_values * block_bytes
        if offset + nbytes > len(self._data):
            raise ModelFormatError(
                f"{self.path}: truncated: {name} ends at byte {offset + nbytes}, the file has "
                f"{len(self._data)}; download it again"
            )
        return GgufTensor(
            name=name,
            shape=shape,
            type_id=type_id,
            offset=offset,
            nbytes=nbytes,
            block_values=block_values,
            block_bytes=block_bytes,
        )


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ModelError(
            "reading GGUF files needs the gguf package: pip install 'tp-runtime[models]'"
        ) from error
    return gguf


def _dequantize(raw: npt.NDArray[np.uint8], tensor: GgufTensor) -> npt.NDArray[np.float32]:
    gguf = _gguf()
    kind = gguf.GGMLQuantizationType(tensor.type_id)
    if kind == gguf.GGMLQuantizationType.F32:
        return raw.view(np.float32)
    if kind == gguf.GGMLQuantizationType.F16:
        return raw.view(np.float16).astype(np.float32)
    try:
        values: npt.NDArray[np.float32] = gguf.dequantize(raw, kind)
    except NotImplementedError as error:
        raise UnsupportedModel(
            f"{tensor.name} is {kind.name}, which the gguf package cannot dequantise"
        ) from error
    return values

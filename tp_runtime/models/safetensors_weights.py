"""A Hugging Face model folder as a source of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tp_runtime.errors import ModelError, ModelFormatError, UnsupportedModel
from tp_runtime.models.config import config_from_huggingface, read_json

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class SafetensorsWeights:
    """A `WeightSource` over config.json and one or several .safetensors files.

    Only the asked-for part of a tensor is read (`get_slice` of a memory-mapped file).

    Raises:
        ModelFormatError: a file is missing, truncated or damaged.
        UnsupportedModel: an architecture that is not built, or no safetensors files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config = config_from_huggingface(folder)
        self._files: dict[str, Any] = {}
        self._file_of = self._locate()

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """See `WeightSource.read`; in the dtype of the file, on the CPU."""
        if name not in self._file_of:
            raise ModelFormatError(f"{self._folder}: tensor {name} is missing")
        view = self._open(self._file_of[name]).get_slice(name)
        if tuple(view.get_shape()) != shape:
            raise ModelFormatError(
                f"{self._folder}: {name} has shape {tuple(view.get_shape())}, expected {shape}"
            )
        part: Tensor
        if columns is not None:
            part = view[slice(*(rows or (0, shape[0]))), slice(*columns)]
        else:
            part = view[slice(*(rows or (0, shape[0])))]
        if not part.is_floating_point():
            raise UnsupportedModel(
                f"{self._folder}: {name} is {part.dtype}; quantised safetensors are not supported"
            )
        return part

    def _locate(self) -> dict[str, str]:
        """File name of each tensor name."""
        index = self._folder / _INDEX
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ModelFormatError(f"{index}: weight_map is missing")
            missing = sorted(
                {str(f) for f in weight_map.values() if not (self._folder / str(f)).is_file()}
            )
            if missing:
                raise ModelFormatError(
                    f"{index} names files that are missing: {', '.join(missing)}"
                )
            return {str(name): str(file) for name, file in weight_map.items()}
        if not (self._folder / _SINGLE).is_file():
            raise UnsupportedModel(
                f"{self._folder}: neither {_SINGLE} nor {_INDEX}; only safetensors are loaded"
            )
        return dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                import safetensors
            except ImportError as error:
                raise ModelError(
                    "reading model folders needs safetensors: pip install 'tp-runtime[models]'"
                ) from error
            path = self._folder / file
            try:
                self._files[file] = safetensors.safe_open(str(path), framework="pt", device="cpu")
            except (safetensors.SafetensorError, OSError) as error:
                raise ModelFormatError(f"{path}: truncated or damaged: {error}") from error
        return self._files[file]

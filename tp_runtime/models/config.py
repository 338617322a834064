"""What a Llama-family decoder is made of, read from a Hugging Face config.json or by name."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from tp_runtime.errors import ModelFormatError, ModelNotFound, UnsupportedModel
from tp_runtime.models.fields import blamed_on, count, number, token_ids
from tp_runtime.ops.rope import LinearScaling, Llama3Scaling, Scaling
from tp_runtime.regular_file import read_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")

_MOST_JSON_BYTES = 64 << 20  # the index of a thousand layers has some megabytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder, before any sharding. Counts are of the whole model.

    `qkv_bias` is Qwen2's, `qk_norm` Qwen3's RMSNorm of each head before the rotation.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Scaling | None = None
    max_positions: int = 2048
    tied_head: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_positions",
        ):
            count({name: getattr(self, name)}, name)
        for name in ("rms_norm_eps", "rope_theta"):
            number({name: getattr(self, name)}, name)
        if self.rope_scaling is not None:
            # one value that is not finite makes every logit NaN, silently
            for value in _flat(astuple(self.rope_scaling)):
                number({"RoPE scaling": value}, "RoPE scaling")
        if self.num_heads % self.num_kv_heads:
            raise ModelFormatError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key-value heads: "
                "expected a multiple"
            )
        if self.head_dim % 2:
            raise ModelFormatError(f"head_dim must be even for RoPE, got {self.head_dim}")

    @property
    def group_size(self) -> int:
        """Query heads per key-value head."""
        return self.num_heads // self.num_kv_heads


_SMOLLM2_135M = ModelConfig(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rope_theta=100000.0,
    max_positions=8192,
    tied_head=True,
)

NAMED_CONFIGS: Mapping[str, ModelConfig] = {
    "tiny": ModelConfig(
        architecture="llama",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_heads=8,
        num_kv_heads=4,
        head_dim=16,
        max_positions=1024,
    ),
    "smollm2-135m": _SMOLLM2_135M,
    "llama-3-8b": ModelConfig(
        architecture="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=500000.0,
        max_positions=8192,
    ),
    "qwen3-8b": ModelConfig(
        architecture="qwen3",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        max_positions=40960,
        qk_norm=True,
    ),
    "qwen2.5-7b": ModelConfig(
        architecture="qwen2",
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        max_positions=32768,
        qkv_bias=True,
    ),
}


def named_config(name: str) -> ModelConfig:
    """A configuration of `NAMED_CONFIGS`.

    Raises:
        ModelNotFound: no such name; lists those that exist.
    """
    try:
        return NAMED_CONFIGS[name]
    except KeyError:
        raise ModelNotFound(
            f"random:{name} is not a known configuration; known: {', '.join(NAMED_CONFIGS)}"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model folder.

    Raises:
        ModelFormatError: the file is missing, no JSON, or no object.
    """
    try:
        value = json.loads(read_regular(path, most_bytes=_MOST_JSON_BYTES).decode("utf-8"))
    except FileNotFoundError:
        raise ModelFormatError(f"{path}: missing; expected a Hugging Face model folder") from None
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _flat(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, tuple) else (value,)


def config_from_huggingface(folder: Path) -> ModelConfig:
    """Read config.json (and the end-of-sequence ids of generation_config.json).

    Raises:
        ModelFormatError: a field is missing or malformed; names the file and the field.
        UnsupportedModel: an architecture, activation or RoPE variant that is not built.
    """
    path = folder / "config.json"
    fields = read_json(path)
    kind = fields.get("model_type")
    if kind not in SUPPORTED:
        raise UnsupportedModel(
            f"{path}: model_type {kind!r} is not supported; supported: {', '.join(SUPPORTED)}"
        )
    if fields.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(
            f"{path}: hidden_act {fields['hidden_act']!r} is not supported; supported: silu"
        )
    if fields.get("mlp_bias") or (kind != "qwen2" and fields.get("attention_bias")):
        raise UnsupportedModel(f"{path}: biases other than qwen2's qkv bias are not supported")
    if fields.get("use_sliding_window"):
        raise UnsupportedModel(f"{path}: sliding-window attention is not supported")
    ends = _eos_token_ids(fields, folder)
    with blamed_on(path):
        positions = count(fields, "max_position_embeddings", 2048)
        if kind == "mistral" and fields.get("sliding_window"):
            # within one window, windowed and full attention are the same
            positions = min(positions, count(fields, "sliding_window"))
        hidden, heads = count(fields, "hidden_size"), count(fields, "num_attention_heads")
        theta, scaling = _rope(fields, path)
        return ModelConfig(
            architecture=kind,
            vocab_size=count(fields, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=count(fields, "intermediate_size"),
            num_layers=count(fields, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=count(fields, "num_key_value_heads", heads),
            head_dim=count(fields, "head_dim", hidden // heads),
            rms_norm_eps=number(fields, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_positions=positions,
            tied_head=bool(fields.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
            bos_token_id=next(iter(token_ids(fields, "bos_token_id")), None),
            eos_token_ids=ends,
        )


def _eos_token_ids(fields: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    sources = {folder / "config.json": fields}
    generation = folder / "generation_config.json"
    if generation.exists():
        sources[generation] = read_json(generation)
    ids: list[int] = []
    for path, source in sources.items():
        with blamed_on(path):
            ids += token_ids(source, "eos_token_id")
    return tuple(dict.fromkeys(ids))


def _rope(fields: Mapping[str, Any], path: Path) -> tuple[float, Scaling | None]:
    # transformers 5 writes rope_parameters, earlier ones rope_theta and rope_scaling
    parameters: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = fields.get(name) or {}
        if not isinstance(given, dict):
            raise ModelFormatError(f"{name} must be an object, got {given!r}")
        parameters |= given
    theta = number(parameters, "rope_theta", number(fields, "rope_theta", 10000.0))
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    partial = parameters.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UnsupportedModel(f"{path}: partial_rotary_factor {partial} is not supported")
    if kind == "default":
        return theta, None
    with blamed_on("RoPE scaling"):
        if kind == "linear":
            return theta, LinearScaling(factor=number(parameters, "factor"))
        if kind == "llama3":
            return theta, Llama3Scaling(
                factor=number(parameters, "factor"),
                low_freq_factor=number(parameters, "low_freq_factor"),
                high_freq_factor=number(parameters, "high_freq_factor"),
                original_max_positions=count(parameters, "original_max_position_embeddings"),
            )
    raise UnsupportedModel(
        f"{path}: rope type {kind!r} is not supported; supported: default, linear, llama3"
    )

"""A GGUF model as a source of Hugging Face tensors."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from tp_runtime.errors import ModelFormatError, UnsupportedModel
from tp_runtime.models.config import ModelConfig
from tp_runtime.models.fields import blamed_on, count, number
from tp_runtime.models.gguf_file import GgufFile, GgufTensor
from tp_runtime.ops.rope import FrequencyFactors, LinearScaling, Scaling

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


class GgufWeights:
    """A `WeightSource` over one GGUF file.

    llama.cpp writes the q and k rows of the llama architecture with the two halves of each head
    interleaved; they are put back here (`_reverse_permute_weights` in transformers'
    modeling_gguf_pytorch_utils.py).

    Raises:
        ModelFormatError: truncated, damaged, or fields are missing.
        UnsupportedModel: an architecture or variant that is not built.
    """

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        with blamed_on(path):
            self.config = _config(self._file)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """See `WeightSource.read`; float32 on the CPU."""
        tensor = self._tensor(name, shape)
        part = torch.from_numpy(self._file.read(tensor, rows=rows, columns=columns))
        if self.config.architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            head_dim = self.config.head_dim
            if part.shape[0] % head_dim or (rows and rows[0] % head_dim):
                raise ValueError(f"{name}: rows {rows} are not whole heads of {head_dim}")
            interleaved = part.view(-1, head_dim // 2, 2, *part.shape[1:])
            part = interleaved.transpose(1, 2).reshape(part.shape)
        return part

    def _tensor(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        gguf_name = gguf_name_of(name)
        tensor = self._file.tensors.get(gguf_name)
        if tensor is None:
            raise ModelFormatError(f"{self._file.path}: tensor {gguf_name} ({name}) is missing")
        if tensor.shape != shape:
            raise ModelFormatError(
                f"{self._file.path}: {gguf_name} has shape {tensor.shape}, expected {shape}"
            )
        return tensor


def gguf_name_of(name: str) -> str:
    """The GGUF name of a Hugging Face tensor name."""
    match = _LAYER_NAME.fullmatch(name)
    if match:
        return f"blk.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"
    stem, _, suffix = name.rpartition(".")
    return f"{_WHOLE[stem]}.{suffix}"


def _config(file: GgufFile) -> ModelConfig:
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path}: GGUF architecture {architecture!r} is not supported; supported: "
            f"{', '.join(_ARCHITECTURES)}"
        )

    def field(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    def length(key: str, default: int | None = None) -> int:
        return count(metadata, f"{architecture}.{key}", default)

    if field("expert_count"):
        raise UnsupportedModel(f"{file.path}: mixture-of-experts models are not supported")
    if any(isinstance(field(f"attention.{key}"), tuple) for key in ("head_count", "head_count_kv")):
        raise UnsupportedModel(f"{file.path}: head counts that differ by layer are not supported")
    hidden, heads = length("embedding_length"), length("attention.head_count")
    head_dim = length("attention.key_length", hidden // heads)
    if field("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{file.path}: keys and values of different length")
    if field("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(f"{file.path}: partial rotary embedding is not supported")
    end_keys = ("eos_token_id", "eot_token_id")
    ends = [metadata.get(f"tokenizer.ggml.{key}") for key in end_keys]
    return ModelConfig(
        architecture=architecture,
        vocab_size=length("vocab_size", file.string_array_lengths.get("tokenizer.ggml.tokens")),
        hidden_size=hidden,
        intermediate_size=length("feed_forward_length"),
        num_layers=length("block_count"),
        num_heads=heads,
        num_kv_heads=length("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=number(metadata, f"{architecture}.attention.layer_norm_rms_epsilon"),
        rope_theta=number(metadata, f"{architecture}.rope.freq_base", 10000.0),
        rope_scaling=_scaling(file, field("rope.scaling.type", "none"), head_dim),
        max_positions=length("context_length"),
        tied_head="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if isinstance(end, int))),
    )


def _scaling(file: GgufFile, kind: str, head_dim: int) -> Scaling | None:
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        if factors.shape != (head_dim // 2,):
            raise ModelFormatError(
                f"rope_freqs.weight has shape {factors.shape}, expected {(head_dim // 2,)}"
            )
        return FrequencyFactors(factors=tuple(file.read(factors).tolist()))
    if kind == "none":
        return None
    if kind == "linear":
        architecture = file.metadata["general.architecture"]
        factor = number(file.metadata, f"{architecture}.rope.scaling.factor")
        return LinearScaling(factor=factor)
    raise UnsupportedModel(f"{file.path}: RoPE scaling {kind!r}; supported: none, linear, llama3")

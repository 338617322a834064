"""Write a GGUF model as a Hugging Face folder of plain float32, for other programs to load.

Quantised models cannot be saved by transformers; here every tensor is dequantised and written under
its Hugging Face name, beside a config.json and, where wanted, the tokenizer.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tp_runtime.errors import ModelError
from tp_runtime.models.gguf_weights import GgufWeights
from tp_runtime.models.weights import EMBEDDING, FINAL_NORM, HEAD
from tp_runtime.ops.rope import FrequencyFactors, LinearScaling

if TYPE_CHECKING:
    from tp_runtime.models.config import ModelConfig

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def convert_gguf(gguf: Path, folder: Path) -> Path:
    """Convert once; a folder that exists already is taken as it is.

    The folder appears at once and complete, so that several processes may call this together.

    Args:
        gguf: the model file.
        folder: where to write; its parent is made.

    Returns:
        `folder`.

    Raises:
        ModelFormatError, UnsupportedModel: as `GgufWeights`.
        ModelError: safetensors is not installed.
    """
    if (folder / "config.json").is_file():
        return folder
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ModelError(
            "writing model folders needs safetensors: pip install 'tp-runtime[models]'"
        ) from error
    source = GgufWeights(gguf)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        tensors = {name: source.read(name, shape) for name, shape in tensor_shapes(source.config)}
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            partial / "model.safetensors",
            metadata={"format": "pt"},
        )
        fields = json.dumps(huggingface_config(source.config), indent=2)
        (partial / "config.json").write_text(fields + "\n", encoding="utf-8")
        os.rename(partial, folder)
    except OSError:
        if not (folder / "config.json").is_file():  # else another process was first
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def tensor_shapes(config: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Hugging Face name and shape of every tensor of a model."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    shapes: list[tuple[str, tuple[int, ...]]] = [
        (EMBEDDING, (config.vocab_size, hidden)),
        (FINAL_NORM, (hidden,)),
    ]
    if not config.tied_head:
        shapes.append((HEAD, (config.vocab_size, hidden)))
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        shapes += [
            (prefix + "input_layernorm.weight", (hidden,)),
            (attention + "q_proj.weight", (q_rows, hidden)),
            (attention + "k_proj.weight", (kv_rows, hidden)),
            (attention + "v_proj.weight", (kv_rows, hidden)),
            (attention + "o_proj.weight", (hidden, q_rows)),
            (prefix + "post_attention_layernorm.weight", (hidden,)),
            (prefix + "mlp.gate_proj.weight", (inner, hidden)),
            (prefix + "mlp.up_proj.weight", (inner, hidden)),
            (prefix + "mlp.down_proj.weight", (hidden, inner)),
        ]
        if config.qkv_bias:
            shapes += [
                (attention + "q_proj.bias", (q_rows,)),
                (attention + "k_proj.bias", (kv_rows,)),
                (attention + "v_proj.bias", (kv_rows,)),
            ]
        if config.qk_norm:
            shapes += [
                (attention + "q_norm.weight", (config.head_dim,)),
                (attention + "k_norm.weight", (config.head_dim,)),
            ]
    return shapes


def huggingface_config(config: ModelConfig) -> dict[str, Any]:
    """The fields of a config.json that describe a model.

    Raises:
        ModelError: its RoPE scaling cannot be written there.
    """
    rope: dict[str, Any] = {"rope_type": "default"}
    scaling = config.rope_scaling
    if isinstance(scaling, FrequencyFactors):
        raise ModelError("RoPE factors per frequency have no form in config.json")
    if isinstance(scaling, LinearScaling):
        rope = {"rope_type": "linear", "factor": scaling.factor}
    elif scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    return {
        "architectures": [_CLASSES.get(config.architecture, "LlamaForCausalLM")],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if scaling is not None else None,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied_head,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "dtype": "float32",
    }

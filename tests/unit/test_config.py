"""Settings: where a value comes from, what is refused, and what the refusal says."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from typing import TYPE_CHECKING

import pytest

from tp_runtime.config import RuntimeConfig, known_variables, rows
from tp_runtime.errors import ConfigError, EnvError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def _resolve_env(**env: str) -> RuntimeConfig:
    return RuntimeConfig.resolve({}, env).config


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "tp.toml"
    file.write_text('kv_block_size = 16\nmax_batch_size = 3\ndtype = "float16"\n')
    env = {"TP_RUNTIME_KV_BLOCK_SIZE": "32", "TP_RUNTIME_MAX_BATCH_SIZE": "5"}
    resolved = RuntimeConfig.resolve({"kv_block_size": "128"}, env, file)
    assert resolved.config.kv_block_size == 128
    assert resolved.config.max_batch_size == 5
    assert resolved.config.dtype == "float16"
    assert resolved.config.join_timeout_s == 120.0
    assert resolved.sources["kv_block_size"] == "flag"
    assert resolved.sources["max_batch_size"] == "env TP_RUNTIME_MAX_BATCH_SIZE"
    assert resolved.sources["dtype"] == f"file {file}"
    assert resolved.sources["join_timeout_s"] == "default"


def test_a_flag_can_turn_off_what_the_environment_turned_on() -> None:
    env = {"ENABLE_DYNAMIC_DECODE_BACKEND": "1", "TP_RUNTIME_ASYNC_DECODE": "on"}
    flags = {"enable_dynamic_decode_backend": False, "async_decode": False}
    config = RuntimeConfig.resolve(flags, env).config
    assert not config.enable_dynamic_decode_backend
    assert not config.async_decode


def test_a_namespace_with_more_in_it_is_taken_as_it_is() -> None:
    args = argparse.Namespace(prompt=["hello"], kv_block_size="16", tp_size=None)
    resolved = RuntimeConfig.resolve(args, {})
    assert resolved.config.kv_block_size == 16
    assert resolved.sources["tp_size"] == "default"


def test_the_defaults_of_the_contract() -> None:
    config = RuntimeConfig()
    assert not config.enable_dynamic_decode_backend
    assert config.selection_mode == "adaptive"
    assert config.async_decode
    assert (config.kv_block_size, config.kernel_page_size) == (64, None)
    assert (config.broadcast_timeout_s, config.join_timeout_s) == (30.0, 120.0)
    assert config.broadcast_wait == "balanced"
    assert config.on_failure == "raise"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", True),
        ("true", True),
        ("YES", True),
        ("On", True),
        ("0", False),
        ("false", False),
        ("No", False),
        ("off", False),
    ],
)
def test_booleans(text: str, value: bool) -> None:
    assert _resolve_env(ENABLE_DYNAMIC_DECODE_BACKEND=text).enable_dynamic_decode_backend is value


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"ENABLE_DYNAMIC_DECODE_BACKEND": "maybe"}, "1, true, yes, on, 0, false, no or off"),
        ({"ENABLE_DYNAMIC_DECODE_BACKEND": "2"}, "1, true, yes, on, 0, false, no or off"),
        ({"ENABLE_DYNAMIC_DECODE_BACKEND": ""}, "unset it for the default"),
        ({"TP_RUNTIME_BROADCAST_TIMEOUT_S": "5s"}, "a number above 0"),
        ({"TP_RUNTIME_BROADCAST_TIMEOUT_S": "0"}, "a number above 0"),
        ({"TP_RUNTIME_BROADCAST_TIMEOUT_S": "-1"}, "a number above 0"),
        ({"TP_RUNTIME_BROADCAST_TIMEOUT_S": "nan"}, "a number above 0"),
        ({"TP_RUNTIME_BROADCAST_TIMEOUT_S": "1e999"}, "a number above 0"),
        ({"TP_RUNTIME_KV_BLOCK_SIZE": "64.0"}, "a whole number of at least 1"),
        ({"TP_RUNTIME_KV_BLOCK_SIZE": "1_000"}, "a whole number of at least 1"),
        ({"TP_RUNTIME_KV_BLOCK_SIZE": " 64"}, "a whole number of at least 1"),
        ({"TP_RUNTIME_KV_BLOCK_SIZE": "٦"}, "a whole number of at least 1"),
        ({"TP_RUNTIME_KV_BLOCK_SIZE": "0"}, "a whole number of at least 1"),
        ({"TP_RUNTIME_DTYPE": "flaot32"}, "did you mean float32?"),
        ({"TP_RUNTIME_SELECTION_MODE": "Stable"}, "one of stable, adaptive"),
        ({"TP_RUNTIME_DECODE_BUCKETS": "4,2"}, "ascending"),
        ({"TP_RUNTIME_DECODE_BUCKETS": "1,,2"}, "separated by commas"),
        ({"TP_RUNTIME_KV_BLOCK_SIZE": "9" * 400}, "a whole number of at least 1"),
        ({"TP_RUNTIME_KV_CACHE_TOKENS": str(2**63)}, "a whole number of at least 1"),
        ({"TP_RUNTIME_KV_BLOCK_SIZE": "9" * 5000}, "a whole number of at least 1"),
        ({"TP_RUNTIME_MAX_BATCH_SIZE": "4097"}, "a whole number of at least 1 and at most 4096"),
        ({"TP_RUNTIME_MAX_BATCH_SIZE": str(2**63)}, "a whole number of at least 1 and at most"),
        ({"TP_RUNTIME_DECODE_BUCKETS": "1,4097"}, "whole numbers of at least 1 and at most 4096"),
        ({"TP_RUNTIME_DECODE_BUCKETS": ""}, "at least 1"),
        ({"TP_RUNTIME_DISABLE_DECODE_BACKEND": "a,,b"}, "names, separated by commas"),
        ({"TP_RUNTIME_DECODE_BUCKETS": "two"}, "at most 4096, ascending, separated by commas"),
        ({"TP_RUNTIME_MODEL": ""}, "a text that is not empty"),
    ],
)
def test_a_malformed_variable_is_an_error_that_says_all(
    env: Mapping[str, str], expected: str
) -> None:
    ((name, value),) = env.items()
    with pytest.raises(EnvError) as caught:
        RuntimeConfig.resolve({}, env)
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)
    assert expected in str(caught.value)


def test_a_malformed_flag_names_the_flag() -> None:
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig.resolve({"kv_block_size": "x"}, {})
    assert not isinstance(caught.value, EnvError)
    assert str(caught.value) == "flag --kv-block-size='x': expected a whole number of at least 1"
    with pytest.raises(ConfigError, match=r"^flag --decode-buckets='1,4,2': expected whole"):
        RuntimeConfig.resolve({"decode_buckets": ["1,4", "2"]}, {})


def test_a_bad_variable_is_no_error_when_a_flag_overrules_it() -> None:
    env = {"TP_RUNTIME_KV_BLOCK_SIZE": "x"}
    assert RuntimeConfig.resolve({"kv_block_size": "16"}, env).config.kv_block_size == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kv_blok_size = 64", "unknown key 'kv_blok_size'; did you mean kv_block_size?"),
        ('kv_block_size = "64"', "expected a whole number of at least 1"),
        ("kv_block_size = true", "expected a whole number of at least 1"),
        ("async_decode = 1", "key async_decode=1: expected true or false"),
        ('async_decode = "on"', "expected true or false"),
        ("dtype = 32", "expected one of auto"),
        ('disable_decode_backend = "a,b"', "='a,b': expected an array of names"),
        ("disable_decode_backend = [1]", "expected an array of names"),
        ("decode_buckets = [1, 2.5]", "expected an array of whole numbers"),
        ('decode_buckets = ["1"]', "=['1']: expected an array of whole numbers"),
        ("[model]\nname = 1", "expected a text"),
        ('on_failure = "exit"', "unknown key"),
        ("kv_block_size = 1\nkv-block-size = 2", "given twice"),
        ("kv_block_size = ", "expected TOML"),
    ],
)
def test_a_malformed_file_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "tp.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig.resolve({}, {}, file)
    assert str(file) in str(caught.value)
    assert message in str(caught.value)


def test_the_file_may_use_dashes_and_arrays(tmp_path: Path) -> None:
    file = tmp_path / "tp.toml"
    file.write_text(
        'disable-decode-backend = ["a", "b"]\ndecode_buckets = [1, 2]\njoin-timeout-s = 5\n'
    )
    config = RuntimeConfig.resolve({}, {}, file).config
    assert config.disable_decode_backend == ("a", "b")
    assert config.decode_buckets == (1, 2)
    assert config.join_timeout_s == 5


def test_a_saved_plan_is_named_like_every_setting(tmp_path: Path) -> None:
    file = tmp_path / "tp.toml"
    file.write_text('decode-plan = "1.json"')
    assert RuntimeConfig.resolve({}, {}, file).config.decode_plan == "1.json"
    assert _resolve_env(TP_RUNTIME_DECODE_PLAN="2.json").decode_plan == "2.json"
    assert RuntimeConfig.resolve({"decode_plan": "3.json"}, {}).config.decode_plan == "3.json"
    with pytest.raises(EnvError, match="TP_RUNTIME_DECODE_PLAN='': expected a text"):
        _resolve_env(TP_RUNTIME_DECODE_PLAN="")


def test_the_file_can_come_from_a_flag_or_a_variable(tmp_path: Path) -> None:
    one, two = tmp_path / "1.toml", tmp_path / "2.toml"
    one.write_text("kv_block_size = 16")
    two.write_text("kv_block_size = 32")
    env = {"TP_RUNTIME_CONFIG": str(two)}
    assert RuntimeConfig.resolve({}, env).config.kv_block_size == 32
    assert RuntimeConfig.resolve({"config": str(one)}, env).config.kv_block_size == 16


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: No such file"):
        RuntimeConfig.resolve({}, {}, tmp_path / "none.toml")


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000], ids=["digits", "brackets"])
def test_a_file_beyond_what_the_parser_takes_is_an_error(value: str, tmp_path: Path) -> None:
    (tmp_path / "tp.toml").write_text(f"max_batch_size = {value}")
    with pytest.raises(ConfigError, match=r"tp\.toml: expected TOML"):
        RuntimeConfig.resolve({}, {}, tmp_path / "tp.toml")


def test_lists_come_by_repeated_flags_and_by_commas() -> None:
    flags = {"disable_decode_backend": ["a", "b, c"]}
    assert RuntimeConfig.resolve(flags, {}).config.disable_decode_backend == ("a", "b", "c")
    assert _resolve_env(TP_RUNTIME_DISABLE_DECODE_BACKEND="a,b").disable_decode_backend == (
        "a",
        "b",
    )
    assert _resolve_env(TP_RUNTIME_DISABLE_DECODE_BACKEND="").disable_decode_backend == ()


def test_two_sound_values_that_contradict_name_both_sources() -> None:
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig.resolve({"kv_block_size": "64"}, {"TP_RUNTIME_KERNEL_PAGE_SIZE": "48"})
    assert "kernel_page_size=48 does not divide kv_block_size=64" in str(caught.value)
    assert "kernel_page_size from env TP_RUNTIME_KERNEL_PAGE_SIZE" in str(caught.value)
    assert "kv_block_size from flag" in str(caught.value)
    with pytest.raises(ConfigError, match="is also in disable_decode_backend"):
        RuntimeConfig(decode_backend="a", disable_decode_backend=("b", "a"))


@pytest.mark.parametrize(
    "values",
    [
        {"kv_block_size": "64"},
        {"kv_block_size": True},
        {"kv_block_size": 0},
        {"tp_size": 0},
        {"broadcast_timeout_s": float("inf")},
        {"dtype": "float8"},
        {"async_decode": 1},
        {"decode_buckets": [2, 1]},
        {"decode_buckets": (2, 2)},
        {"decode_buckets": []},
        {"decode_buckets": b"ab"},
        {"disable_decode_backend": {"a"}},
        {"disable_decode_backend": ["a", 1]},
        {"max_batch_size": None},
        {"on_failure": "ignore"},
    ],
)
def test_code_is_checked_like_everybody_else(values: dict[str, object]) -> None:
    (name,) = values
    with pytest.raises(ConfigError, match=f"{name}=.*expected"):
        RuntimeConfig(**values)  # type: ignore[arg-type]


def test_code_may_give_any_sequence_for_a_list() -> None:
    config = RuntimeConfig(decode_buckets=[1, 2, 4], disable_decode_backend=["a"])  # type: ignore[arg-type]
    assert (config.decode_buckets, config.disable_decode_backend) == ((1, 2, 4), ("a",))
    assert config == RuntimeConfig(decode_buckets=(1, 2, 4), disable_decode_backend=("a",))
    assert hash(config) == hash(dataclasses.replace(config))
    assert RuntimeConfig(decode_buckets=range(1, 3)).decode_buckets == (1, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"decode_buckets": "1,2,4"},
            "decode_buckets='1,2,4': expected a tuple or list of whole numbers of at least 1 and ",
        ),
        (
            {"disable_decode_backend": "cpu_rowwise"},
            "disable_decode_backend='cpu_rowwise': expected a tuple or list of names",
        ),
        ({"async_decode": 1}, "async_decode=1: expected True or False"),
    ],
)
def test_code_is_told_what_python_takes(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig(**values)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


def test_an_unknown_variable_of_ours_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    env = {"TP_RUNTIME_KV_BLOK_SIZE": "1", "OTHER": "x", "TP_RUNTIME_TEST_RUN_DIR": "/tmp/x"}
    with caplog.at_level(logging.WARNING, logger="tp_runtime"):
        RuntimeConfig.resolve({}, env)
    assert [record.getMessage() for record in caplog.records] == [
        "environment variable TP_RUNTIME_KV_BLOK_SIZE is not one that tp_runtime reads; "
        "did you mean TP_RUNTIME_KV_BLOCK_SIZE?"
    ]


def test_every_field_is_documented_and_has_its_own_variable() -> None:
    assert list(rows()) == [field.name for field in dataclasses.fields(RuntimeConfig)]
    exposed = [row for row in rows().values() if row.exposed]
    assert all(row.help for row in exposed)
    assert len({row.env for row in exposed}) == len(exposed)
    assert {row.env for row in exposed} <= known_variables()
    for row in rows().values():
        assert row.problem(row.default, "code") is None
        if row.name.endswith("_s"):
            assert row.unit == "seconds"


def test_dtype_auto_is_decided_by_the_device() -> None:
    assert RuntimeConfig().dtype_on("cpu") == "float32"
    assert RuntimeConfig().dtype_on("cuda") == "bfloat16"
    assert RuntimeConfig(dtype="float16").dtype_on("cpu") == "float16"

"""Every setting of the runtime, declared and resolved once: flag > environment > file > default.

`RuntimeConfig` is the table. The command line's flags, the environment variables, the keys of the
TOML file and docs/configuration.md are all read off its fields. Imports no torch.
"""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from tp_runtime.errors import ConfigError, EnvError
from tp_runtime.regular_file import read_regular
from tp_runtime.settings import ENV_PREFIX, Row, nearest, row_of, setting

if TYPE_CHECKING:
    from argparse import Namespace

log = logging.getLogger(__name__)

CONFIG_FILE_VARIABLE = "TP_RUNTIME_CONFIG"

OTHER_VARIABLES: dict[str, str] = {
    CONFIG_FILE_VARIABLE: "path of the TOML file, as --config",
    "TP_RUNTIME_LOG_LEVEL": "log level of the command line, as --log-level: "
    "debug, info, warning or error",
    "TP_RUNTIME_NUM_THREADS": "CPU threads of each rank; unset: an equal share of the cores",
}
"""Variables under the prefix that are not fields of RuntimeConfig."""

MOST_REQUESTS = 4096
"""Largest batch. From some hundred requests on a step is bound by arithmetic, no longer by reading
the weights, so that a larger batch makes each wait and few more tokens per second; and every size
of batch costs a graph, and time to measure."""

_MOST_FILE_BYTES = 1 << 20

_TEST_PREFIX = "TP_RUNTIME_TEST_"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """How one engine runs. Equal on every rank of its TP group.

    Raises:
        ConfigError: a value is of the wrong type, out of range, or two values contradict.
    """

    model: str | None = setting(
        None,
        help="the model: smollm2, a GGUF file, a Hugging Face folder, or random:<named config>",
    )
    tp_size: int | None = setting(
        None,
        help="ranks that share one model; unset: all ranks that torchrun started",
        unit="ranks",
        minimum=1,
        aliases=("tensor-parallel-size",),
    )
    device: str = setting(
        "auto",
        help="where to compute; auto: cuda if there is a GPU, else cpu",
        choices=("auto", "cpu", "cuda"),
    )
    dtype: str = setting(
        "auto",
        help="number format of weights and KV cache; auto: float32 on cpu, bfloat16 on cuda",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    max_batch_size: int = setting(
        64,
        help=f"requests that decode at the same time, at most {MOST_REQUESTS}",
        unit="requests",
        minimum=1,
        maximum=MOST_REQUESTS,
    )
    max_seq_len: int | None = setting(
        None,
        help="longest prompt and answer together; unset: what the model allows",
        unit="tokens",
        minimum=1,
    )
    kv_block_size: int = setting(64, help="unit of KV cache allocation", unit="tokens", minimum=1)
    kernel_page_size: int | None = setting(
        None,
        help="page that the attention kernels see; divides the block; "
        "unset: the block itself, or the largest of 128, 64, 32, 16 that fits",
        unit="tokens",
        minimum=1,
    )
    kv_cache_tokens: int | None = setting(
        None,
        help="size of the KV cache; unset: enough for the largest batch, bounded by the memory",
        unit="tokens",
        minimum=1,
    )
    prefill_chunk_tokens: int = setting(
        512, help="most prompt tokens computed in one step", unit="tokens", minimum=1
    )
    decode_buckets: tuple[int, ...] | None = setting(
        None,
        help="batch sizes that get their own graph, ascending; unset: a list up to the largest",
        unit="requests",
        minimum=1,
        maximum=MOST_REQUESTS,
    )
    enable_dynamic_decode_backend: bool = setting(
        False,
        help="measure the decode attention backends on rank 0 and let every rank follow its plan; "
        "off: nothing is measured and the fixed priority holds",
        env="ENABLE_DYNAMIC_DECODE_BACKEND",
    )
    selection_mode: str = setting(
        "adaptive",
        help="how the measurements decide: one backend per bucket (stable), or the cheapest by a "
        "cost model for each step (adaptive); read only when the selection is on",
        choices=("stable", "adaptive"),
    )
    plan_cache: bool = setting(
        True,
        help="keep measured plans in $XDG_CACHE_HOME/tp_runtime/plans (else ~/.cache) and use them "
        "again on the same device, driver, versions, model shape and settings",
    )
    length_histogram: str | None = setting(
        None,
        help="file of KV lengths that were seen, one a line with its count; the selection measures "
        "batches drawn from it as well",
        placeholder="FILE",
    )
    decode_plan: str | None = setting(
        None,
        help="plan that `select --save` wrote, to be taken instead of measuring; rank 0 reads it; "
        "refused if it is for another device, model shape or larger batches",
    )
    decode_backend: str | None = setting(
        None, help="the one decode attention backend to use; refused if it cannot serve the model"
    )
    disable_decode_backend: tuple[str, ...] = setting(
        (), help="decode attention backends never to use"
    )
    all_reduce: str = setting(
        "auto",
        help="how GPUs sum over ranks: small sums through memory that they map from each other, if "
        "that works when tried at the start, and NCCL for the rest (auto), or NCCL alone",
        choices=("auto", "nccl"),
    )
    async_decode: bool = setting(
        True, help="keep two decode steps in flight; off: wait for each step"
    )
    broadcast_timeout_s: float = setting(
        30.0, help="longest silence of another rank", unit="seconds", above=0
    )
    join_timeout_s: float = setting(
        120.0, help="longest wait for all ranks to come up", unit="seconds", above=0
    )
    broadcast_wait: str = setting(
        "balanced",
        help="how a rank waits for a message: spin (latency), spin then sleep (balanced), "
        "or sleep (efficient)",
        choices=("latency", "balanced", "efficient"),
    )
    on_failure: str = setting(
        "raise",
        help="what a lost peer does to this process; the command line sets exit",
        choices=("raise", "exit"),
        exposed=False,
    )

    def __post_init__(self) -> None:
        for name, row in rows().items():
            value = row.from_code(getattr(self, name))
            problem = row.problem(value, "code")
            if problem is not None:
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected {problem}")
            object.__setattr__(self, name, value)
        conflict = _conflict({name: getattr(self, name) for name in rows()})
        if conflict is not None:
            raise ConfigError(conflict[0])

    def dtype_on(self, device_type: str) -> str:
        """The torch name of the number format on "cpu" or "cuda"; `auto` is decided here."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if device_type == "cuda" else "float32"

    @classmethod
    def resolve(
        cls,
        flags: Mapping[str, object] | Namespace | None = None,
        env: Mapping[str, str] | None = None,
        file: str | Path | None = None,
        *,
        on_failure: Literal["raise", "exit"] = "raise",
    ) -> ResolvedConfig:
        """Put the settings together: flag > environment > file > default.

        Args:
            flags: by field name; None or absent means not given. Texts are parsed. Names that are
                no setting are left alone, so an argparse Namespace can be passed as it is.
            env: the environment; os.environ when None.
            file: a TOML file; when None, `flags["config"]`, then TP_RUNTIME_CONFIG.
            on_failure: see the field; only the command line says "exit".

        Raises:
            ConfigError: a value is malformed; names the value, its source and what was expected.
            EnvError: the same, and the source is an environment variable.
        """
        given = _as_mapping(flags)
        environment = os.environ if env is None else env
        path = file or given.get("config") or environment.get(CONFIG_FILE_VARIABLE) or None
        from_file = _read_file(Path(str(path))) if path is not None else {}
        _warn_of_unknown_variables(environment)

        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for name, row in rows().items():
            if not row.exposed:
                continue
            if given.get(name) is not None:
                values[name] = row.read(given[name], where=f"flag {row.flag}", error=ConfigError)
                sources[name] = "flag"
            elif row.env in environment:
                values[name] = row.read(
                    environment[row.env], where=f"environment variable {row.env}", error=EnvError
                )
                sources[name] = f"env {row.env}"
            elif name in from_file:
                values[name] = row.read(
                    from_file[name], where=f"file {path}, key {name}", error=ConfigError, typed=True
                )
                sources[name] = f"file {path}"
            else:
                values[name] = row.default
                sources[name] = "default"
        conflict = _conflict(values)
        if conflict is not None:
            message, names = conflict
            origins = ", ".join(f"{name} from {sources[name]}" for name in names)
            raise ConfigError(f"{message} ({origins})")
        config = cls(**values, on_failure=on_failure)
        return ResolvedConfig(config=config, sources=sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """A config, and where each value is from.

    Args:
        sources: field -> "flag", "env NAME", "file PATH" or "default", or what `changed` it.
    """

    config: RuntimeConfig
    sources: Mapping[str, str]

    def changed(self, source: str, **values: Any) -> ResolvedConfig:
        """The same with other values of some settings, and where those are from."""
        return ResolvedConfig(
            config=replace(self.config, **values),
            sources={**self.sources, **dict.fromkeys(values, source)},
        )


@cache
def rows() -> Mapping[str, Row]:
    """The table by field name, in the order of declaration."""
    hints = get_type_hints(RuntimeConfig)
    return {f.name: row_of(f, hints[f.name]) for f in fields(RuntimeConfig)}


def known_variables() -> frozenset[str]:
    """Every environment variable that is read as a setting, and the others under the prefix."""
    return frozenset(row.env for row in rows().values() if row.exposed) | set(OTHER_VARIABLES)


def _conflict(values: Mapping[str, Any]) -> tuple[str, tuple[str, ...]] | None:
    """What two sound values say against each other, and their names."""
    page, block = values["kernel_page_size"], values["kv_block_size"]
    if page is not None and block % page:
        return (
            f"kernel_page_size={page} does not divide kv_block_size={block}",
            ("kernel_page_size", "kv_block_size"),
        )
    pin, disabled = values["decode_backend"], values["disable_decode_backend"]
    if pin in disabled:
        return (
            f"decode_backend={pin!r} is also in disable_decode_backend",
            ("decode_backend", "disable_decode_backend"),
        )
    return None


def _as_mapping(flags: Mapping[str, object] | Namespace | None) -> Mapping[str, object]:
    if flags is None:
        return {}
    return flags if isinstance(flags, Mapping) else vars(flags)


def _read_file(path: Path) -> Mapping[str, object]:
    try:
        raw = tomllib.loads(read_regular(path, most_bytes=_MOST_FILE_BYTES).decode("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"config file {path}: cannot be read: {error.strerror or error}"
        ) from error
    except (ValueError, RecursionError) as error:  # ValueError: also a number of 5000 digits
        raise ConfigError(f"config file {path}: expected TOML: {error}") from error
    known = [name for name, row in rows().items() if row.exposed]
    found: dict[str, object] = {}
    for key, value in raw.items():
        name = key.replace("-", "_")
        if name not in known:
            raise ConfigError(
                f"config file {path}: unknown key {key!r}{nearest(name, known)}; "
                f"known: {', '.join(known)}"
            )
        if name in found:
            raise ConfigError(f"config file {path}: {name} is given twice")
        found[name] = value
    return found


def _warn_of_unknown_variables(env: Mapping[str, str]) -> None:
    known = known_variables()
    for name in sorted(env):
        # the test launcher talks to the ranks it starts by variables of its own
        if name.startswith(_TEST_PREFIX):
            continue
        if name.startswith(ENV_PREFIX) and name not in known:
            log.warning(
                "environment variable %s is not one that tp_runtime reads%s",
                name,
                nearest(name, sorted(known)),
            )

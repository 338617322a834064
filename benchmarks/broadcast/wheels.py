"""One file of vLLM and one function of SGLang, taken out of a wheel that nobody installed.

What they import besides torch and zmq is replaced by stubs; nothing on their data path is changed.
"""

from __future__ import annotations

import ast
import importlib
import logging
import os
import pickle  # noqa: TID251 - SGLang's own function uses it
import sys
import types
import typing
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

_VLLM_FILE = "vllm/distributed/device_communicators/shm_broadcast.py"
_SGLANG_FILE = "sglang/srt/utils/common.py"


def vllm_module(wheel: str | None, folder: Path) -> Any:
    """vLLM's module of the message queue: the installed one, or out of this wheel.

    Args:
        folder: for the sockets that the wheel's queue binds.
    """
    name = _VLLM_FILE.removesuffix(".py").replace("/", ".")
    if wheel is None:
        return importlib.import_module(name)
    source = _from_wheel(wheel, _VLLM_FILE)
    counter = iter(range(1 << 30))

    def ipc_path() -> str:
        return f"ipc://{folder}/vllm-{next(counter)}"

    class Envs(types.ModuleType):
        VLLM_USE_SPINLOOP_EXT = False  # its default
        VLLM_RINGBUFFER_WARNING_INTERVAL = 60

    stubs: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.device_communicators": {},
        "vllm.distributed.utils": {
            "StatelessProcessGroup": object,
            "sched_yield": os.sched_yield,
        },
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": None},
        "vllm.utils": {},
        "vllm.utils.cpu_resource_utils": {
            "check_cgroup_memory_available": lambda *arguments, **named: None
        },
        "vllm.utils.network_utils": {
            "get_ip": lambda: "127.0.0.1",
            "get_open_zmq_inproc_path": lambda: f"inproc://vllm-{next(counter)}",
            "get_open_zmq_ipc_path": ipc_path,
            "is_valid_ipv6_address": lambda address: ":" in address,
        },
    }
    for stub_name, members in stubs.items():
        stub = types.ModuleType(stub_name)
        vars(stub).update(members)
        sys.modules[stub_name] = stub
    envs = Envs("vllm.envs")
    sys.modules["vllm.envs"] = envs
    vars(sys.modules["vllm"])["envs"] = envs
    module = types.ModuleType(name)
    sys.modules[name] = module  # its handle is pickled by this name
    exec(compile(source, _VLLM_FILE, "exec"), vars(module))
    return module


def sglang_function(wheel: str | None) -> Any:
    """SGLang's broadcast_pyobj: the installed one, or out of this wheel."""
    if wheel is None:
        return importlib.import_module("sglang.srt.utils").broadcast_pyobj
    import torch
    import torch.distributed as dist

    source = _from_wheel(wheel, _SGLANG_FILE)
    functions = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "broadcast_pyobj"
    ]
    if len(functions) != 1:
        raise RuntimeError(f"{wheel}: {_SGLANG_FILE} has {len(functions)} broadcast_pyobj")
    names = {name: getattr(typing, name) for name in ("Any", "List", "Optional")}
    names |= {"torch": torch, "dist": dist, "np": np, "pickle": pickle, "is_musa": lambda: False}
    module = ast.Module(body=list(functions), type_ignores=[])
    exec(compile(module, _SGLANG_FILE, "exec"), names)
    return names["broadcast_pyobj"]


def _from_wheel(wheel: str, name: str) -> str:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(name).decode()
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise RuntimeError(f"{wheel}: cannot read {name} from it: {error}") from error

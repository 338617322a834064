"""Everything that a measured plan depends on, as plain values.

Two starts with equal fingerprints would measure the same thing. What cannot be read is no
fingerprint at all: a plan whose circumstances are unknown is never used again.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tp_runtime.errors import SelectionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tp_runtime.selection.base import DeviceInfo
    from tp_runtime.selection.bench import BenchRequest

DISTRIBUTIONS = (
    "torch",
    "numpy",
    "triton",
    "flashinfer-python",
    "flashinfer-jit-cache",
    "nvidia-cudnn-frontend",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_HERE = Path(__file__).parent
# a child that goes on in the middle, and the device's number, measure nothing else
_NOT_OF_THE_PLAN = ("first_cell", "device")


def fingerprint_of(
    request: BenchRequest, device: DeviceInfo, *, rule: Mapping[str, Any]
) -> dict[str, Any]:
    """Device, driver, versions, our own sources, what is measured, and how it decides.

    Args:
        request: what would be measured; its profiles hold the lengths of a user's histogram.
        rule: the arguments of `select` besides the samples, and a person's pins and exclusions.

    Raises: SelectionError: something of it cannot be read; says what.
    """
    asked = {k: v for k, v in request.to_dict().items() if k not in _NOT_OF_THE_PLAN}
    fields = {
        "device": {
            "type": device.type,
            "name": device.name,
            "capability": device.capability,
            "driver": driver_version() if device.type == "cuda" else None,
        },
        "versions": {name: _version(name) for name in DISTRIBUTIONS},
        "sources": _sources_digest(),
        "request": asked,
        "rule": dict(rule),
    }
    plain: dict[str, Any] = json.loads(json.dumps(fields, allow_nan=False))
    return plain


def driver_version() -> str:
    """The NVIDIA kernel driver's version. Raises SelectionError where nobody tells it."""
    try:
        return _DRIVER_FILE.read_text(encoding="utf-8", errors="replace").splitlines()[0].strip()
    except (OSError, IndexError):
        return _driver_by_library()


def _driver_by_library() -> str:
    """From NVML, which containers without that file have."""
    text = ctypes.create_string_buffer(96)
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() != 0:
            raise SelectionError("the version of the NVIDIA driver cannot be read: NVML fails")
        try:
            status = library.nvmlSystemGetDriverVersion(text, len(text))
        finally:
            library.nvmlShutdown()
    except (OSError, AttributeError) as error:
        raise SelectionError(
            f"the version of the NVIDIA driver cannot be read: no {_DRIVER_FILE}, and {error}"
        ) from error
    if status != 0 or not text.value:
        raise SelectionError(f"the version of the NVIDIA driver cannot be read: NVML says {status}")
    return text.value.decode("ascii", "replace")


def _version(name: str) -> str | None:
    """None where it is not installed, which is a state of its own."""
    try:
        found: str | None = metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
    if not found:
        raise SelectionError(f"the version of {name} cannot be read: its metadata is damaged")
    return found


def _sources_digest() -> str:
    """Of this package: another benchmark, rule or kernel of ours measures or decides otherwise."""
    digest = hashlib.sha256()
    try:
        for path in sorted(_HERE.rglob("*.py")):
            digest.update(path.relative_to(_HERE).as_posix().encode())
            digest.update(path.read_bytes())
    except OSError as error:
        raise SelectionError(f"the sources of the selection cannot be read: {error}") from error
    return digest.hexdigest()

"""Which backends exist, in which order, and which may serve a shape on a device.

A backend is named by a "module:Class" string and imported when it is first asked about, so that
listing never loads a library that is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from tp_runtime.errors import BackendUnavailable, ConfigError
from tp_runtime.selection.base import DecodeBackend, DecodeShape, DecodeStep, DeviceInfo

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    import torch

    from tp_runtime.selection.plan import BackendPlan

_HERE = "tp_runtime.selection.backends"

GPU_FACTORIES: Mapping[str, str] = {
    "flashinfer_trtllm_gen": f"{_HERE}.flashinfer_trtllm_gen:FlashInferTrtllmGen",
    "flashinfer_xqa": f"{_HERE}.flashinfer_xqa:FlashInferXqa",
    "flashinfer_fa2_tc": f"{_HERE}.flashinfer_fa2_tc:FlashInferFa2Tc",
    "cudnn": f"{_HERE}.cudnn_paged:Cudnn",
    "flashinfer_cuda_core": f"{_HERE}.flashinfer_cuda_core:FlashInferCudaCore",
    "triton_splitkv": f"{_HERE}.triton_splitkv:TritonSplitKv",
    "flashinfer_fa3": f"{_HERE}.flashinfer_fa3:FlashInferFa3",
}
CPU_FACTORIES: Mapping[str, str] = {
    "cpu_grouped": f"{_HERE}.cpu_grouped:CpuGrouped",
    "cpu_rowwise": f"{_HERE}.cpu_rowwise:CpuRowwise",
    "cpu_padded": f"{_HERE}.cpu_padded:CpuPadded",
}
FACTORIES: Mapping[str, str] = {
    **GPU_FACTORIES,
    **CPU_FACTORIES,
    "torch_reference": f"{_HERE}.torch_reference:TorchReference",
}

# The order is part of every plan: a change of it is a change of PRIORITY_VERSION.
PRIORITY: tuple[str, ...] = tuple(FACTORIES)
PRIORITY_VERSION = 2

# Slow everywhere and long to build: for comparisons only.
ONLY_WHEN_NAMED = frozenset({"flashinfer_fa3"})


@runtime_checkable
class BuildableBackend(Protocol):
    """A backend whose kernel is compiled when it is first used, or ahead by this."""

    def build(self) -> None:
        """Compile and load it. May take minutes; called outside of any capture or deadline."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Eligibility:
    """What a person allowed: one pinned backend, or all but the disabled ones.

    Raises: ConfigError: a name that is no backend, or pinned and disabled at once.
    """

    pin: str | None = None
    disabled: frozenset[str] = frozenset()
    known: tuple[str, ...] = PRIORITY

    def __post_init__(self) -> None:
        asked = ([] if self.pin is None else [self.pin]) + sorted(self.disabled)
        unknown = [name for name in asked if name not in self.known]
        if unknown:
            raise ConfigError(
                f"decode backend {unknown[0]!r} is unknown; known: {', '.join(self.known)}"
            )
        if self.pin in self.disabled:
            raise ConfigError(f"decode backend {self.pin!r} is both asked for and disabled")

    def refusal(self, name: str) -> str | None:
        """Why the person's settings exclude a backend, or None."""
        if name in self.disabled:
            return "disabled by the configuration"
        if self.pin is not None and name != self.pin:
            return f"not asked for: {self.pin} is pinned"
        return None


def available_backends(
    shape: DecodeShape,
    device: DeviceInfo,
    *,
    eligibility: Eligibility | None = None,
    factories: Mapping[str, str] = FACTORIES,
    named: Collection[str] = (),
) -> list[tuple[str, str | None]]:
    """Every backend with the reason it is refused, None if usable, in fixed priority order.

    Static: constructs nothing and touches no device memory.

    Args:
        named: backends asked for by name, which those of ONLY_WHEN_NAMED must be.

    Raises: BackendUnavailable: a pinned backend refuses the shape or the device.
    """
    eligibility = Eligibility(known=tuple(factories)) if eligibility is None else eligibility
    listed = []
    for name in factories:
        reason = _refusal(name, shape, device, eligibility, factories)
        if reason is None and name in ONLY_WHEN_NAMED and name not in (eligibility.pin, *named):
            reason = "used only when it is asked for by name"
        listed.append((name, reason))
    pinned = dict(listed).get(eligibility.pin) if eligibility.pin else None
    if pinned is not None:
        raise BackendUnavailable(
            f"decode backend {eligibility.pin} was asked for, but cannot serve {shape} "
            f"on {device.name}: {pinned}"
        )
    return listed


def foreign(name: str, device: DeviceInfo) -> bool:
    """Whether a backend is made for another kind of device, which needs no explanation."""
    return name in (GPU_FACTORIES if device.type != "cuda" else CPU_FACTORIES)


def usable_backends(listed: Iterable[tuple[str, str | None]]) -> tuple[str, ...]:
    """The names without a refusal.

    Raises: BackendUnavailable: none is left; the message lists every reason.
    """
    listed = list(listed)
    usable = tuple(name for name, reason in listed if reason is None)
    if not usable:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in listed)
        raise BackendUnavailable(f"no decode backend is usable ({reasons})")
    return usable


class BackendSet:
    """The backends of one shape on one device, built when first used and then kept."""

    def __init__(
        self,
        shape: DecodeShape,
        device: torch.device,
        *,
        factories: Mapping[str, str] = FACTORIES,
    ) -> None:
        self.shape = shape
        self.device = device
        self._info = DeviceInfo.of(device)
        self._factories = factories
        self._built: dict[str, DecodeBackend] = {}

    def __getitem__(self, name: str) -> DecodeBackend:
        """The backend of that name.

        Raises: BackendUnavailable: unknown, or it refuses this shape or device.
        """
        backend = self._built.get(name)
        if backend is None:
            backend = self._built[name] = self._build(name)
        return backend

    @property
    def built(self) -> tuple[str, ...]:
        return tuple(self._built)

    def _build(self, name: str) -> DecodeBackend:
        if name not in self._factories:
            raise BackendUnavailable(
                f"decode backend {name!r} is unknown; known: {', '.join(self._factories)}"
            )
        backend_class = _load(self._factories[name])
        reason = backend_class.refusal(self.shape, self._info)
        if reason is not None:
            raise BackendUnavailable(
                f"decode backend {name} cannot serve {self.shape} on {self._info.name}: {reason}"
            )
        return backend_class(self.shape, self.device)  # type: ignore[call-arg]


def prepare_decode_backend(
    plan: BackendPlan, step: DecodeStep, *, backends: BackendSet | None = None
) -> DecodeBackend:
    """The backend that the step's variant names, prepared for the step. The only dispatcher.

    Args:
        plan: the agreed plan.
        step: bucket None is eager and takes the first backend of the plan's priority order.
        backends: where instances are kept; by default one set for the plan's shape on the CPU,
            or on the current CUDA device if the plan was measured on one.

    Raises: BackendUnavailable: the plan names what this device cannot run, or has no shape.
        SelectionError: the plan has no such bucket or variant.
    """
    name = plan.backend_of(step.bucket, step.variant)
    backend = (_default_set(plan) if backends is None else backends)[name]
    backend.prepare(step)
    return backend


_DEFAULT_SETS: dict[tuple[DecodeShape, str], BackendSet] = {}


def _default_set(plan: BackendPlan) -> BackendSet:
    if plan.shape is None:
        raise BackendUnavailable("the plan does not say for which shape it is: pass backends=")
    import torch

    cuda = torch.cuda.is_available() and not plan.priority[0].startswith("cpu_")
    key = (plan.shape, "cuda" if cuda else "cpu")
    if key not in _DEFAULT_SETS:
        _DEFAULT_SETS[key] = BackendSet(plan.shape, torch.device(key[1]))
    return _DEFAULT_SETS[key]


def _refusal(
    name: str,
    shape: DecodeShape,
    device: DeviceInfo,
    eligibility: Eligibility,
    factories: Mapping[str, str],
) -> str | None:
    reason = eligibility.refusal(name)
    if reason is not None:
        return reason
    try:
        backend = _load(factories[name])
    except ImportError as error:
        return f"cannot be imported: {error}"
    return backend.refusal(shape, device)


def _load(target: str) -> type[DecodeBackend]:
    module, _, name = target.partition(":")
    return cast("type[DecodeBackend]", getattr(import_module(module), name))


def order_of(names: Iterable[str], factories: Mapping[str, str] = FACTORIES) -> Sequence[str]:
    """Names sorted into the fixed priority order."""
    position = {name: i for i, name in enumerate(factories)}
    return sorted(names, key=lambda name: position[name])

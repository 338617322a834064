"""Which decode attention backend, when.

Rank 0 measures (`measure_in_child`), decides (`select`), and every rank confirms (`agree`) one
`BackendPlan`, whose `choose` names the backend of each step. Importing this loads no torch.
"""

if __name__ != "tp_runtime.selection":
    raise ImportError("import tp_runtime.selection, not selection")

from tp_runtime.selection.agreement import (
    agree,
    agree_alike,
    agree_capture,
    announce,
    device_check,
)
from tp_runtime.selection.base import DecodeBackend, DecodeShape, DecodeStep, DeviceInfo, PagedKV
from tp_runtime.selection.bench import BenchReport, BenchRequest, measure, measure_in_child
from tp_runtime.selection.plan import BackendPlan, BucketPlan, Choice
from tp_runtime.selection.registry import (
    PRIORITY,
    PRIORITY_VERSION,
    BackendSet,
    Eligibility,
    available_backends,
    prepare_decode_backend,
)
from tp_runtime.selection.rule import Sample, select, select_stable

__all__ = [
    "PRIORITY",
    "PRIORITY_VERSION",
    "BackendPlan",
    "BackendSet",
    "BenchReport",
    "BenchRequest",
    "BucketPlan",
    "Choice",
    "DecodeBackend",
    "DecodeShape",
    "DecodeStep",
    "DeviceInfo",
    "Eligibility",
    "PagedKV",
    "Sample",
    "agree",
    "agree_alike",
    "agree_capture",
    "announce",
    "available_backends",
    "device_check",
    "measure",
    "measure_in_child",
    "prepare_decode_backend",
    "select",
    "select_stable",
]

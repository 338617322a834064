"""The names that users import. A name is added here on purpose, and hardly ever taken away."""

from __future__ import annotations

import importlib

import pytest

import tp_runtime

NAMES = {
    "tp_runtime": """
        AsyncRunner Attention DecodeGraphs DecodeModel Engine EngineStatistics ModelShape QkNorm
        RankInfo RequestOutput RuntimeConfig SamplingParams ShapeHints StagingRing TextStream
        Tokenizer TpGroup TpRuntimeError broadcast_tensors
    """,
    "tp_runtime.broadcast": """
        BroadcastError BroadcasterConfig BroadcasterStatistics ChannelClosed CpuTpBroadcaster
        DeadlineExceeded HandshakeRefused Message PeerLost PeerStatistics ProtocolError Receipt
        WaitMode
    """,
    "tp_runtime.selection": """
        BackendPlan BackendSet BenchReport BenchRequest BucketPlan Choice DecodeBackend
        DecodeShape DecodeStep DeviceInfo Eligibility PRIORITY PRIORITY_VERSION PagedKV Sample
        agree agree_alike agree_capture announce available_backends device_check measure
        measure_in_child prepare_decode_backend select select_stable
    """,
    "tp_runtime.testing": "RankExit RanksFailed run_ranks",
}


@pytest.mark.parametrize("module", NAMES)
def test_public_names(module: str) -> None:
    found = importlib.import_module(module)
    assert sorted(found.__all__) == sorted(NAMES[module].split())
    for name in found.__all__:
        assert getattr(found, name) is not None


def test_a_name_that_is_not_there_says_so() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        _ = tp_runtime.Engin
    assert set(tp_runtime.__all__) <= set(dir(tp_runtime))

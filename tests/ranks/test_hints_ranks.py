from __future__ import annotations

from typing import Any

import pytest
import torch

from tp_runtime.broadcast import BroadcasterConfig, CpuTpBroadcaster
from tp_runtime.errors import ProtocolError
from tp_runtime.group import TpGroup
from tp_runtime.hints import broadcast_tensors
from tp_runtime.ranks import RankInfo
from tp_runtime.rendezvous import channel_address
from tp_runtime.testing import run_ranks

CPU = torch.device("cpu")


def some_tensors(round_: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(round_)
    return {
        "hidden": torch.randn(4 * (round_ + 1), 33, generator=generator).bfloat16(),
        "mask": torch.rand(7, generator=generator) > 0.5,
        "ids": torch.randint(-9, 9, (2, 3, round_ + 1), generator=generator),
        "large": torch.randn(300, 257, generator=generator),
        "scale": torch.tensor(0.25),
    }


def receive_rounds() -> Any:
    """For every way to send, whether this rank got, round after round, what rank 0 has."""
    info = RankInfo.from_env()
    group = TpGroup.create(info, device=CPU, timeout_s=30)
    channel = CpuTpBroadcaster.join(
        rank=info.tp_rank,
        world_size=info.tp_size,
        address=channel_address(info),
        config=BroadcasterConfig(join_timeout_s=30.0, timeout_s=30.0),
    )
    equal = {}
    for inline_bytes in (0, 64 * 1024):
        for way in (channel, None):
            name = f"{'channel' if way else 'group'}, {inline_bytes} bytes inline"
            equal[name] = [
                receives(group, way, round_=round_, inline_bytes=inline_bytes)
                for round_ in range(5)
            ]
    channel.close()
    group.close()
    return equal


def receives(
    group: TpGroup, channel: CpuTpBroadcaster | None, *, round_: int, inline_bytes: int
) -> bool:
    expected = some_tensors(round_)
    got = broadcast_tensors(
        expected if group.rank == 0 else None,
        group=group,
        channel=channel,
        row_multiples={"hidden": 4},
        inline_bytes=inline_bytes,
    )
    return list(got) == list(expected) and all(
        got[name].dtype == expected[name].dtype and torch.equal(got[name], expected[name])
        for name in expected
    )


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_peers_get_the_tensors_of_rank_0(size: int) -> None:
    for by_way in run_ranks(receive_rounds, size, timeout_s=90):
        assert by_way == {
            f"{way}, {inline_bytes} bytes inline": [True] * 5
            for inline_bytes in (0, 64 * 1024)
            for way in ("channel", "group")
        }


def meet_another_message() -> Any:
    info = RankInfo.from_env()
    group = TpGroup.create(info, device=CPU, timeout_s=30)
    channel = CpuTpBroadcaster.join(
        rank=info.tp_rank, world_size=info.tp_size, address=channel_address(info)
    )
    said = ""
    if group.rank == 0:
        channel.publish({"kind": "step", "step": 3})
    else:
        with pytest.raises(ProtocolError, match="got 'step'") as caught:
            broadcast_tensors(None, group=group, channel=channel)
        said = str(caught.value)
    group.barrier()
    channel.close()
    group.close()
    return said


@pytest.mark.long
def test_calls_in_a_different_order_are_told_apart() -> None:
    _, said = run_ranks(meet_another_message, 2, timeout_s=60)
    assert "rank 1" in said
    assert "same order" in said

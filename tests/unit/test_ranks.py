"""RankInfo: which rank this is, and the errors that name a variable."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tp_runtime.errors import ConfigError, EnvError, TpGroupError
from tp_runtime.ranks import TORCHRUN_VARIABLES, RankInfo


def torchrun_env(rank: int = 1, world: int = 4, **changes: str) -> dict[str, str]:
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "job-7",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    return env | changes


def test_no_launcher_means_a_single_rank() -> None:
    info = RankInfo.from_env({"PATH": "/bin"})
    assert info == RankInfo.single()
    assert (info.rank, info.world_size, info.tp_rank, info.tp_size) == (0, 1, 0, 1)


def test_more_ranks_than_one_need_a_launcher() -> None:
    with pytest.raises(EnvError, match=r"torchrun --nproc-per-node 3"):
        RankInfo.from_env({}, tp_size=3)


def test_all_ranks_form_one_group_by_default() -> None:
    info = RankInfo.from_env(torchrun_env(rank=3))
    assert (info.tp_rank, info.tp_size, info.tp_group) == (3, 4, 0)
    assert (info.run_id, info.restart_count, info.master_port) == ("job-7", 2, 29500)


@pytest.mark.parametrize(
    ("rank", "tp_rank", "tp_group", "members"),
    [(0, 0, 0, [0, 1]), (1, 1, 0, [0, 1]), (2, 0, 1, [2, 3]), (3, 1, 1, [2, 3])],
)
def test_tp_rank_is_not_the_global_rank(
    rank: int, tp_rank: int, tp_group: int, members: list[int]
) -> None:
    info = RankInfo.from_env(torchrun_env(rank=rank), tp_size=2)
    assert (info.rank, info.tp_rank, info.tp_group) == (rank, tp_rank, tp_group)
    assert list(info.tp_ranks) == members


@pytest.mark.parametrize("name", TORCHRUN_VARIABLES)
def test_a_missing_variable_is_named(name: str) -> None:
    env = torchrun_env()
    del env[name]
    with pytest.raises(EnvError, match=rf"^{name} not set although"):
        RankInfo.from_env(env)


def test_a_lone_variable_lists_all_that_are_missing() -> None:
    with pytest.raises(EnvError, match=r"RANK, LOCAL_RANK, WORLD_SIZE.* not set although MASTER"):
        RankInfo.from_env({"MASTER_PORT": "1"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "one"),
        ("RANK", "-1"),
        ("RANK", "4"),
        ("LOCAL_RANK", "4"),
        ("WORLD_SIZE", "0"),
        ("LOCAL_WORLD_SIZE", "5"),
        ("MASTER_PORT", "65536"),
        ("MASTER_PORT", "http"),
        ("TORCHELASTIC_RESTART_COUNT", "x"),
    ],
)
def test_a_malformed_variable_is_named_with_its_value(name: str, value: str) -> None:
    with pytest.raises(EnvError, match=rf"^{name}='{value}': expected an integer"):
        RankInfo.from_env(torchrun_env() | {name: value})


def test_local_rank_beyond_rank_is_refused() -> None:
    with pytest.raises(EnvError, match=r"RANK=0 is smaller than LOCAL_RANK=1"):
        RankInfo.from_env(torchrun_env(RANK="0", LOCAL_RANK="1"))


@pytest.mark.parametrize("tp_size", [0, -2, 3, 8])
def test_a_tp_size_that_cannot_be_is_refused(tp_size: int) -> None:
    with pytest.raises(ConfigError, match=rf"tp_size={tp_size}"):
        RankInfo.from_env(torchrun_env(), tp_size=tp_size)


def test_a_group_across_hosts_is_refused_by_name() -> None:
    env = torchrun_env(rank=5, world=8, LOCAL_RANK="1", LOCAL_WORLD_SIZE="4")
    with pytest.raises(TpGroupError, match=r"group 0 \(global ranks 0-7\).*ranks 4-7.*0, 1, 2, 3"):
        RankInfo.from_env(env)
    assert RankInfo.from_env(env, tp_size=4).tp_group == 1


def test_hosts_of_different_sizes_are_told_apart() -> None:
    # two ranks on the first host and four on the second: ranks 2..5 are together
    env = torchrun_env(rank=2, world=6, LOCAL_RANK="0", LOCAL_WORLD_SIZE="4")
    assert list(RankInfo.from_env(env, tp_size=2).tp_ranks) == [2, 3]
    with pytest.raises(TpGroupError, match=r"ranks 0, 1 run on another host"):
        RankInfo.from_env(env, tp_size=3 * 2)


def test_asking_for_the_rank_loads_no_torch() -> None:
    code = "import sys, tp_runtime.ranks, tp_runtime.rendezvous; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""The socket path of a TP group: unique for the run, private, short."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tp_runtime.errors import TpGroupError
from tp_runtime.ranks import RankInfo
from tp_runtime.rendezvous import MAX_ADDRESS_BYTES, channel_address, runtime_directory

if TYPE_CHECKING:
    from pathlib import Path

INFO = RankInfo(
    rank=0,
    world_size=4,
    local_rank=0,
    local_world_size=4,
    tp_rank=0,
    tp_size=2,
    tp_group=0,
    master_addr="localhost",
    master_port=29500,
    run_id="none",
    restart_count=0,
)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # pytest's own folder may be too long a path for a socket
    short = tmp_path.parent.parent / f"d{os.getpid()}-{abs(hash(tmp_path)) % 10**6}"
    short.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    return short


def test_the_ranks_of_a_group_get_the_same_short_path(base: Path) -> None:
    address = channel_address(INFO)
    assert address == channel_address(replace(INFO, rank=1, local_rank=1, tp_rank=1))
    assert address.parent == base / "tp_runtime"
    assert address.parent.stat().st_mode & 0o777 == 0o700
    assert not address.exists()
    assert len(os.fsencode(address)) <= MAX_ADDRESS_BYTES


@pytest.mark.usefixtures("base")
def test_runs_attempts_and_groups_never_meet() -> None:
    others = [
        INFO,
        replace(INFO, rank=2, tp_group=1),
        replace(INFO, master_port=29501),
        replace(INFO, master_addr="127.0.0.1"),
        replace(INFO, run_id="other"),
        replace(INFO, restart_count=1),
    ]
    assert len({channel_address(one) for one in others}) == len(others)


def test_a_directory_open_to_others_is_refused(base: Path) -> None:
    (base / "tp_runtime").mkdir()
    (base / "tp_runtime").chmod(0o755)
    with pytest.raises(TpGroupError, match=r"tp_runtime has mode 0755, expected 0700"):
        channel_address(INFO)


def test_a_link_is_refused(base: Path) -> None:
    (base / "elsewhere").mkdir(mode=0o700)
    (base / "tp_runtime").symlink_to(base / "elsewhere")
    with pytest.raises(TpGroupError, match="is a symbolic link"):
        channel_address(INFO)


def test_a_file_in_its_place_is_refused(base: Path) -> None:
    (base / "tp_runtime").touch(mode=0o600)
    with pytest.raises(TpGroupError, match="is not a directory"):
        channel_address(INFO)


def test_someone_elses_directory_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime_directory()
    uid = os.getuid()
    calls = iter([uid, uid + 1])  # the base is ours, what lies in it is not
    monkeypatch.setattr(os, "getuid", lambda: next(calls, uid + 1))
    with pytest.raises(TpGroupError, match=rf"belongs to uid {uid}, expected {uid + 1}"):
        runtime_directory()


@pytest.mark.parametrize("kind", ["unset", "missing", "long"])
def test_without_a_usable_base_the_directory_is_in_tmp(
    kind: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "unset":
        monkeypatch.delenv("XDG_RUNTIME_DIR")
    elif kind == "missing":
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(base / "gone"))
    else:
        long = base / ("x" * 120)
        long.mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    assert str(channel_address(INFO)).startswith(f"/tmp/tp_runtime-{os.getuid()}/")

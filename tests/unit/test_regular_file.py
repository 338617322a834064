"""Files that are read whole: none without an end, none that waits for a writer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from tp_runtime.config import RuntimeConfig
from tp_runtime.errors import ConfigError, ModelFormatError
from tp_runtime.launch import prompts
from tp_runtime.launch.recorded import read_recorded
from tp_runtime.models.config import read_json
from tp_runtime.regular_file import read_regular
from tp_runtime.saved_plan import read_plan
from tp_runtime.selection.histogram import LengthHistogram
from tp_runtime.selection.plan_cache import PlanCache

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

READERS: dict[str, tuple[Callable[[Path], Any], type[Exception]]] = {
    "config": (lambda path: RuntimeConfig.resolve({}, {}, path), ConfigError),
    "plan": (read_plan, ConfigError),
    "histogram": (LengthHistogram.read, ConfigError),
    "recorded": (read_recorded, ConfigError),
    "model": (read_json, ModelFormatError),
}


@pytest.fixture(params=["a pipe", "a device"])
def endless(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "endless"
    if request.param == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    return path, request.param


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_or_a_device_is_refused_at_once(name: str, endless: tuple[Path, str]) -> None:
    read, refusal = READERS[name]
    path, kind = endless
    with pytest.raises(refusal, match=f"endless.*expected a regular file, got {kind}"):
        read(path)


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_far_too_large_is_refused(name: str, tmp_path: Path) -> None:
    read, refusal = READERS[name]
    path = tmp_path / "large"
    path.touch()
    os.truncate(path, 1 << 33)  # a hole: it takes no room
    with pytest.raises(refusal, match=r"large.*expected at most \d+ bytes, got more"):
        read(path)


def test_a_kept_plan_that_has_no_end_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = PlanCache(tmp_path)
    cache.path_of({}).symlink_to("/dev/zero")
    assert cache.load({}) is None
    assert "expected a regular file, got a device" in caplog.text


def test_all_of_a_file_and_no_more_than_allowed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_regular(path, most_bytes=5) == b"12345"
    with pytest.raises(OSError, match="at most 4 bytes"):
        read_regular(path, most_bytes=4)
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path, most_bytes=4)


def test_prompts_may_come_through_a_pipe_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"one\ntwo\n")
    os.close(writer)
    assert prompts.given_prompts(None, f"/dev/fd/{reader}") == ("one", "two")
    os.close(reader)
    monkeypatch.setattr(prompts, "_MOST_BYTES", 1000)
    with pytest.raises(ConfigError, match="/dev/zero: expected at most 1000 bytes of prompts"):
        prompts.given_prompts(None, "/dev/zero")
    with open("/dev/zero", "rb") as stream, pytest.raises(ConfigError, match="standard input"):
        prompts.read_stdin(stream)

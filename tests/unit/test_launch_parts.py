"""The small parts of the command line: flags, errors, bar, tables, plan files, signals."""

from __future__ import annotations

import io
import logging
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tp_runtime import logs
from tp_runtime.config import rows
from tp_runtime.errors import (
    ConfigError,
    EnvError,
    ModelFormatError,
    ModelNotFound,
    PeerLost,
    RequestError,
)
from tp_runtime.launch import configuration, exits
from tp_runtime.launch.__main__ import build_parser, main
from tp_runtime.launch.interrupts import Interrupts
from tp_runtime.launch.options import parse, with_dashes
from tp_runtime.launch.output import JsonTarget, table
from tp_runtime.launch.progress import Progress
from tp_runtime.launch.prompts import given_prompts

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]

DECODE_FLAGS = """
--all-reduce --async-decode --broadcast-timeout-s --broadcast-wait --config --debug
--decode-backend --decode-buckets --decode-plan --device --disable-decode-backend --dtype
--enable-dynamic-decode-backend --help --ignore-eos --join-timeout-s --json
--kernel-page-size --kv-block-size --kv-cache-tokens
--length-histogram --log-level --max-batch-size --max-seq-len --max-tokens --min-p --model
--no-async-decode --no-enable-dynamic-decode-backend --no-plan-cache --plan-cache
--prefill-chunk-tokens --prompt --prompts-file --quiet --raw --seed --selection-mode --stop
--temperature --tensor-parallel-size --top-k --top-p --tp-size --verbose-ranks
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def library_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("tp_runtime")
    level, handlers = logger.level, list(logger.handlers)
    yield logger
    logger.setLevel(level)
    logger.handlers[:] = handlers


def test_the_flags_of_decode_are_these() -> None:
    args = parse(build_parser(), ["decode"])
    assert list(args.parser.flags()) == DECODE_FLAGS.split()


def test_help_shows_the_default_of_a_setting_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    text = parse(build_parser(), ["decode"]).parser.format_help()
    lines = {line.split()[0]: line.strip() for line in text.splitlines() if "--" in line}
    assert lines["--max-batch-size"].endswith("(default 64 requests; TP_RUNTIME_MAX_BATCH_SIZE)")
    assert lines["--plan-cache,"].endswith("(default on; TP_RUNTIME_PLAN_CACHE)")
    assert lines["--join-timeout-s"].endswith("(default 120 seconds; TP_RUNTIME_JOIN_TIMEOUT_S)")
    assert lines["--max-seq-len"].endswith("allows (TP_RUNTIME_MAX_SEQ_LEN)")
    assert lines["--disable-decode-backend"].endswith("use (TP_RUNTIME_DISABLE_DECODE_BACKEND)")
    assert lines["--length-histogram"].startswith("--length-histogram FILE ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--kv_block_size", "64"], ["--kv-block-size", "64"]),
        (["--kv_block_size=a_b"], ["--kv-block-size=a_b"]),
        (["--prompt", "a_b"], ["--prompt", "a_b"]),
        (["--prompt=--a_b\nc"], ["--prompt=--a_b\nc"]),
        (["a", "--", "--x_y"], ["a", "--", "--x_y"]),
        (["-x_y", "--2_3"], ["-x_y", "--2_3"]),
    ],
)
def test_flags_may_have_underscores(words: list[str], expected: list[str]) -> None:
    assert with_dashes(words) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["decode", "--kv-blok-size", "1"], "unknown argument '--kv-blok-size'; did you mean --kv"),
        (["decode", "--zzz=1"], "unknown argument '--zzz=1'; see 'tp-runtime decode --help'"),
        (["decode", "--kv-block", "1"], "unknown argument '--kv-block'"),
        (["decode", "stray"], "unknown argument 'stray'"),
        (["decode", "--model"], "argument --model: expected one argument"),
        (["dekode"], "invalid choice: 'dekode'"),
        (
            ["bench", "decode", "--stepz", "1"],
            "unknown argument '--stepz'; did you mean --steps?; see 'tp-runtime bench decode --h",
        ),
        (["bench", "--debug"], "unknown argument '--debug'; see 'tp-runtime bench --help'"),
    ],
)
def test_a_wrong_command_line_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(exits.UsageError) as caught:
        parse(build_parser(), words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("limit", ["0", "-1", "0.0", "1e999", "soon"])
def test_a_selection_needs_time(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["select", "--model", "random:tiny", "--time-limit-s", limit]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"error: flag --time-limit-s='{limit}': expected a number above 0")


@pytest.mark.parametrize(
    ("words", "expected"),
    [([], "a verb: decode"), (["plan"], "an action: plan show"), (["bench"], "an action: bench d")],
)
def test_a_command_that_is_not_whole_is_one_line_and_status_2(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tp-runtime: error: expected {expected}")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("x"), 2),
        (EnvError("x"), 2),
        (RequestError("x"), 2),
        (ModelNotFound("x"), 2),
        (ModelFormatError("x"), 2),
        (PeerLost("x", rank=1, reason="x"), 1),
        (OSError("x"), 1),
        (RuntimeError("x"), 1),
    ],
)
def test_exit_status(error: Exception, status: int) -> None:
    assert exits.status_of(error) == status


def test_an_error_is_one_line_with_the_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setenv("RANK", "1")
    assert exits.report(PeerLost("rank 2\nis gone", rank=2, reason="x"), debug=False) == 1
    assert capsys.readouterr().err == "tp-runtime: rank 1: error: rank 2 is gone\n"
    monkeypatch.delenv("RANK")
    exits.report(RuntimeError("out of memory"), debug=False)
    assert capsys.readouterr().err == "tp-runtime: error: RuntimeError: out of memory\n"


def test_a_traceback_comes_only_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    try:
        raise ConfigError("wrong")
    except ConfigError as error:
        exits.report(error, debug=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "tp-runtime: error: wrong"


def test_torchrun_gets_the_message_of_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    exits.report(PeerLost("rank 2 is gone", rank=2, reason="x"), debug=False)
    assert "rank 2 is gone" in file.read_text()


def test_the_bar_is_one_line_on_a_terminal() -> None:
    stream = Terminal()
    with Progress(stream=stream) as progress:
        progress("load", 1, 4)
        progress("load", 1, 4)
        progress("load", 4, 4)
        progress("selection", 0, 0)
    text = stream.getvalue()
    assert "\n" not in text
    assert text.count("1/4") == 1
    assert "[######..................] 1/4" in text
    assert text.endswith("selection  ...\r\x1b[K")


def test_there_is_no_bar_without_a_terminal_or_when_disabled() -> None:
    for stream in (plain := io.StringIO(), terminal := Terminal()):
        progress = Progress(stream=stream, enabled=stream is plain)
        with progress:
            progress("load", 1, 2)
        assert stream.getvalue() == ""
    assert terminal.isatty()


def test_a_table_is_aligned() -> None:
    assert table([("a", "1"), ("long", "")], header=("n", "v")) == "n     v\na     1\nlong"
    assert table([]) == ""


def test_a_json_file_that_fails_at_the_end_is_named() -> None:
    with pytest.raises(ConfigError, match="flag --json: /dev/full cannot be written: No space"):
        JsonTarget("/dev/full").write({"x": "y" * 100_000})


def test_a_json_file_that_cannot_be_written_is_found_early(tmp_path: Path) -> None:
    JsonTarget(None).check()
    JsonTarget("-").check()
    JsonTarget(str(tmp_path / "new.json")).check()
    for where, message in ((tmp_path, "is a folder"), (tmp_path / "no" / "x", "does not exist")):
        with pytest.raises(ConfigError, match=message):
            JsonTarget(str(where)).check()


def test_the_page_of_settings_is_current() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == configuration.page(), "run: make docs"
    for name, row in rows().items():
        assert (f"| {name} | `{row.flag}`" in written) is row.exposed


def test_log_records_have_a_rank_and_the_root_logger_is_left_alone(
    library_logger: logging.Logger,
) -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    stream = io.StringIO()
    logs.configure(logging.INFO, rank=3, stream=io.StringIO())
    logs.configure(logging.INFO, rank=3, stream=stream)
    logging.getLogger("tp_runtime.some.module").info("hello %s", "you")
    logging.getLogger("tp_runtime.other").debug("not shown")
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().endswith("rank 3 INFO tp_runtime.some.module: hello you\n")
    assert (root.level, list(root.handlers)) == before
    assert sum(type(h).__name__ == "_CommandLineHandler" for h in library_logger.handlers) == 1


def test_a_log_level_must_exist() -> None:
    assert logs.parse_level("Debug", source="x") == logging.DEBUG
    with pytest.raises(ConfigError, match="flag --log-level: log level 'loud': expected one of"):
        logs.parse_level("loud", source="flag --log-level")


def test_a_signal_raises_at_once_until_it_is_deferred() -> None:
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert interrupts.noted
    with Interrupts() as interrupts:
        interrupts.defer()
        signal.raise_signal(signal.SIGINT)
        assert interrupts.noted
        with pytest.raises(KeyboardInterrupt):
            interrupts.raise_if_noted()
        # the person means it
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_and_threads_are_given_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    threads = threading.active_count()
    with Interrupts():
        assert threading.active_count() == threads + 1
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert threading.active_count() == threads


def test_a_rank_that_is_stuck_after_a_signal_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    statuses: list[int] = []

    def end(status: int) -> None:
        statuses.append(status)
        ended.set()

    monkeypatch.setattr(os, "_exit", end)
    with Interrupts(grace_s=0.01) as interrupts:
        interrupts.defer()
        signal.raise_signal(signal.SIGTERM)
        assert ended.wait(10)
    assert statuses == [130]


def test_a_prompts_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbfWhy?\n how \n")
    assert given_prompts(None, str(file)) == ("Why?", " how ")

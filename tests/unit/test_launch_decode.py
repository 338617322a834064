"""`decode` with an engine made by hand: flags, output, JSON, exit status."""

from __future__ import annotations

import io
import json
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tp_runtime.errors import ConfigError, PeerLost, RequestError
from tp_runtime.launch import decode
from tp_runtime.launch.interrupts import Interrupts
from tp_runtime.launch.options import Parser, with_dashes
from tp_runtime.ranks import TORCHRUN_VARIABLES
from tp_runtime.requests import RequestOutput

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tp_runtime.config import RuntimeConfig
    from tp_runtime.sampling import SamplingParams


class Letters:
    """A tokenizer with one token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def chat(self, user_text: str) -> list[int]:
        return self.encode(f"<{user_text}>")


@dataclass(frozen=True)
class FakeChoice:
    backend: str


class FakePlan:
    device = "a machine"
    buckets = (1, 2)

    def variants(self, bucket: int) -> tuple[str, ...]:
        return ("first", "second")[:bucket]

    def choose(self, *, batch_size: int, total_kv: int, max_kv: int) -> FakeChoice:
        return FakeChoice(f"backend-for-{batch_size}-{total_kv}-{max_kv}")


class FakeEngine:
    """Answers each prompt with its own characters reversed; the last prompt ends first."""

    plan = FakePlan()
    plan_digest: str | None = "aa" * 16
    plan_source: str = "cached"
    capture_digest: str | None = "bb" * 16
    peer_steps = 0  # that rank 0 still makes

    def __init__(self, config: RuntimeConfig, *, tokenizer: Letters | None, limit: int) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.calls: list[str] = []
        self.on_step: Callable[[], None] = lambda: None
        self.error: str | None = None
        self._limit = limit
        self._requests: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
        self._steps = 0

    def start(self, *, progress: Callable[[str, int, int], None] | None = None) -> None:
        self.calls.append("start")
        if progress is not None:
            progress("load", 1, 1)

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
    ) -> str:
        if len(prompt_token_ids) > self._limit:
            raise RequestError(
                f"prompt has {len(prompt_token_ids)} tokens, the model takes {self._limit}"
            )
        name = request_id or str(len(self._requests))
        self._requests[name] = (tuple(prompt_token_ids), sampling)
        return name

    def step(self) -> Iterator[RequestOutput]:
        self.on_step()
        self._steps += 1
        # the first step is a prefill that yields nothing, as in the real engine
        if self._steps > 1:
            for name, (prompt, sampling) in reversed(list(self._requests.items())):
                yield self._output(name, prompt, sampling)

    def _output(
        self, name: str, prompt: tuple[int, ...], sampling: SamplingParams
    ) -> RequestOutput:
        answer = prompt[::-1][: sampling.max_tokens]
        done = answer[: self._steps - 1]
        finished = len(done) == len(answer)
        if finished:
            del self._requests[name]
        text = "".join(map(chr, done)) if self.tokenizer else ""
        return RequestOutput(
            request_id=name,
            prompt_token_ids=prompt,
            tokens=list(done),
            count=len(done),
            text=text,
            new_text=text[-1:],
            finish_reason=("abort" if self.error else "length") if finished else None,
            error=self.error if finished else None,
        )

    def rank_reports(self) -> list[dict[str, Any]]:
        return [
            {"rank": r, "plan_digest": "aa" * 16, "capture_digest": "bb" * 16, "more": 1}
            for r in (0, 1)
        ]

    def step_peer(self) -> bool:
        self.calls.append("step_peer")
        self.on_step()
        self.peer_steps -= 1
        return self.peer_steps >= 0

    def close(self, reason: str | None = None) -> None:
        self.calls.append("close" if reason is None else f"close: {reason}")


class Run:
    """One call of `decode.run`, with everything it may look at."""

    def __init__(self) -> None:
        self.engine: FakeEngine | None = None
        self.tokenizer: Letters | None = Letters()
        self.limit = 100
        self.error: str | None = None
        self.on_step: Callable[[], None] = lambda: None

    def __call__(self, *words: str) -> int:
        parser = Parser(prog="decode")
        decode.add_arguments(parser)
        args: argparse.Namespace = parser.parse_args(with_dashes(["--model", "m", *words]))
        with Interrupts() as interrupts:
            return decode.run(args, interrupts, make_engine=self._make)

    def _make(self, config: RuntimeConfig) -> FakeEngine:
        self.engine = FakeEngine(config, tokenizer=self.tokenizer, limit=self.limit)
        self.engine.on_step = self.on_step
        self.engine.error = self.error
        return self.engine


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in TORCHRUN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return Run()


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    def become(rank: int, world_size: int) -> None:
        values = (rank, rank, world_size, world_size, "127.0.0.1", 29400)
        for name, value in zip(TORCHRUN_VARIABLES, values, strict=True):
            monkeypatch.setenv(name, str(value))

    return become


def test_one_prompt_streams_and_then_a_summary(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--prompt", "abc") == 0
    out, err = capsys.readouterr()
    text, facts = out.split("\n\n", 1)
    assert text == ">cba<"
    lines = [line.split() for line in facts.splitlines()]
    assert lines[:3] == [
        ["rank", "plan", "capture"],
        ["0", "aa" * 8, "bb" * 8],
        ["1", "aa" * 8, "bb" * 8],
    ]
    assert lines[3] == ["backend", "backend-for-1-10-10", "(cached)"]
    assert lines[4][:2] == ["tokens", "5"]
    assert err == ""
    assert run.engine is not None
    assert run.engine.calls == ["start", "close"]
    assert run.engine.config.on_failure == "exit"


def test_the_text_is_written_as_it_grows(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []
    run.on_step = lambda: seen.append(capsys.readouterr().out)
    run("--prompt", "ab", "--raw", "--quiet")
    assert seen == ["", "", "b"]
    assert capsys.readouterr().out == "a\n"


def test_several_prompts_are_shown_whole_and_in_order(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--prompt", "abcd", "--prompt", "x y", "--prompt", "z", "--raw", "--quiet")
    assert capsys.readouterr().out == ("[1/3] abcd\ndcba\n\n[2/3] x y\ny x\n\n[3/3] z\nz\n")


def test_a_request_that_the_runtime_gave_up_is_told_and_is_status_1(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run.error = "step 3: no token, the logits hold a NaN"
    file = tmp_path / "out.json"
    assert run("--prompt", "ab", "--prompt", "cd", "--json", str(file)) == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"prompt {i} of 2 was given up: {run.error}" for i in (1, 2)
    ]
    outputs = json.loads(file.read_text(encoding="utf-8"))["outputs"]
    assert [output["error"] for output in outputs] == [run.error] * 2
    assert run.engine is not None
    assert run.engine.calls == ["start", "close"], "the ranks end in good order"


def test_json_has_the_form_of_the_contract(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    args = ["--prompt", "abc", "--prompt", "é", "--raw", "--max_tokens", "2"]
    assert run(*args, "--json", str(file)) == 0
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["outputs"] == [
        {
            "request_id": "0",
            "prompt": "abc",
            "prompt_token_ids": [97, 98, 99],
            "token_ids": [99, 98],
            "text": "cb",
            "finish_reason": "length",
        },
        {
            "request_id": "1",
            "prompt": "é",
            "prompt_token_ids": [233],
            "token_ids": [233],
            "text": "é",
            "finish_reason": "length",
        },
    ]
    assert document["ranks"] == [
        {"rank": r, "plan_digest": "aa" * 16, "capture_digest": "bb" * 16} for r in (0, 1)
    ]
    assert document["timing"]["output_tokens"] == 3
    assert document["timing"]["run_s"] > 0
    assert document["plan"] == {
        "source": "cached",
        "device": "a machine",
        "buckets": [
            {"bucket": 1, "backends": ["first"]},
            {"bucket": 2, "backends": ["first", "second"]},
        ],
    }
    assert document["model"] == "m"
    assert document["versions"]["torch"]
    assert document["settings"]["model"] == {"value": "m", "source": "flag"}
    # what ran, not what was asked for
    assert document["settings"]["max_batch_size"] == {"value": 2, "source": "number of prompts"}
    assert document["settings"]["dtype"] == {"value": "auto", "source": "default"}
    assert "[1/2] abc" in capsys.readouterr().out


def test_json_alone_is_all_of_standard_output(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("--prompt", "abc", "--json")
    assert json.loads(capsys.readouterr().out)["outputs"][0]["text"] == ">cba<"


def test_sampling_flags_reach_the_request(run: Run) -> None:
    sampling = decode.sampling_of(
        _parsed(
            *("--max-tokens", "7", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.9"),
            *("--min-p", "0.1", "--seed", "11", "--stop", "a", "--stop", "b,", "--ignore-eos"),
        )
    )
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (7, 0.5, 3)
    assert (sampling.top_p, sampling.min_p, sampling.seed) == (0.9, 0.1, 11)
    assert (sampling.stop, sampling.ignore_eos) == (("a", "b,"), True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-tokens", "many"), "flag --max-tokens='many': expected a whole number"),
        (("--max-tokens", "0"), "^flag --max-tokens: expected 1 "),
        (("--temperature", "-1"), r"^flag --temperature: expected a number in .*, got -1"),
        (("--top-p", "0"), "^flag --top-p: expected"),
        (("--stop", ""), "^flag --stop: expected non-empty"),
        (("--temperature", "hot"), "flag --temperature='hot': expected a number"),
        (("--kv-block-size", "x"), "flag --kv-block-size"),
        (("--json", "/no/such/folder/out.json"), "folder /no/such/folder does not exist"),
        (("--prompts-file", "x"), "--prompt and --prompts-file"),
        (("--tp-size", "2"), "torchrun"),
    ],
)
def test_bad_flags_are_refused_before_an_engine_is_made(
    run: Run, words: tuple[str, ...], message: str
) -> None:
    with pytest.raises((ConfigError, RequestError), match=message):
        run("--prompt", "a", *words)
    assert run.engine is None


def test_a_model_must_be_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TP_RUNTIME_MODEL", raising=False)
    args = _parsed("--prompt", "a")
    args.model = None
    with Interrupts() as interrupts, pytest.raises(ConfigError, match="no model: expected --model"):
        decode.run(args, interrupts)


def test_a_prompt_that_is_too_long_says_which_one(run: Run) -> None:
    run.limit = 5
    with pytest.raises(RequestError, match=r"prompt 2 of 2: prompt has 9 tokens"):
        run("--prompt", "a", "--prompt", "abcdefg")
    assert run.engine is not None
    assert run.engine.calls[-1] == "close: prompt 2 of 2: prompt has 9 tokens, the model takes 5"


def test_a_model_without_a_tokenizer_takes_and_gives_token_ids(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.tokenizer = None
    run("--prompt", "1, 2 3", "--quiet")
    assert capsys.readouterr().out == "3 2 1\n"
    with pytest.raises(RequestError, match="no tokenizer; expected token ids"):
        run("--prompt", "hello")


def test_prompts_come_from_a_file_and_only_the_newline_is_taken_off(
    run: Run, tmp_path: Path
) -> None:
    file, out = tmp_path / "prompts", tmp_path / "out.json"
    file.write_bytes(b" a \n\tb\r\nc\n")
    run("--prompts-file", str(file), "--json", str(out))
    document = json.loads(out.read_text())
    assert [output["prompt"] for output in document["outputs"]] == [" a ", "\tb\r", "c"]


def test_prompts_come_from_standard_input(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("né\nb".encode())))
    run("--raw", "--quiet")
    assert capsys.readouterr().out == "[1/2] né\nén\n\n[2/2] b\nb\n"


@pytest.mark.parametrize(("data", "message"), [(b"", "got nothing"), (b"\xff\n", "expected UTF-8")])
def test_no_prompt_at_all(
    run: Run, monkeypatch: pytest.MonkeyPatch, data: bytes, message: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    with pytest.raises(ConfigError, match=message):
        run()


def test_a_peer_serves_and_says_nothing(
    run: Run, as_rank: Callable[[int, int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    as_rank(1, 2)
    assert run("--prompt", "a") == 0
    assert run.engine is not None
    assert run.engine.calls == ["start", "step_peer", "close"]
    assert capsys.readouterr() == ("", "")
    run("--prompt", "a", "--verbose-ranks")
    assert capsys.readouterr().out.startswith("rank 1: plan aaaa")


def test_a_peer_does_not_read_standard_input(
    run: Run, as_rank: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_rank(1, 2)
    monkeypatch.setattr("sys.stdin", None)
    assert run() == 0


def test_two_groups_do_not_write_one_file(
    run: Run,
    as_rank: Callable[[int, int], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    as_rank(2, 4)
    run("--tp-size", "2", "--prompt", "a", "--json", str(tmp_path / "out.json"))
    assert [file.name for file in tmp_path.iterdir()] == ["out.json.group1"]
    assert capsys.readouterr().out == ""
    with pytest.raises(ConfigError, match="cannot share standard input"):
        run("--tp-size", "2")


def test_a_signal_between_two_steps_ends_the_run_in_order(run: Run) -> None:
    run.on_step = lambda: signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run("--prompt", "abc")
    assert run.engine is not None
    assert run.engine.calls == ["start", "close"]


def test_a_peer_waits_for_rank_0_when_it_gets_a_signal(
    run: Run, as_rank: Callable[[int, int], None]
) -> None:
    as_rank(1, 2)
    served: list[bool] = []

    def serve() -> None:
        signal.raise_signal(signal.SIGINT)
        served.append(True)

    run.on_step = serve
    with pytest.raises(KeyboardInterrupt):
        run("--prompt", "abc")
    assert served == [True]


def test_a_peer_that_alone_gets_a_signal_ends_and_says_why(
    run: Run, as_rank: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_rank(1, 2)
    monkeypatch.setattr("tp_runtime.launch.interrupts.ALONE_S", 0.0)
    monkeypatch.setattr(FakeEngine, "peer_steps", 10)  # rank 0 goes on
    signals = iter([signal.SIGINT])

    def serve() -> None:
        for number in signals:
            signal.raise_signal(number)

    run.on_step = serve
    with pytest.raises(KeyboardInterrupt):
        run("--prompt", "abc")
    assert run.engine is not None
    assert run.engine.calls == ["start", "step_peer", "close: interrupted", "close"]


def test_a_lost_peer_closes_the_engine_and_goes_on_up(run: Run) -> None:
    def lose() -> None:
        raise PeerLost("rank 1 was killed", rank=1, reason="killed")

    run.on_step = lose
    with pytest.raises(PeerLost):
        run("--prompt", "abc")
    assert run.engine is not None
    assert run.engine.calls == ["start", "close: rank 1 was killed"]


def _parsed(*words: str) -> argparse.Namespace:
    parser = Parser(prog="decode")
    decode.add_arguments(parser)
    return parser.parse_args(list(words))

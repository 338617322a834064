"""The engine of a single rank, in this process: requests, errors, and what ends what."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from tp_runtime import Engine, RuntimeConfig, SamplingParams, TpRuntimeError
from tp_runtime.errors import CaptureError, ConfigError, HarvestError, PeerLost, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tp_runtime.requests import RequestOutput, TextStream

LETTERS = "abcdefghijklmnop"


class Letters:
    """Token n is a letter. Streams that are made while `broken` fail at their third token, those
    made while `stuck` when they are flushed."""

    def __init__(self) -> None:
        self.broken = False
        self.stuck = False

    def encode(self, text: str) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def stream(self) -> TextStream:
        return LetterStream(3 if self.broken else 10**9, stuck=self.stuck)


class LetterStream:
    def __init__(self, most: int, *, stuck: bool) -> None:
        self.left = most
        self.stuck = stuck

    def push(self, token_id: int) -> str:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("the text stream broke")
        return LETTERS[token_id % len(LETTERS)]

    def flush(self) -> str:
        if self.stuck:
            raise RuntimeError("the text stream cannot end")
        return ""


def config(**settings: object) -> RuntimeConfig:
    defaults: dict[str, object] = {
        "model": "random:tiny",
        "device": "cpu",
        "max_batch_size": 4,
        "max_seq_len": 128,
        "kv_block_size": 16,
    }
    return RuntimeConfig(**(defaults | settings))  # type: ignore[arg-type]


@pytest.fixture
def letters() -> Letters:
    return Letters()


@pytest.fixture(params=["async", "replays", "sync"])
def engine(request: pytest.FixtureRequest, letters: Letters) -> Iterator[Engine]:
    """With two steps in flight, as on a CPU and in the order of a GPU with graphs, and with one."""
    with Engine(config(async_decode=request.param != "sync")) as engine:
        root = engine._root_loop()
        # the engine's own tokenizer is that of the model, which has none
        root._tokenizer = lambda: letters
        root._captures = request.param == "replays"
        yield engine


def run(engine: Engine) -> dict[str, RequestOutput]:
    """Step until nothing is left; the last output of each request."""
    last: dict[str, RequestOutput] = {}
    while engine.unfinished:
        for output in engine.step():
            last[output.request_id] = output
    return last


def tokens_of(engine: Engine, prompt: list[int], sampling: SamplingParams) -> tuple[int, ...]:
    name = engine.add_request(prompt, sampling)
    return run(engine)[name].token_ids


GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
HOT = SamplingParams(max_tokens=12, ignore_eos=True, temperature=3.0, seed=5)


def test_a_slot_that_is_used_again_samples_as_its_new_request_asks(engine: Engine) -> None:
    greedy, hot = tokens_of(engine, [1, 2, 3], GREEDY), tokens_of(engine, [1, 2, 3], HOT)
    assert greedy != hot
    assert tokens_of(engine, [1, 2, 3], GREEDY) == greedy
    assert tokens_of(engine, [1, 2, 3], HOT) == hot


def test_a_request_gets_its_tokens_whatever_else_is_in_the_batch(engine: Engine) -> None:
    alone = [tokens_of(engine, [i, i + 1], HOT if i % 2 else GREEDY) for i in range(6)]
    names = [engine.add_request([i, i + 1], HOT if i % 2 else GREEDY) for i in range(6)]
    last = run(engine)
    assert [last[name].token_ids for name in names] == alone


def test_a_text_stream_that_breaks_ends_its_request_and_no_other(
    engine: Engine, letters: Letters
) -> None:
    good = engine.add_request([1, 2], GREEDY)
    letters.broken = True
    bad = engine.add_request([3, 4], GREEDY)
    letters.broken = False
    last: dict[str, RequestOutput] = {}
    errors = []
    while engine.unfinished:
        try:
            outputs = engine.step()
        except HarvestError as error:
            errors.append(str(error))
            continue
        for output in outputs:
            last[output.request_id] = output
    assert len(errors) == 1
    assert "the text stream broke" in errors[0]
    assert f"aborted requests: {bad} (" in errors[0]
    assert (last[bad].finish_reason, len(last[bad].token_ids)) == ("abort", 3)
    assert "the text stream broke" in (last[bad].error or "")
    assert (last[good].finish_reason, len(last[good].token_ids)) == ("length", 12)
    assert tokens_of(engine, [1, 2], GREEDY) == last[good].token_ids, "the engine goes on"


def steps_and_errors(
    engine: Engine, most: int = 50
) -> tuple[dict[str, RequestOutput], list[HarvestError]]:
    """Step until nothing is left; the last output of each request, and what was raised."""
    last: dict[str, RequestOutput] = {}
    errors = []
    for _ in range(most):
        try:
            last.update({output.request_id: output for output in engine.step()})
        except HarvestError as error:
            errors.append(error)
        if not engine.unfinished:
            break
    return last, errors


def test_a_request_ends_although_another_breaks_in_the_step_before(
    engine: Engine, letters: Letters
) -> None:
    letters.broken = True
    bad = engine.add_request([1, 2], GREEDY)
    letters.broken = False
    good = engine.add_request([3, 4], GREEDY)
    _, before = steps_and_errors(engine, most=3)
    engine.abort(bad)
    engine.abort(good)  # nothing is left to run, and the step that broke may not be harvested yet
    last, errors = steps_and_errors(engine)
    assert {last[name].finish_reason for name in (bad, good)} == {"abort"}
    assert [error.request_ids for error in (*before, *errors)] == [(bad,)]
    assert engine.unfinished == 0


def test_an_abort_ends_a_request_whose_text_cannot_end(engine: Engine, letters: Letters) -> None:
    letters.stuck = True
    bad = engine.add_request([1, 2], GREEDY)
    for _ in range(3):
        engine.step()
    engine.abort(bad)
    last, errors = steps_and_errors(engine)
    assert last[bad].finish_reason == "abort"
    assert "cannot end" in (last[bad].error or "")
    assert [error.request_ids for error in errors] == [(bad,)]
    letters.stuck = False
    assert len(tokens_of(engine, [1, 2], GREEDY)) == 12, "the engine goes on"


def test_an_error_of_another_request_does_not_end_an_iterator(
    engine: Engine, letters: Letters
) -> None:
    letters.broken = True
    bad = engine.add_request([3, 4], GREEDY, request_id="other")
    letters.broken = False
    outputs = list(engine.generate([[1, 2]], GREEDY))
    assert (outputs[-1].finish_reason, len(outputs[-1].token_ids)) == ("length", 12)
    last, errors = steps_and_errors(engine)
    assert last[bad].finish_reason == "abort"
    assert [error.request_ids for error in errors] == [(bad,)]


def test_an_iterator_that_ends_on_another_thread_leaves_its_requests_to_the_next_step(
    engine: Engine,
) -> None:
    iterator = engine.generate([[1, 2], [3, 4]], GREEDY)
    next(iterator)
    assert isinstance(iterator, Generator)
    thread = threading.Thread(target=iterator.close)  # as the garbage collector may
    thread.start()
    thread.join()
    mine = engine.add_request([5], GREEDY)
    last = run(engine)
    assert set(last) == {mine}
    assert len(list(engine.generate([[1, 2]], GREEDY))) == 12, "the ids are free again"


def test_the_thread_that_starts_an_engine_owns_it() -> None:
    engine = Engine(config())
    tokens: list[int] = []

    def serve() -> None:
        engine.start()
        tokens.extend(tokens_of(engine, [1, 2], GREEDY))
        engine.close()

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert len(tokens) == 12


def test_a_start_that_failed_is_not_taken_for_one_that_worked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise CaptureError("no memory")

    monkeypatch.setattr("tp_runtime.step_runner.StepRunner.capture", full)
    engine = Engine(config())
    for _ in range(2):
        with pytest.raises(CaptureError, match="no memory"):
            engine.start()
    engine.close()


def test_a_device_that_gives_no_tokens_ends_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add_request([1, 2], GREEDY)
    engine.step()

    def fault(*_: object) -> list[int]:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr("tp_runtime.staging.StagingLease.read", fault)
    with pytest.raises(RuntimeError, match="device-side assert"):
        run(engine)
    with pytest.raises(RuntimeError, match="device-side assert"):
        engine.step()
    engine.close()


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "empty"),
        ([[1], [2]], "flat sequence"),
        ("abc", "flat sequence"),
        ([[1], [2, 3]], "no sequence of token ids"),
        ([1.5], "float64"),
        ([-1], "token id -1 is outside"),
        ([512], "token id 512 is outside of the vocabulary of 512"),
        ([1] * 128, "has 128 tokens; prompt and answer may have 128"),
    ],
)
def test_a_bad_prompt_is_refused_and_nothing_is_queued(
    engine: Engine, prompt: list[int], problem: str
) -> None:
    with pytest.raises(RequestError, match=problem):
        engine.add_request(prompt, GREEDY)
    assert engine.unfinished == 0


def test_an_id_is_used_once_at_a_time(engine: Engine) -> None:
    engine.add_request([1], GREEDY, request_id="mine")
    with pytest.raises(RequestError, match="'mine' is in use"):
        engine.add_request([1], GREEDY, request_id="mine")
    run(engine)
    assert engine.add_request([1], GREEDY, request_id="mine") == "mine"


def test_an_answer_ends_where_the_sequence_may_not_grow(engine: Engine) -> None:
    name = engine.add_request([1] * 120, SamplingParams(max_tokens=50, ignore_eos=True))
    last = run(engine)[name]
    assert (len(last.token_ids), last.finish_reason) == (8, "length")


def test_abort_ends_one_request(engine: Engine) -> None:
    keep, drop = engine.add_request([1, 2], GREEDY), engine.add_request([1, 2], GREEDY)
    for _ in range(4):
        engine.step()
    assert engine.abort(drop)
    last = run(engine)
    assert last[drop].finish_reason == "abort"
    assert 0 < len(last[drop].token_ids) < 12
    assert last[drop].token_ids == last[keep].token_ids[: len(last[drop].token_ids)]
    assert not engine.abort(drop)


def test_leaving_generate_early_aborts_what_is_left(engine: Engine) -> None:
    outputs = engine.generate([[1, 2], [3, 4]], GREEDY)
    next(outputs)
    other = engine.add_request([9], GREEDY)
    outputs.close()  # type: ignore[attr-defined]
    assert engine.unfinished == 1
    assert list(run(engine)) == [other]
    with pytest.raises(RequestError, match="outside of the vocabulary"):
        next(engine.generate([[1], [2**20]], GREEDY))
    again = [output for output in engine.generate([[1, 2], [3, 4]], GREEDY) if output.finished]
    assert sorted(output.request_id for output in again) == ["0", "1"]


def bound_steps(engine: Engine, most: int) -> None:
    """Fail instead of stepping for ever."""
    root = engine._root_loop()
    step, left = root.step, iter(range(most))

    def counted(*words: Any, **named: Any) -> list[RequestOutput]:
        assert next(left, None) is not None, f"still stepping after {most} steps"
        return step(*words, **named)

    root.step = counted  # type: ignore[method-assign]


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_an_iterator_may_be_left_when_several_requests_end_in_one_step(
    engine: Engine, max_tokens: int
) -> None:
    bound_steps(engine, 60)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for _ in range(2):
        for output in engine.generate([[1, 2], [3, 4], [5, 6]], sampling):
            if output.finished:
                break
        assert engine.unfinished == 0


@pytest.mark.parametrize("ending", ["next", "close"])
def test_an_iterator_ends_although_the_host_took_its_outputs(engine: Engine, ending: str) -> None:
    bound_steps(engine, 60)
    outputs: Any = engine.generate([[1, 2], [3, 4]], GREEDY)
    next(outputs)
    last = run(engine)
    assert {name: output.finish_reason for name, output in last.items()} == {
        "0": "length",
        "1": "length",
    }
    reused = engine.add_request([5, 6], GREEDY, request_id="0")
    if ending == "next":
        assert not any(output.finished for output in outputs)
    else:
        outputs.close()
    assert run(engine)[reused].finish_reason == "length"


def test_an_error_is_raised_by_the_iterator_that_it_concerns_and_by_no_later_one(
    engine: Engine, letters: Letters
) -> None:
    letters.broken = True
    with pytest.raises(HarvestError, match="the text stream broke"):
        list(engine.generate([[1, 2], [3, 4]], GREEDY))
    letters.broken = False
    for _ in range(2):
        ends = [output for output in engine.generate([[1, 2], [3, 4]], GREEDY) if output.finished]
        assert [output.finish_reason for output in ends] == ["length", "length"]


def test_an_error_that_nobody_asked_for_ends_with_its_requests(
    engine: Engine, letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound_steps(engine, 120)
    streams = iter([LetterStream(99, stuck=False), LetterStream(99, stuck=True)])
    monkeypatch.setattr(letters, "stream", lambda: next(streams))
    short = SamplingParams(max_tokens=1, ignore_eos=True)
    outputs: Any = engine.generate([[1, 2], [3, 4]], [short, GREEDY])
    while next(outputs).request_id != "0":
        pass
    thread = threading.Thread(target=outputs.close)  # its abort of "1" will fail
    thread.start()
    thread.join()
    monkeypatch.undo()
    for prompts in ([[1, 2]], [[1, 2], [3, 4]]):  # the second has a "1" of its own
        ends = [output for output in engine.generate(prompts, GREEDY) if output.finished]
        assert [output.finish_reason for output in ends] == ["length"] * len(prompts)


def test_one_text_is_not_taken_for_many_prompts(engine: Engine) -> None:
    with pytest.raises(RequestError, match="expected a list of prompts, got one str"):
        next(engine.generate("abc", GREEDY))


def test_generate_wants_one_sampling_for_each_prompt(engine: Engine) -> None:
    with pytest.raises(RequestError, match="2 prompts, but 1 sampling parameters"):
        next(engine.generate([[1], [2]], [GREEDY]))


def test_an_engine_belongs_to_one_thread(engine: Engine) -> None:
    caught: list[BaseException] = []

    def elsewhere() -> None:
        try:
            engine.step()
        except TpRuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "belongs to the thread that started it" in str(caught[0])


def test_a_batch_beyond_the_largest_bucket_runs_eagerly_and_is_counted() -> None:
    with Engine(config(decode_buckets=(1, 2))) as engine:
        names = [engine.add_request([i + 1], GREEDY) for i in range(4)]
        last = run(engine)
        statistics = engine.statistics()
        assert statistics.graph_misses == {"batch beyond the largest bucket": 11}
        assert statistics.runner.eager_decode_steps == 11
        assert [last[name].token_ids for name in names] == [
            tokens_of(engine, [i + 1], GREEDY) for i in range(4)
        ]
        assert engine.statistics().runner.graph_steps == 4 * 11


def test_a_pinned_backend_is_used_and_a_disabled_one_is_not() -> None:
    with Engine(config(decode_backend="cpu_padded")) as engine:
        assert engine.plan[4] == ("cpu_padded",)
        assert "pinned" in engine.refusals["cpu_grouped"]
    with Engine(config(disable_decode_backend=("cpu_grouped",))) as engine:
        assert engine.plan[4] == ("cpu_rowwise",)
        assert engine.plan_digest is None
    with pytest.raises(ConfigError, match="nosuch"), Engine(config(decode_backend="nosuch")):
        pass


def test_what_is_not_started_or_closed_says_so() -> None:
    engine = Engine(config())
    with pytest.raises(TpRuntimeError, match="call start"):
        engine.step()
    engine.start()
    engine.start()
    engine.trigger_capture()
    digest = engine.capture_digest
    assert digest is not None
    with pytest.raises(TpRuntimeError, match="rank 0 plans the steps"):
        engine.step_peer()
    with pytest.raises(RequestError, match="no tokenizer"):
        next(engine.generate(["text"], GREEDY))
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        engine.add_request([1], SamplingParams(stop=("x",)))
    engine.close()
    engine.close()
    with pytest.raises(TpRuntimeError, match="make a new one"):
        engine.start()
    with pytest.raises(TpRuntimeError, match="closed"):
        engine.step()


def test_no_model_is_an_error_at_once() -> None:
    with pytest.raises(ConfigError, match="no model"):
        Engine(RuntimeConfig())
    with pytest.raises(ConfigError, match="expected a RuntimeConfig, got NoneType"):
        Engine(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", [{"kv_cache_tokens": 2**52}, {"kv_cache_tokens": 2**62}])
def test_a_cache_that_no_memory_holds_is_an_error_with_its_size(setting: dict[str, int]) -> None:
    values: dict[str, Any] = {"decode_buckets": (1,), "kv_cache_tokens": 1024, **setting}
    config = RuntimeConfig(model="random:tiny", device="cpu", **values)
    with pytest.raises(ConfigError, match=r"no memory on cpu for a KV cache of .* blocks"):
        Engine(config).start()


def test_tokens_of_a_device_that_lost_a_peer_are_never_given(engine: Engine) -> None:
    def lost() -> None:
        raise PeerLost("TP rank 1 is gone", rank=1, reason="its process has ended")

    engine.add_request([1, 2], GREEDY)
    engine.step()
    engine._root_loop()._check = lost
    outputs: list[RequestOutput] = []

    def steps() -> None:
        for _ in range(4):
            outputs.extend(engine.step())

    with pytest.raises(PeerLost, match="TP rank 1 is gone"):
        steps()
    assert sum(len(output.token_ids) for output in outputs) <= 1
    with pytest.raises(PeerLost):
        engine.step()

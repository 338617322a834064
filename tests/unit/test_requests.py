from __future__ import annotations

from tp_runtime.requests import OutputStream


class Letters:
    """Token n is the n-th letter; a token of 100 is held back until the next one."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, token_id: int) -> str:
        if token_id == 100:
            self.held += "~"
            return ""
        text, self.held = self.held + chr(ord("a") + token_id), ""
        return text

    def flush(self) -> str:
        text, self.held = self.held, ""
        return text


def stream(
    *, stop: tuple[str, ...] = (), eos: tuple[int, ...] = (), max_new_tokens: int = 10
) -> OutputStream:
    return OutputStream(
        request_id="r",
        prompt_token_ids=[1, 2],
        max_new_tokens=max_new_tokens,
        eos_token_ids=eos,
        stop=stop,
        text_stream=Letters(),
    )


def test_length() -> None:
    s = stream(max_new_tokens=2)
    first = s.push(0)
    assert (first.text, first.new_text, first.finished) == ("a", "a", False)
    last = s.push(1)
    assert (last.text, last.new_text, last.finish_reason) == ("ab", "b", "length")
    assert last.token_ids == (0, 1)
    assert last.prompt_token_ids == (1, 2)


def test_eos_is_among_the_tokens_but_not_in_the_text() -> None:
    s = stream(eos=(4,))
    s.push(0)
    last = s.push(4)
    assert (last.text, last.token_ids, last.finish_reason) == ("a", (0, 4), "eos")


def test_text_ends_before_a_stop_string_that_spans_tokens() -> None:
    s = stream(stop=("bcd", "zz"))
    new = [s.push(token).new_text for token in (0, 1, 2)]
    assert "".join(new) == "a", "b and c may be the begin of a stop string"
    last = s.push(3)
    assert (last.text, last.finish_reason) == ("a", "stop")
    assert "".join(new) + last.new_text == "a"


def test_held_back_text_comes_out_when_it_is_no_stop_string() -> None:
    s = stream(stop=("bcd",), max_new_tokens=3)
    new = "".join(s.push(token).new_text for token in (1, 2, 4))
    assert new == "bce"


def test_the_tail_of_the_detokeniser_is_flushed_at_the_end() -> None:
    s = stream(max_new_tokens=2)
    s.push(0)
    assert s.push(100).text == "a~"


def test_a_stop_string_in_the_flushed_tail_counts() -> None:
    s = stream(max_new_tokens=2, stop=("~",))
    s.push(0)
    last = s.push(100)
    assert (last.text, last.finish_reason) == ("a", "stop")


def test_abort_keeps_what_there_is() -> None:
    s = stream()
    s.push(0)
    last = s.abort()
    assert (last.text, last.finish_reason, last.finished, last.error) == ("a", "abort", True, None)

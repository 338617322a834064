"""The snippets of docs/api.md that need more than one process."""

from __future__ import annotations

from tests.docs import MEASURES, ONE_OR_TWO, TWO, snippets
from tp_runtime.testing import run_ranks


def run_all() -> list[str]:
    return [snippet.run() for snippet in snippets(ONE_OR_TWO, TWO)]


def test_snippets_of_two_ranks() -> None:
    root, peer = run_ranks(run_all, 2, 120)
    loop, own_group, tensors = root
    assert "0 length 8" in loop
    assert "1 abort" in loop
    assert "[3.0, 3.0, 3.0]" in own_group
    assert tensors == "[0, 1, 2] True\n"
    assert peer == ["", "", tensors]


def test_selection_alone() -> None:
    (snippet,) = snippets(MEASURES)
    snippet.run()

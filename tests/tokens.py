"""What "the same tokens" means, for every test that compares streams."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

GOLDEN = Path(__file__).parent / "golden" / "smollm2_greedy.json"
TIE = 1e-3
"""A correct float32 engine moves logits by about 1e-4 when shapes change; closer than this the
order of two logits says nothing."""
TIES_PER_TOKEN = 1 / 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A reference stream with the margin of its two best logits at every step."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    margins: list[float]


def golden() -> list[Reference]:
    data: dict[str, Any] = json.loads(GOLDEN.read_text())
    return [
        Reference(
            prompt_token_ids=stream["prompt_token_ids"],
            token_ids=stream["token_ids"],
            margins=stream["margins"],
        )
        for stream in data["streams"]
    ]


def count_ties(got: Sequence[Sequence[int]], references: Sequence[Reference]) -> int:
    """How many streams part from their reference at a near tie.

    Raises:
        AssertionError: a stream has another length, parts elsewhere, or ties are too many.
    """
    assert len(got) == len(references)
    ties = tokens = 0
    for i, (stream, reference) in enumerate(zip(got, references, strict=True)):
        assert len(stream) == len(reference.token_ids), f"stream {i} has {len(stream)} tokens"
        tokens += len(stream)
        for at, (mine, theirs) in enumerate(zip(stream, reference.token_ids, strict=True)):
            if mine != theirs:
                margin = reference.margins[at]
                assert margin < TIE, (
                    f"stream {i} parts at token {at}: {mine} instead of {theirs}, where the best "
                    f"two logits are {margin} apart"
                )
                ties += 1
                break
    assert ties <= max(1, tokens * TIES_PER_TOKEN), f"{ties} ties in {tokens} tokens"
    return ties

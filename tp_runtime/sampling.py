"""What a request asks of the sampler, validated once, before anything is queued."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from tp_runtime.errors import RequestError

MAX_TEMPERATURE: Final = 1e4
"""Above this the noise swallows float32 logits and every token is equally likely anyway."""

SEED_LIMIT: Final = 2**63
"""Seeds lie in [0, 2**63): they travel and are hashed as non-negative int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn and when it stops.

    Args:
        max_tokens: most tokens to generate, at least 1.
        temperature: 0 is greedy (the lowest token id among equal best logits); else logits are
            divided by it. At most 1e4.
        top_k: keep the k best tokens; 0 keeps all.
        top_p: of what top_k kept, keep the smallest set of best tokens whose probability reaches
            top_p; in (0, 1], 1 keeps all.
        min_p: drop tokens less likely than min_p times the best one; in [0, 1], 0 keeps all.
        seed: of this request's random numbers, in [0, 2**63); None lets the engine choose one.
        stop: generation ends before the first of these strings appears in the text.
        ignore_eos: go on after an end-of-sequence token.

    Raises:
        RequestError: a value is of the wrong type or out of range; the message names the field.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, low=1, high=SEED_LIMIT - 1)
        _check_float("temperature", self.temperature, low=0.0, high=MAX_TEMPERATURE)
        _check_int("top_k", self.top_k, low=0, high=SEED_LIMIT - 1)
        _check_float("top_p", self.top_p, low=0.0, high=1.0)
        if self.top_p == 0.0:
            raise RequestError(
                "top_p: expected a number in (0, 1], got 0; for greedy set temperature=0"
            )
        _check_float("min_p", self.min_p, low=0.0, high=1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, low=0, high=SEED_LIMIT - 1)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos: expected a bool, got {self.ignore_eos!r}")
        object.__setattr__(self, "stop", _stop_strings(self.stop))

    @property
    def greedy(self) -> bool:
        """The best token is taken and no random number is drawn."""
        return self.temperature == 0.0

    @property
    def filters(self) -> bool:
        """top_k, top_p or min_p can change what is drawn (they never change a greedy token)."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


def _check_int(name: str, value: object, *, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name}: expected an int, got {value!r}")
    if not low <= value <= high:
        raise RequestError(f"{name}: expected {low} .. {high}, got {value}")


def _check_float(name: str, value: object, *, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name}: expected a number, got {value!r}")
    if not (math.isfinite(value) and low <= value <= high):
        raise RequestError(f"{name}: expected a number in [{low:g}, {high:g}], got {value}")


def _stop_strings(stop: object) -> tuple[str, ...]:
    if isinstance(stop, str) or not isinstance(stop, (tuple, list)):
        raise RequestError(f"stop: expected a tuple of strings, got {stop!r}")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise RequestError(f"stop: expected non-empty strings, got {text!r}")
    return tuple(stop)

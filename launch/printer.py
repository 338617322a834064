"""Text for a person as it comes: one prompt as it grows, several whole and in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tp_runtime.launch.output import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tp_runtime.requests import RequestOutput


class Printer:
    """Shows outputs on standard output.

    Args:
        prompts: in order; more than one are shown with their answers.
        enabled: False shows nothing.
    """

    def __init__(self, prompts: Sequence[str], *, enabled: bool = True) -> None:
        self._prompts = prompts
        self._enabled = enabled
        self._waiting: dict[int, RequestOutput] = {}
        self._next = 0

    def show(self, index: int, output: RequestOutput) -> None:
        """Take the next output of prompt `index`."""
        if not self._enabled:
            return
        if len(self._prompts) == 1:
            text = output.new_text if output.text else _ids(output) if output.finished else ""
            say(text, end="\n" if output.finished else "")
            return
        if output.finished:
            self._waiting[index] = output
        while self._next in self._waiting:
            done = self._waiting.pop(self._next)
            if self._next:
                say()
            say(f"[{self._next + 1}/{len(self._prompts)}] {_one_line(self._prompts[self._next])}")
            say(done.text or _ids(done))
            self._next += 1


def _ids(output: RequestOutput) -> str:
    """What there is to show of a model without a tokenizer."""
    return " ".join(map(str, output.token_ids))


def _one_line(text: str, limit: int = 72) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."

"""Where the prompts come from: flags, a file with one a line, or standard input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tp_runtime.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import BinaryIO, Protocol

    class Encoder(Protocol):
        """The part of a tokenizer that is used here."""

        def encode(self, text: str) -> list[int]: ...
        def chat(self, user_text: str) -> list[int]: ...


_MOST_BYTES = 1 << 30


def given_prompts(flags: Sequence[str] | None, file: str | None) -> tuple[str, ...] | None:
    """What the command line says; None = standard input. Every rank may call it.

    Raises:
        ConfigError: both were given, or the file cannot be read or holds no line.
    """
    if flags and file is not None:
        raise ConfigError("flags --prompt and --prompts-file: expected one of them, got both")
    if flags:
        return tuple(flags)
    if file is None or file == "-":
        return None
    try:
        with Path(file).open("rb") as stream:
            data = _bounded(stream, source=f"flag --prompts-file: {file}")
    except OSError as error:
        raise ConfigError(
            f"flag --prompts-file: {file} cannot be read: {error.strerror or error}"
        ) from error
    return split_lines(data, source=f"flag --prompts-file: {file}")


def read_stdin(stream: BinaryIO | None = None) -> tuple[str, ...]:
    """One prompt a line from standard input, which must not be a terminal.

    Raises:
        ConfigError: it is a terminal, is no UTF-8, or holds no line.
    """
    source = stream if stream is not None else sys.stdin.buffer
    if source.isatty():
        raise ConfigError(
            "no prompt: expected --prompt TEXT, --prompts-file FILE, or one prompt a line on "
            "standard input"
        )
    return split_lines(_bounded(source, source="standard input"), source="standard input")


def _bounded(stream: BinaryIO, *, source: str) -> bytes:
    """All of a file, a pipe or a device, of which some have no end."""
    data = stream.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{source}: expected at most {_MOST_BYTES} bytes of prompts, got more")
    return data


def split_lines(data: bytes, *, source: str) -> tuple[str, ...]:
    """One prompt a line. Only the newline is taken off: blanks at either end are the prompt's."""
    try:
        text = data.decode("utf-8-sig")  # some editors begin a file with a mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: expected UTF-8 text: {error}") from error
    lines = text.removesuffix("\n").split("\n") if text else []
    if not lines:
        raise ConfigError(f"{source}: expected one prompt a line, got nothing")
    return tuple(lines)


def encode_prompt(prompt: str, tokenizer: Encoder | None, *, raw: bool) -> list[int]:
    """Token ids of a prompt.

    Args:
        tokenizer: None for a model that has none: the prompt must then be token ids.
        raw: no chat template.

    Raises:
        RequestError: the prompt is no valid Unicode, or the model has no tokenizer and it is not a
            list of token ids.
    """
    if tokenizer is None:
        try:
            return [int(word) for word in prompt.replace(",", " ").split()]
        except ValueError:
            raise RequestError(
                f"prompt {prompt!r}: this model has no tokenizer; expected token ids such as "
                "'1 15 7'"
            ) from None
    return tokenizer.encode(prompt) if raw else tokenizer.chat(prompt)

"""Text to token ids and back, the chat template, and text that grows token by token."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

from tp_runtime.errors import ModelError, ModelFormatError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """The tokenizer that belongs to a model.

    Args:
        backend: a transformers tokenizer (the few methods used here are all it needs).
        eos_token_ids: ids at which generation ends; the backend's own is added.
    """

    def __init__(self, backend: Any, *, eos_token_ids: Sequence[int] = ()) -> None:
        self._backend = backend
        own = backend.eos_token_id
        ids = [*eos_token_ids, *([own] if isinstance(own, int) else [])]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ids))

    @property
    def has_chat_template(self) -> bool:
        return bool(self._backend.chat_template)

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text, with what the model puts first by default."""
        return list(self._backend.encode(text))

    def chat(self, user_text: str) -> list[int]:
        """Ids of one user message in the chat template, ready for the answer.

        A model without a template gets the plain text.
        """
        if not self.has_chat_template:
            return self.encode(user_text)
        messages = [{"role": "user", "content": user_text}]
        ids = self._backend.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return list(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids without special tokens; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._backend.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def is_byte(self, token_id: int) -> bool:
        """Whether an id is a byte-fallback token such as <0xE2>, whose text depends on the next."""
        token = self._backend.convert_ids_to_tokens(token_id)
        return isinstance(token, str) and _BYTE_TOKEN.fullmatch(token) is not None

    def stream(self) -> TextStream:
        """A new stream for one sequence."""
        return TextStream(self)


class TextStream:
    """Text of a sequence as it grows. What was given out is never taken back.

    All pushed text and the flush together equal `Tokenizer.decode` of all ids. Decoding starts at
    the tokens before the last complete text, since some decoders treat a first token differently;
    an unfinished UTF-8 character at the end (shown as U+FFFD) waits for its other bytes.
    """

    __slots__ = ("_emitted", "_ids", "_tokenizer", "_window")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # ids whose text is complete: context for what follows
        self._ids: list[int] = []  # the window, then ids whose text may still change
        self._emitted = 0  # characters of decode(_ids) that were given out

    def push(self, token_id: int) -> str:
        """Add one id; the text that is certain now, often "" inside a character."""
        self._ids.append(token_id)
        if self._tokenizer.is_byte(token_id):
            return ""
        text = self._tokenizer.decode(self._ids)
        stable = text.rstrip(_REPLACEMENT)
        new = stable[self._emitted :]
        if len(stable) == len(text):
            if new:
                # the window moves on: keep only the newest complete text as context
                self._ids = self._ids[len(self._window) :]
                self._window = list(self._ids)
                self._emitted = len(self._tokenizer.decode(self._ids))
        else:
            self._emitted += len(new)
        return new

    def flush(self) -> str:
        """The rest, when no more ids will come; an unfinished character becomes U+FFFD."""
        text = self._tokenizer.decode(self._ids)
        new = text[self._emitted :]
        self._emitted = len(text)
        return new


def load_tokenizer(path: Path, *, eos_token_ids: Sequence[int] = ()) -> Tokenizer:
    """Build the tokenizer of a GGUF file or a Hugging Face folder. Never uses the network.

    Raises:
        ModelError: transformers is not installed.
        ModelFormatError: the files hold no tokenizer that can be read.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelError(
            "tokenizers need the transformers package: pip install 'tp-runtime[models]'"
        ) from error
    try:
        if path.is_file():
            backend = AutoTokenizer.from_pretrained(
                str(path.parent), gguf_file=path.name, local_files_only=True
            )
        else:
            backend = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelFormatError(f"{path}: no tokenizer can be read from it: {error}") from error
    return Tokenizer(backend, eos_token_ids=eos_token_ids)

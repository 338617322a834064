"""Text of a sequence as it grows, token by token. What was given out is never taken back.

All pushed text and the flush together equal the tokenizer's `decode` of all ids.
"""

from __future__ import annotations

import codecs
import re
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class ByteStream:
    """For byte-level vocabularies, where a token's bytes do not depend on its neighbours.

    Args:
        part_of: the text of a token, "" for special ones, or its bytes where they are not whole
            characters.
    """

    __slots__ = ("_decoder", "_part_of", "_within")

    def __init__(self, part_of: Callable[[int], str | bytes]) -> None:
        self._part_of = part_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._within = False  # bytes of an unfinished character are waiting

    def push(self, token_id: int) -> str:
        part = self._part_of(token_id)
        if isinstance(part, str):
            if not self._within:
                return part
            part = part.encode()
        text = self._decoder.decode(part)
        self._within = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowStream:
    """For any other decoder: decodes a window of ids again as it grows.

    Decoding starts at the tokens before the last complete text, since some decoders treat a first
    token differently; an unfinished UTF-8 character at the end (shown as U+FFFD) waits for its
    other bytes.

    Args:
        decode: ids to text, without special tokens.
        token_of: the vocabulary's own text of an id.
    """

    __slots__ = ("_decode", "_emitted", "_ids", "_token_of", "_window")

    def __init__(
        self, decode: Callable[[Sequence[int]], str], token_of: Callable[[int], object]
    ) -> None:
        self._decode = decode
        self._token_of = token_of
        self._window: list[int] = []  # ids whose text is complete: context for what follows
        self._ids: list[int] = []  # the window, then ids whose text may still change
        self._emitted = 0  # characters of decode(_ids) that were given out

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        token = self._token_of(token_id)
        if isinstance(token, str) and _BYTE_TOKEN.fullmatch(token):
            return ""  # such as <0xE2>: its text depends on the next
        text = self._decode(self._ids)
        stable = text.rstrip(_REPLACEMENT)
        new = stable[self._emitted :]
        if len(stable) == len(text):
            if new:
                # the window moves on: keep only the newest complete text as context
                self._ids = self._ids[len(self._window) :]
                self._window = list(self._ids)
                self._emitted = len(self._decode(self._ids))
        else:
            self._emitted += len(new)
        return new

    def flush(self) -> str:
        text = self._decode(self._ids)
        new = text[self._emitted :]
        self._emitted = len(text)
        return new


def byte_level_parts(backend: Any) -> Callable[[int], str | bytes] | None:
    """What `ByteStream` needs of a byte-level tokenizer; None when it decodes in another way.

    Byte-level vocabularies (GPT-2's, Radford et al. 2019) write every byte as one printable
    character; what is not printable is shifted to the code points from 256 on.

    Args:
        backend: a transformers tokenizer.
    """
    fast = getattr(backend, "backend_tokenizer", None)
    if fast is None or type(fast.decoder).__name__ != "ByteLevel":
        return None
    byte_of = _bytes_of_characters()
    added = backend.added_tokens_decoder
    special = {i for i, token in added.items() if token.special} | set(backend.all_special_ids)

    @cache
    def part_of(token_id: int) -> str | bytes:
        if token_id in special:
            return ""
        token = backend.convert_ids_to_tokens(token_id)
        if token is None:
            return ""
        if token_id in added or not all(character in byte_of for character in token):
            return str(token)
        part = bytes(byte_of[character] for character in token)
        try:
            return part.decode()
        except UnicodeDecodeError:
            return part

    return part_of


@cache
def _bytes_of_characters() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(shifted)
    }

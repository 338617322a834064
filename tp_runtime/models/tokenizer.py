"""Text to token ids and back, the chat template, and text that grows token by token."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tp_runtime.caches import cache_directory
from tp_runtime.errors import ModelError, ModelFormatError, RequestError
from tp_runtime.models.text_stream import ByteStream, WindowStream, byte_level_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tp_runtime.requests import TextStream

log = logging.getLogger(__name__)

_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt",
)  # fmt: skip
"""A folder of transformers with a tokenizer holds one of these at least."""


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
        self._part_of = byte_level_parts(backend)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._backend.chat_template)

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text, with what the model puts first by default.

        Raises: RequestError: the text is no valid Unicode.
        """
        _check_unicode(text)
        return list(self._backend.encode(text))

    def chat(self, user_text: str) -> list[int]:
        """Ids of one user message in the chat template, ready for the answer.

        A model without a template gets the plain text.

        Raises: RequestError: the text is no valid Unicode.
        """
        if not self.has_chat_template:
            return self.encode(user_text)
        _check_unicode(user_text)
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

    def stream(self) -> TextStream:
        """A new stream for one sequence; its text equals `decode` of all its ids."""
        if self._part_of is not None:
            return ByteStream(self._part_of)
        return WindowStream(self.decode, self._backend.convert_ids_to_tokens)


def has_tokenizer(path: Path) -> bool:
    """Whether a model comes with a tokenizer; that of a GGUF file is inside."""
    return path.is_file() or any((path / name).exists() for name in _FILES)


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        # bytes of a command line that are no UTF-8 arrive as lone surrogates
        raise RequestError(
            f"not valid Unicode: expected text in UTF-8, got {text[error.start]!a} at character "
            f"{error.start}"
        ) from error


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
            backend = _gguf_tokenizer(path)
        else:
            backend = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:
        # transformers and what it uses have many kinds, some of them Exception itself
        raise ModelFormatError(f"{path}: no tokenizer can be read from it: {error}") from error
    return Tokenizer(backend, eos_token_ids=eos_token_ids)


def _gguf_tokenizer(path: Path) -> Any:
    """The tokenizer inside a GGUF file. Reading it takes 10 s, so the result is kept as files."""
    import transformers

    stat = path.stat()
    identity = (str(path.resolve()), stat.st_size, stat.st_mtime_ns, transformers.__version__)
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=12).hexdigest()
    kept = cache_directory() / "tokenizers" / digest
    if (kept / "tokenizer_config.json").is_file():
        try:
            return transformers.AutoTokenizer.from_pretrained(str(kept), local_files_only=True)
        except Exception as error:  # noqa: BLE001 - as in load_tokenizer
            log.warning("%s: a kept tokenizer cannot be read, made again: %s", kept, error)
            shutil.rmtree(kept, ignore_errors=True)
    backend = transformers.AutoTokenizer.from_pretrained(
        str(path.parent), gguf_file=path.name, local_files_only=True
    )
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as partial:
            backend.save_pretrained(partial)
            os.rename(partial, kept)
            Path(partial).mkdir()  # for the end of the with block to remove
    except OSError as error:
        log.info("the tokenizer of %s is not kept for the next start: %s", path, error)
    return backend

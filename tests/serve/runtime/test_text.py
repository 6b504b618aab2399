"""Incremental detokenization against `Tokenizer.decode` of all ids at once."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from lathe.data.tokenizer import continuation
from lathe_base.errors import UserError
from lathe_serving.runtime.text import TextStream, TokenBytes
from tests.support.tokenizers import metaspace_tokenizer

TEXT = "naïve café — 你好, Привет 🙂👩‍🚀 end\n\ttab"


def test_characters_come_whole(byte_tokenizer: Tokenizer) -> None:
    stream = TextStream(TokenBytes(byte_tokenizer))
    chunks = [stream.add(token) for token in byte_tokenizer.encode(TEXT).ids]
    assert len(chunks) == len(TEXT.encode())
    assert "".join(chunks) == TEXT
    assert all(len(chunk) <= 1 for chunk in chunks)


def test_invalid_bytes_read_as_the_tokenizer_reads_them(byte_tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        tokens = [*rng.integers(0, 257, 30).tolist(), *byte_tokenizer.encode("end").ids]
        stream = TextStream(TokenBytes(byte_tokenizer))
        assert "".join(map(stream.add, tokens)) == byte_tokenizer.decode(tokens)


def test_an_unfinished_character_is_left_out(byte_tokenizer: Tokenizer) -> None:
    stream = TextStream(TokenBytes(byte_tokenizer))
    assert "".join(map(stream.add, byte_tokenizer.encode("ok 🙂").ids[:-1])) == "ok "


def test_ids_beyond_the_tokenizer_and_special_ones_are_silent(byte_tokenizer: Tokenizer) -> None:
    stream = TextStream(TokenBytes(byte_tokenizer))
    assert [stream.add(token) for token in (256, 300)] == ["", ""]


def test_pieces_of_sentencepiece_read_as_the_tokenizer_reads_them() -> None:
    tokenizer = metaspace_tokenizer()
    token_bytes = TokenBytes(tokenizer)
    for text in ("a lo é", "lo", "  a", "é🙂 lo a"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert token_bytes.echo(ids) == tokenizer.decode(ids)
        stream, before = (
            TextStream(token_bytes),
            tokenizer.encode("a", add_special_tokens=False).ids,
        )
        assert "".join(map(stream.add, ids)) == continuation(tokenizer, before, ids)
    ends = [tokenizer.token_to_id(token) for token in ("<s>", "</s>")]
    assert [token_bytes[i] for i in ends] == [b"", b""]


def test_another_kind_of_tokenizer_is_refused() -> None:
    with pytest.raises(UserError, match=r"'▁the' is not byte-level"):
        TokenBytes(Tokenizer(models.WordLevel({"▁the": 0}, "▁the")))

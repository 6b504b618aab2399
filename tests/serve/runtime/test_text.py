"""Incremental detokenization against `Tokenizer.decode` of all ids at once."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from lathe.data.tokenizer import continuation
from lathe_base.errors import Code
from lathe_serving.runtime.text import TextStream, TokenBytes
from tests.support.errors import raises
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


@pytest.mark.parametrize(
    ("text", "stop", "emitted"),
    [
        ("one<|im_end|>two", "<|im_end|>", "one"),
        ("one<|im_end|>\ntwo", "<|im_end|>\n", "one"),
        ("one\n<|im_end|>two", "\n<|im_end|>", "one"),
        ("one<|im_end|>two", "<|im_start|>", "onetwo"),
        ("one<|im_end|>two", "<|im_end|>\n", "onetwo"),
        ("one\n<|im_start|>two", "\n<|im_end|>", "one\ntwo"),
        ("one<|im_end|>two", "et", "on"),  # in the text that the client gets
        ("one<|im_start|><|im_end|>two", "t|><|im_end|>", "one"),
        ("one<|im_end|>two", "end", "one"),
    ],
)
def test_stop_strings_match_special_tokens(
    byte_tokenizer: Tokenizer, text: str, stop: str, emitted: str
) -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer.to_str())
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    stream, received = TextStream(TokenBytes(tokenizer), [stop]), ""
    for token in tokenizer.encode(text).ids:
        assert not stream.stopped
        received += stream.add(token)
        assert emitted.startswith(received)
        if stream.stopped:
            break
    assert received + stream.rest() == emitted
    assert stream.stopped == (emitted not in ("onetwo", "one\ntwo"))


def test_stop_strings_end_a_text_where_they_begin(byte_tokenizer: Tokenizer) -> None:
    """Against a search in the whole text, of random texts and stop strings of few letters."""
    rng = np.random.default_rng(0)
    token_bytes = TokenBytes(byte_tokenizer)
    for _ in range(300):
        text, *stops = ("".join(rng.choice([*"ab"], n)) for n in (30, *rng.integers(3, 9, 2)))
        stream, received = TextStream(token_bytes, stops), ""
        for token in byte_tokenizer.encode(text).ids:
            if not stream.stopped:
                received += stream.add(token)
        found = [at for stop in stops if (at := text.find(stop)) >= 0]
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        # The one that is complete first ends the text; of several, the one that begins first.
        expected = (
            min(at for at, end in zip(found, ends, strict=True) if end == min(ends))
            if found
            else 30
        )
        assert received + stream.rest() == text[:expected]


def test_pieces_of_sentencepiece_read_as_the_tokenizer_reads_them() -> None:
    tokenizer = metaspace_tokenizer()
    token_bytes = TokenBytes(tokenizer)
    for text in ("a lo é", "lo", "  a", "é🙂 lo a"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert "".join(token_bytes.echo(ids)) == tokenizer.decode(ids)
        stream, before = (
            TextStream(token_bytes),
            tokenizer.encode("a", add_special_tokens=False).ids,
        )
        assert "".join(map(stream.add, ids)) == continuation(tokenizer, before, ids)
    ends = [tokenizer.token_to_id(token) for token in ("<s>", "</s>")]
    assert [token_bytes[i] for i in ends] == [b"", b""]


def test_another_kind_of_tokenizer_is_refused() -> None:
    with raises(Code.UNSUPPORTED, "'▁the'"):
        TokenBytes(Tokenizer(models.WordLevel({"▁the": 0}, "▁the")))

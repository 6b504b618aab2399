"""Tokenization of prompts, and the tokens that tokenizers prepend."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from lathe.data.tokenize import encoded
from lathe.data.tokenizer import load_tokenizer
from lathe_base.config.settings import PrepareSettings
from lathe_serving.runtime.text import (
    DENSE,
    TokenBytes,
    TokenLimit,
    TooManyTokens,
    bos_ids,
    encode_pairs,
    encode_prompts,
)
from tests.conftest import SHARED
from tests.support.tokenizers import metaspace_tokenizer

TEXTS = ["lo a", "a", "", "</s>lo"]


@pytest.mark.parametrize("puts_bos", [False, True])
def test_prompts_are_encoded_as_by_transformers(puts_bos: bool) -> None:
    tokenizer = metaspace_tokenizer(puts_bos)
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert encode_prompts(tokenizer, TEXTS) == theirs(TEXTS).input_ids
    assert bos_ids(tokenizer) == ([1] if puts_bos else [])


def test_gpt2_puts_nothing_before_a_text(shared: Path) -> None:
    assert bos_ids(load_tokenizer(shared / "gpt2")) == []


def test_a_text_that_begins_with_it_gets_it_once() -> None:
    tokenizer = metaspace_tokenizer(puts_bos=True)
    twice, once = encode_prompts(tokenizer, ["<s>lo", "lo"])
    assert [token for token in twice if token == 1] == [1]
    assert once[0] == 1


def test_a_continuation_is_encoded_with_its_text() -> None:
    tokenizer = metaspace_tokenizer(puts_bos=True)
    texts = ["a", "alo"]
    ((before, after),) = encode_pairs(tokenizer, [("a", "lo")])
    assert [before, [*before, *after]] == encode_prompts(tokenizer, texts)
    assert tokenizer.decode([*before, *after]) == "alo"
    assert after != tokenizer.encode("lo", add_special_tokens=False).ids, (
        "the second word must not be encoded as the start of a text"
    )


def test_documents_begin_with_it() -> None:
    (batch,) = encoded(["lo", "a"], metaspace_tokenizer(puts_bos=True), PrepareSettings())
    first, second = np.split(batch.ids, batch.sizes.cumsum()[:-1])
    assert [first[0], first[-1], second[0], second[-1]] == [1, 2, 1, 2]


def test_a_prompt_is_echoed_as_it_was_sent() -> None:
    tokenizer = metaspace_tokenizer(puts_bos=True)
    (ids,) = encode_prompts(tokenizer, ["lo a"])
    assert "".join(TokenBytes(tokenizer).echo(ids)) == "lo a"


@pytest.fixture(scope="module")
def gpt2() -> tuple[Tokenizer, int]:
    """GPT-2's tokenizer, and the bytes of its longest token."""
    if not SHARED.is_dir():
        pytest.skip(f"no development data in {SHARED}")
    tokenizer = load_tokenizer(SHARED / "gpt2")
    return tokenizer, TokenBytes(tokenizer).longest


def test_encoding_stops_when_the_context_is_full(gpt2: tuple[Tokenizer, int]) -> None:
    tokenizer, longest = gpt2
    encoded: list[int] = []

    def encode(text: str) -> list[int]:
        encoded.append(len(text))
        return encode_prompts(tokenizer, [text])[0]

    for long in ("word " * 50_000, "word" * 50_000, "🙂" * 50_000, " " * 2**20):
        encoded.clear()
        with pytest.raises(TooManyTokens):
            TokenLimit(1000, longest).encode(encode, ["a", long])
        assert sum(encoded) <= 1 + 2 * DENSE * 1000


@pytest.mark.parametrize("unit", ["word ", "word", " ", "🙂", "\n\n", "aA1 "])
def test_a_text_within_the_limit_is_encoded_whole(gpt2: tuple[Tokenizer, int], unit: str) -> None:
    tokenizer, longest = gpt2

    def encode(text: str) -> list[int]:
        return encode_prompts(tokenizer, [text])[0]

    for count in (1, 100, 10_000):
        ids = encode(unit * count)
        assert TokenLimit(len(ids), longest).encode(encode, [unit * count]) == ids
        with pytest.raises(TooManyTokens):
            TokenLimit(len(ids) - 1, longest).encode(encode, [unit * count])

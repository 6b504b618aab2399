"""fastokens gives the same ids as tokenizers, or is not used."""

import logging
from collections.abc import Callable
from itertools import chain, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Sequence

from lathe.data import fast_tokenizer
from lathe.data.fast_tokenizer import HOSTILE, Encoder, TokenBatch
from lathe.data.tokenizer import train_tokenizer
from lathe_base.errors import Code, StageError
from tests.support.errors import raises

TEXTS = [*HOSTILE, "don't count 123 456 of the other things, they're all here", "the the the 11 12"]


def bytes_level(digits: bool) -> Tokenizer:
    found = Tokenizer(models.BPE())
    split = [Digits(individual_digits=True)] if digits else []
    found.pre_tokenizer = Sequence([*split, ByteLevel(add_prefix_space=False)])
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(30 * TEXTS, trainer)
    found.add_tokens([AddedToken("<think>", normalized=False)])
    return found


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "trained by prepare": lambda: train_tokenizer(iter(30 * TEXTS), 300),
    "GPT-2's splitting": lambda: bytes_level(digits=False),
    "SmolLM2's splitting": lambda: bytes_level(digits=True),
}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_ids_are_those_of_tokenizers(name: str, special: bool) -> None:
    tokenizer = TOKENIZERS[name]()
    encode = Encoder(tokenizer, special)
    assert encode._fast is not None
    texts = [a + b for a, b in product(TEXTS, TEXTS)]
    expected = [x.ids for x in tokenizer.encode_batch(texts, add_special_tokens=False)]
    found = encode(texts)
    assert found.ids.tolist() == list(chain(*expected))
    assert found.sizes.tolist() == list(map(len, expected))
    assert (tokenizer.token_to_id("<|endoftext|>") in found.ids) == special


SMALL = bytes_level(digits=False)
ENCODERS = [Encoder(SMALL, False), Encoder(bytes_level(digits=True), False)]
MIXED = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("  \n12\u00bd'stre.a")))


@settings(max_examples=300, deadline=None)
@given(st.lists(MIXED, min_size=1, max_size=4))
def test_any_text(texts: list[str]) -> None:
    for encode in ENCODERS:
        expected = [x.ids for x in encode.tokenizer.encode_batch(texts, add_special_tokens=False)]
        assert encode(texts).ids.tolist() == list(chain(*expected))


def test_a_tokenizer_that_fastokens_lacks_is_encoded_by_tokenizers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = Tokenizer(models.Unigram([("a", -1.0), ("b", -2.0), ("\u2581", -3.0)], 0))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = Metaspace()
    with caplog.at_level(logging.INFO, "lathe"):
        encode = Encoder(tokenizer, True)
    assert encode._fast is None and "slower library" in caplog.text
    assert encode(["ab B"]).ids.tolist() == tokenizer.encode("ab B").ids
    assert Encoder(SMALL, True, is_fast=False)._fast is None


def test_other_ids_are_found_before_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Encoder(SMALL, False)
    right = fast_tokenizer._encode

    def wrong(*given: Any) -> TokenBatch:
        found = right(*given)
        return found._replace(ids=found.ids + 1)

    monkeypatch.setattr(fast_tokenizer, "_encode", wrong)
    assert Encoder(SMALL, False)._fast is None
    with raises(Code.MISMATCH, "Prepare.fast_tokenizer=false", kind=StageError):
        encode(["a text", "another"])

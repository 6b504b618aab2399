import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from lathe.data.tokenizer import EOS, eos_id, load_tokenizer, train_tokenizer, vocab_size
from lathe.errors import UserError

TEXTS = [
    "Hello world",
    "  leading, trailing  \n\n\ttabs and  blank   runs",
    "I'll we've don't 12345 3.14 #!?",
    "na\u00efve \u00fc\u00f1\u00ef \u4f60\u597d \U0001f600\u200d\U0001f525",
    f"one{EOS}two",
    "",
]


def test_gpt2_equals_transformers(shared: Path) -> None:
    from transformers import GPT2TokenizerFast

    theirs = GPT2TokenizerFast(
        vocab=str(shared / "gpt2/vocab.json"), merges=str(shared / "gpt2/merges.txt")
    )
    ours = load_tokenizer(shared / "gpt2")
    assert (vocab_size(ours), eos_id(ours)) == (50257, 50256)
    novel = (shared / "wikitext/wiki.test.raw").read_text()[:200_000]
    for text in [*TEXTS, novel]:
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text)
    assert ours.encode("Hello world").ids == [15496, 995]  # as OpenAI's encoder.py gives


@pytest.mark.parametrize("name", ["gpt2", "gpt2/vocab.json", "gpt2/merges.txt"])
def test_gpt2_is_named_by_folder_or_file(shared: Path, name: str) -> None:
    text = (shared / "wikitext/wiki.test.raw").read_text()[:50_000]
    tokenizer = load_tokenizer(shared / name)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.fixture(scope="module")
def trained(prose: list[str]) -> Tokenizer:
    return train_tokenizer(prose[:20], 600)


def test_trained_has_the_size_and_eos(trained: Tokenizer) -> None:
    assert vocab_size(trained) == 600
    assert eos_id(trained) == 0
    assert trained.encode(EOS).ids == [0]
    plain, one = trained.encode("argument").ids, trained.encode(" the").ids
    assert len(plain) < len("argument") and len(one) == 1


@given(text=st.text())
def test_trained_decodes_what_it_encodes(trained: Tokenizer, text: str) -> None:
    ids = trained.encode(text, add_special_tokens=False).ids
    assert trained.decode(ids, skip_special_tokens=False) == text


def test_training_is_deterministic_whatever_the_threads() -> None:
    code = (
        "from lathe.data.embedded import python_documents\n"
        "from lathe.data.tokenizer import train_tokenizer\n"
        "texts = list(python_documents())[:60]\n"
        "print(train_tokenizer(texts, 1200).to_str())"
    )
    one, two = (
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
            capture_output=True,
            check=True,
        ).stdout
        for threads in ("1", "3")
    )
    assert len(one) > 20_000
    assert one == two


def test_saved_tokenizer_loads_again(trained: Tokenizer, tmp_path: Path) -> None:
    trained.enable_truncation(4)
    trained.save(str(tmp_path / "tokenizer.json"))
    trained.no_truncation()
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert loaded.encode(TEXTS[2]).ids == trained.encode(TEXTS[2]).ids


def test_bad_tokenizers(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "tokenizer.json"):
        with pytest.raises(UserError, match="no tokenizer there"):
            load_tokenizer(path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(UserError, match="no tokenizer there"):
        load_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_text("a b")
    with pytest.raises(UserError, match="not a tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"has no token <\|endoftext\|>"):
        load_tokenizer(tmp_path)

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models
from transformers import GPT2Tokenizer

from lathe.data.tokenizer import (
    EOS,
    OTHER_ENDS,
    continuation,
    end_token,
    eos_id,
    load_tokenizer,
    train_tokenizer,
    vocab_size,
)
from lathe_base.errors import Code, StageError
from tests.support.errors import raises
from tests.support.tokenizers import metaspace_tokenizer

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
    assert ours.encode("Hello world").ids == [15496, 995]  # from OpenAI's encoder.py


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


def test_training_is_deterministic_whatever_the_threads(prose: list[str]) -> None:
    code = (
        "import json, sys\n"
        "from lathe.data.tokenizer import train_tokenizer\n"
        "print(train_tokenizer(json.load(sys.stdin), 1200).to_str())"
    )
    one, two = (
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
            input=json.dumps(prose[:60]).encode(),
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
        with raises(Code.NOT_FOUND, path):
            load_tokenizer(path)
    (tmp_path / "vocab.json").write_text("{}")
    with raises(Code.NOT_FOUND, tmp_path):
        load_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_text("a b")
    with raises(Code.MALFORMED, tmp_path):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with raises(Code.MALFORMED, "tokenizer.json"):
        load_tokenizer(tmp_path)
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    with raises(Code.INCOMPLETE, EOS):
        load_tokenizer(tmp_path)


def test_a_tokenizer_of_sentencepiece_ends_documents_in_its_own_way(tmp_path: Path) -> None:
    metaspace_tokenizer().save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert end_token(loaded) == "</s>" and eos_id(loaded) == 2
    before, after = (loaded.encode(t, add_special_tokens=False).ids for t in ("a lo", "a lo aé"))
    assert after[: len(before)] == before
    assert continuation(loaded, before, after[len(before) :]) == " aé"
    assert loaded.decode(after[len(before) :]) == "aé"  # alone it would lose the space


@pytest.mark.parametrize("name", OTHER_ENDS)
def test_the_end_is_what_the_tokenizer_calls_it(name: str, tmp_path: Path) -> None:
    made = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    made.add_special_tokens(["<pad>", name])
    made.save(str(tmp_path / "tokenizer.json"))
    assert end_token(load_tokenizer(tmp_path)) == name


def test_an_end_that_is_ordinary_text_is_none(tmp_path: Path) -> None:
    Tokenizer(models.BPE(vocab={"</s>": 0, "a": 1}, merges=[])).save(
        str(tmp_path / "tokenizer.json")
    )
    with raises(Code.INCOMPLETE, EOS):
        load_tokenizer(tmp_path)


def bpe(vocab: object = None, **changes: object) -> str:
    """Content of a tokenizer.json with two tokens and some parts replaced."""
    model = {"type": "BPE", "vocab": vocab or {EOS: 0, "a": 1}, "merges": []}
    parts = {"version": "1.0", "added_tokens": [], "model": model}
    return json.dumps(parts | changes)


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "absent", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("", Code.MALFORMED, "EOF"),
        ("[]", Code.MALFORMED, ""),
        ("null", Code.MALFORMED, ""),
        ("3", Code.MALFORMED, ""),
        ('{"a": 1}', Code.MALFORMED, ""),
        ("[" * 100_000, Code.MALFORMED, ""),
        ('{"version": "1.0", "model": ' + "[" * 100_000, Code.MALFORMED, ""),
        ("\ud800", Code.MALFORMED, ""),
        (bpe({"a": 0}), Code.INCOMPLETE, EOS),
        (bpe({EOS: -1}), Code.MALFORMED, "invalid value"),
        (bpe({EOS: 1 << 33}), Code.MALFORMED, "invalid value"),
        (bpe({EOS: 0, "a": (1 << 31) + 5}), Code.MALFORMED, "2,147,483,653"),
        (bpe({EOS: 0, "a": 1 << 30}), Code.MALFORMED, "1,073,741,824"),
        (bpe({EOS: 0, "a": 0}), Code.DUPLICATE, f"'a' has the id of {EOS}, 0"),
        (
            bpe(normalizer={"type": "Replace", "pattern": {"Regex": "("}, "content": ""}),
            Code.MALFORMED,
            "Onig",
        ),
        (bpe(post_processor={"type": "None"}), Code.MALFORMED, ""),
    ],
    ids=lambda value: str(value).encode("ascii", "replace")[:40],
)
def test_an_unusable_tokenizer_file(tmp_path: Path, text: str, code: Code, says: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with raises(code, tmp_path, says) as raised:
        load_tokenizer(tmp_path)
    assert len(str(raised.value).splitlines()) == 2  # what, and a hint


@pytest.mark.parametrize(
    ("vocab", "merges"),
    [
        ("[", ""),
        ("[]", "a b"),
        ("null", ""),
        ("[" * 100_000, ""),
        (json.dumps({EOS: 0.5}), ""),
        (json.dumps({EOS: True}), ""),
        (json.dumps({EOS: -1}), ""),
        (json.dumps({EOS: 1 << 32}), ""),  # would wrap to 0
        (json.dumps({EOS: 0, "a": 1, "b": 2}), "a"),
        (json.dumps({EOS: 0, "a": 1, "b": 2}), "a b c"),
        (json.dumps({EOS: 0, "a": 1}), "x y"),
        (json.dumps({EOS: 0, "a": 1}), "\0\xff"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_pair_of_files_without_a_tokenizer(tmp_path: Path, vocab: str, merges: str) -> None:
    (tmp_path / "vocab.json").write_text(vocab)
    (tmp_path / "merges.txt").write_text(merges, encoding="latin-1")
    with raises(Code.MALFORMED, tmp_path) as raised:
        load_tokenizer(tmp_path)
    assert len(str(raised.value).splitlines()) == 2


def test_a_panic_in_rust_is_one_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A panic derives from BaseException and prints its stack."""
    (tmp_path / "tokenizer.json").write_text(bpe(post_processor=TEMPLATE))
    load_tokenizer(tmp_path)  # harmless: special tokens are never added

    def panic(path: str) -> Tokenizer:
        Tokenizer.from_str(bpe(post_processor=TEMPLATE)).encode("a")
        raise AssertionError("no panic")

    monkeypatch.setattr("lathe.data.tokenizer.Tokenizer", SimpleNamespace(from_file=panic))
    with raises(Code.MALFORMED, "no entry found for key"):
        load_tokenizer(tmp_path)
    assert capfd.readouterr().err == ""


def test_a_tokenizer_that_must_not_be_read_is_not_called_broken(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to("/proc/self/mem")
    with raises(Code.IO, "tokenizer.json", "Input/output error", kind=StageError) as raised:
        load_tokenizer(tmp_path)
    assert "intact" not in str(raised.value)


@pytest.mark.parametrize("prefix_space", [False, True])
@pytest.mark.parametrize("described", [False, True])
def test_a_pair_with_added_tokens_reads_as_transformers_does(
    prefix_space: bool, described: bool, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    byte_tokenizer.save(str(tmp_path / "tokenizer.json"))
    theirs = GPT2Tokenizer.from_pretrained(tmp_path, add_prefix_space=prefix_space)
    theirs.add_tokens(
        [AddedToken("<call>", rstrip=described), AddedToken("<|im_end|>", special=True)]
    )
    model = json.loads(byte_tokenizer.to_str())["model"]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "added_tokens.json").write_text(json.dumps(theirs.get_added_vocab()))
    settings: dict[str, Any] = {"add_prefix_space": prefix_space}
    if described:
        settings["added_tokens_decoder"] = {
            i: {"content": str(token), "rstrip": token.rstrip, "special": token.special}
            for i, token in theirs.added_tokens_decoder.items()
        }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = load_tokenizer(tmp_path)
    for text in ("Once <call> upon<|im_end|>a time", "<call>  x", " <|im_end|>"):
        assert ours.encode(text).ids == theirs.encode(text), text


def test_an_added_token_with_another_id_is_refused(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    vocabulary = json.loads(byte_tokenizer.to_str())["model"]["vocab"]
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "added_tokens.json").write_text('{"<call>": 300}')
    with raises(Code.MALFORMED, "<call>", "257", "300"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["", "gpt2-vocab.json", "gpt2-merges.txt"])
def test_gpt2_is_read_under_the_names_of_its_download(
    name: str, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    model = json.loads(byte_tokenizer.to_str())["model"]
    (tmp_path / "gpt2-vocab.json").write_text(json.dumps(model["vocab"]))
    with raises(Code.NOT_FOUND, tmp_path / name):
        load_tokenizer(tmp_path / name)
    (tmp_path / "gpt2-merges.txt").write_text("#version: 0.2\n")
    assert load_tokenizer(tmp_path / name).get_vocab() == byte_tokenizer.get_vocab()

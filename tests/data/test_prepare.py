"""The stage prepare on real text: outputs, reruns and rejected inputs."""

import json
import logging
import lzma
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from lathe.data.prepare import prepare
from lathe.data.samples import Samples
from lathe.data.tokenizer import load_tokenizer
from lathe.data.tokens import TokenDataset
from lathe.model.folder import training_data
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code
from lathe_base.storage import sha256
from lathe_base.storage.ownership import ATTESTATIONS
from tests.support.errors import raises


def recipe(split: str = "6,2,2", max_seq_len: int = 32, **changes: object) -> Recipe:
    return Recipe.model_validate(
        {
            "Prepare": {"vocab_size": 400, **changes},
            "Data": {"Train": {"dataset": {"split": split, "max_seq_len": max_seq_len}}},
        }
    )


@pytest.fixture
def texts(prose: list[str]) -> list[str]:
    return prose[:30]


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> str:
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": f"\n{text}  "}) + "\n" for text in texts))
    return str(file)


@pytest.mark.parametrize("format", ["megatron", "paddle"])
def test_writes_all_documents(tmp_path: Path, corpus: str, texts: list[str], format: str) -> None:
    done = prepare(recipe(format=format), tmp_path / "out", corpus)
    data, tokenizer = TokenDataset.open(done.folder), load_tokenizer(done.folder)
    assert done.boundaries == (0, 18, 24, 30)
    assert (done.documents, done.vocab_size, done.reused) == (30, 400, False)
    assert len(data) == 30 and data.sizes.sum() == done.tokens
    for row, text in zip(data, texts, strict=True):
        assert row[-1] == data.eos_id and data.eos_id not in row[:-1]
        assert tokenizer.decode(row[:-1].tolist()) == text.strip()
    held_out = (done.folder / "heldout.txt").read_text()
    assert held_out == "".join(f"{text.strip()}\n\n" for text in texts[24:])
    lines = (done.folder / "cloze.jsonl").read_text().splitlines()
    assert len(lines) == done.cloze_examples > 5
    words = " ".join(held_out.split())
    assert all(json.loads(line)["text"] in words for line in lines)
    assert len(Samples(data, range(18), 32, 10, 1234)) >= 10


def test_metadata_has_counts_and_digests(tmp_path: Path, corpus: str) -> None:
    done = prepare(recipe(), tmp_path / "out", corpus)
    metadata = json.loads((done.folder / "data.json").read_text())
    files = {p.name for p in done.folder.iterdir()}
    assert files == {"data.json", ATTESTATIONS, *metadata["files"]}
    for name, file in metadata["files"].items():
        assert file["sha256"] == sha256(done.folder / name)
        assert file["bytes"] == (done.folder / name).stat().st_size
    assert metadata["source"] == corpus and metadata["format"] == "megatron"
    assert sum(metadata["part_tokens"]) == metadata["tokens"] == done.tokens
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_training_sees_only_the_training_part(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    rows = ["alpha beta gamma " * 40] * 8 + ["zyzzyva quokka " * 40] * 2
    file.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    done = prepare(recipe("8,1,1"), tmp_path / "out", str(file))
    tokenizer = load_tokenizer(done.folder)
    assert len(tokenizer.encode("alpha beta").ids) == 2
    assert len(tokenizer.encode("quokka").ids) == 6


def test_same_text_and_settings_are_kept(
    tmp_path: Path, corpus: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lathe")
    out = tmp_path / "out"
    first = prepare(recipe(), out, corpus)
    stamp = (out / "tokens.bin").stat().st_mtime_ns

    packed = tmp_path / "other.jsonl.xz"
    packed.write_bytes(lzma.compress(Path(corpus).read_bytes()))
    again = prepare(recipe(max_seq_len=64), out, str(packed))
    assert again.reused and again.tokens == first.tokens
    assert (out / "tokens.bin").stat().st_mtime_ns == stamp
    assert "already prepared from the same text and settings" in caplog.text

    assert not prepare(recipe(vocab_size=420), out, corpus).reused
    with Path(corpus).open("a") as file:
        file.write('{"text": "One more."}\n')
    assert not prepare(recipe(vocab_size=420), out, corpus).reused
    (out / "tokens.bin").write_bytes(b"")
    with raises(Code.EXISTS, out, "tokens.bin"):
        prepare(recipe(vocab_size=420), out, corpus)


def test_same_bytes_every_time(tmp_path: Path, corpus: str) -> None:
    digests = []
    for name in ("a", "b"):
        folder = prepare(recipe(), tmp_path / name, corpus).folder
        digests.append({p.name: sha256(p) for p in folder.iterdir() if p.name != ATTESTATIONS})
    assert digests[0] == digests[1]


def test_given_tokenizer(tmp_path: Path, corpus: str, byte_tokenizer: Tokenizer) -> None:
    byte_tokenizer.save(str(tmp_path / "tokenizer.json"))
    done = prepare(recipe(), tmp_path / "out", corpus, str(tmp_path / "tokenizer.json"))
    assert (done.vocab_size, TokenDataset.open(done.folder).eos_id) == (257, 256)
    assert prepare(recipe(), tmp_path / "out", corpus, str(tmp_path)).reused


@pytest.mark.slow
def test_gpt2_on_wikitext(tmp_path: Path, shared: Path) -> None:
    source = shared / "wikitext/wiki.test.raw"
    done = prepare(recipe("90,5,5"), tmp_path / "out", str(source), str(shared / "gpt2"))
    assert (done.vocab_size, TokenDataset.open(done.folder).eos_id) == (50257, 50256)
    assert done.cloze_examples > 10


@pytest.mark.parametrize(
    ("content", "changes", "code", "texts"),
    [
        (None, {}, Code.NOT_FOUND, ["corpus.jsonl"]),
        ("", {}, Code.TOO_LITTLE_DATA, ["corpus.jsonl"]),
        ('{"text": "a"}\n{', {}, Code.MALFORMED, ["corpus.jsonl:2: not JSON"]),
        (
            '{"text": "a b c"}\n',
            {},
            Code.TOO_LITTLE_DATA,
            ["training part: 1 documents with 4 tokens", "max_seq_len 32"],
        ),
        (
            '{"text": "a"}\n' * 90,
            {"split": "0,1,0"},
            Code.TOO_LITTLE_DATA,
            ["training part: 0 documents with 0 tokens"],
        ),
        (None, {"tokenizer": "nowhere"}, Code.NOT_FOUND, ["nowhere"]),
    ],
)
def test_errors_leave_nothing(
    tmp_path: Path, content: str | None, changes: dict[str, str], code: Code, texts: list[str]
) -> None:
    file = tmp_path / "corpus.jsonl"
    if content is not None:
        file.write_text(content)
    with raises(code, *texts):
        prepare(recipe(**changes), tmp_path / "out", str(file))  # type: ignore[arg-type]
    assert [p for p in tmp_path.iterdir() if p != file] == []


def test_reuse_still_checks_the_sequence_length(tmp_path: Path, corpus: str) -> None:
    prepare(recipe(), tmp_path / "out", corpus)
    with raises(Code.TOO_LITTLE_DATA, "max_seq_len 1,000,000"):
        prepare(recipe(max_seq_len=1_000_000), tmp_path / "out", corpus)
    assert TokenDataset.open(tmp_path / "out")


def test_small_parts_are_reported(
    tmp_path: Path, corpus: str, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(recipe("999,1,0"), tmp_path / "out", corpus)
    assert "30 training, 0 validation, 0 test" in caplog.text
    assert "cloze.jsonl is empty" in caplog.text
    assert (tmp_path / "out/heldout.txt").read_text() == ""


@pytest.mark.parametrize(
    ("split", "characters", "expected"),
    [
        ("75,5,20", 20_000, (15, 16, 20)),
        ("949,50,1", 260_000, (949, 999, 1000)),
        ("949,50,1", 20_000, (19, 20, 20)),  # too short for a test part
    ],
)
def test_one_large_document_is_cut_into_all_parts(
    tmp_path: Path,
    prose: list[str],
    caplog: pytest.LogCaptureFixture,
    split: str,
    characters: int,
    expected: tuple[int, ...],
) -> None:
    text = " ".join(prose)[:characters].strip()
    file = tmp_path / "corpus.jsonl"
    file.write_text(json.dumps({"text": text}) + "\n")
    done = prepare(recipe(split), tmp_path / "out", str(file))
    assert done.boundaries == (0, *expected)
    assert f"cut 1 large document(s) into {expected[-1]} pieces" in caplog.text
    data, tokenizer = TokenDataset.open(done.folder), load_tokenizer(done.folder)
    pieces = [tokenizer.decode(row[:-1].tolist()) for row in data]
    assert "".join("".join(pieces).split()) == "".join(text.split())
    words = [word for piece in pieces for word in piece.split()]
    assert words == text.split()  # words are not split
    assert max(map(len, pieces)) < 1.6 * characters / len(pieces)


def test_a_document_without_a_break_is_cut_too(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text(json.dumps({"text": "ab" * 10_000}) + "\n")
    byte_tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = recipe(keep_heldout_apart=False)  # all pieces are copies
    done = prepare(settings, tmp_path / "out", str(file), str(tmp_path))
    assert done.boundaries == (0, 3, 4, 5)


@pytest.mark.parametrize("special", [False, True])
def test_names_of_special_tokens_in_a_document_are_text_by_default(
    tmp_path: Path, texts: list[str], caplog: pytest.LogCaptureFixture, special: bool
) -> None:
    file, written = tmp_path / "corpus.jsonl", "It ends with <|endoftext|> in GPT-2."
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in [written, *texts]))
    settings = recipe(special_tokens_in_text=special)
    done = prepare(settings, tmp_path / "out", str(file))
    data, tokenizer = TokenDataset.open(done.folder), load_tokenizer(done.folder)
    row = next(iter(data)).tolist()
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert row[:-1] == reference.encode(written, split_special_tokens=not special)
    assert row.count(data.eos_id) == 1 + special
    assert ("set Prepare.special_tokens_in_text=true" in caplog.text) != special
    assert tokenizer.decode(row[:-1], skip_special_tokens=False) == written
    assert not prepare(
        recipe(special_tokens_in_text=not special), tmp_path / "out", str(file)
    ).reused


def test_does_not_replace_a_folder_of_something_else(tmp_path: Path, corpus: str) -> None:
    with raises(Code.CONFLICTING_OPTIONS, tmp_path, corpus):
        prepare(recipe(), tmp_path, corpus)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    with raises(Code.EXISTS, tmp_path / "mine", "thesis.txt"):
        prepare(recipe(), tmp_path / "mine", corpus)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "all of it"
    (tmp_path / "empty").mkdir()
    assert prepare(recipe(), tmp_path / "empty", corpus).documents == 30


def test_long_held_out_documents_give_equal_shares(tmp_path: Path, corpus: str) -> None:
    whole = prepare(recipe(), tmp_path / "whole", corpus).folder / "heldout.txt"
    cut = prepare(recipe(heldout_characters=1200), tmp_path / "cut", corpus).folder / "heldout.txt"
    assert len(cut.read_text()) <= 1200 + 2 * 20 < len(whole.read_text())
    assert all(part in whole.read_text() for part in cut.read_text().split("\n\n"))


def test_the_licence_of_the_corpus_is_kept(tmp_path: Path, corpus: str) -> None:
    done = prepare(recipe(), tmp_path / "out", corpus)
    assert "license" not in TokenDataset.open(done.folder).metadata
    stated = prepare(recipe(license="CC-BY-4.0"), tmp_path / "out", corpus)
    assert not stated.reused
    data = TokenDataset.open(done.folder)
    assert data.metadata["license"] == "CC-BY-4.0"
    assert training_data(data).corpora[0].license == "CC-BY-4.0"
    assert prepare(recipe(license="CC-BY-4.0"), tmp_path / "out", corpus).reused

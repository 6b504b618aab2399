"""Documents split into sentences: the files, the parts of the split, and the splitter itself."""

import json
import logging
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import sentencex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from lathe.data.corpus_tokenizer import make_tokenizer
from lathe.data.join import join
from lathe.data.prepare import prepare
from lathe.data.samples import Samples
from lathe.data.sentences import MAX_WINDOW, WINDOW, SentenceSplitter
from lathe.data.sources import Shard
from lathe.data.tokenize import encoded, tokenize
from lathe.data.tokenizer import load_tokenizer
from lathe.data.tokens import TokenDataset
from lathe_base.config.settings import PrepareSettings, Recipe
from lathe_base.errors import Code
from lathe_base.storage import sha256
from lathe_base.storage.ownership import ATTESTATIONS
from tests.data.test_samples import reference
from tests.support.errors import raises
from tests.support.tokenizers import metaspace_tokenizer


def recipe(**changes: object) -> Recipe:
    return Recipe.model_validate(
        {
            "Prepare": {
                "vocab_size": 400,
                "cloze_examples": 20,
                "split_sentences": True,
                **changes,
            },
            "Data": {"Train": {"dataset": {"split": "6,2,2", "max_seq_len": 32}}},
        }
    )


def write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture(scope="session")
def texts(prose: list[str]) -> list[str]:
    """100 documents of some sentences, two of them with one."""
    return ["It has one sentence", *(text[:900].strip() for text in prose[:98]), "So has this."]


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> str:
    return write(tmp_path / "corpus.jsonl", texts)


class Files(NamedTuple):
    """What a pair of Megatron's files contains."""

    tokens: np.ndarray
    sizes: np.ndarray
    pointers: np.ndarray
    doc_idx: np.ndarray

    @property
    def documents(self) -> list[list[list[int]]]:
        """The tokens of each sequence of each document."""
        width = self.tokens.itemsize
        rows = [
            self.tokens[at // width : at // width + size].tolist()
            for at, size in zip(self.pointers, self.sizes, strict=True)
        ]
        return [
            rows[begin:end] for begin, end in zip(self.doc_idx[:-1], self.doc_idx[1:], strict=True)
        ]


def read(folder: Path) -> Files:
    """Read the files with numpy, as the format is described, and without Lathe's reader."""
    index = (folder / "tokens.idx").read_bytes()
    magic, version, code, n, d = struct.unpack_from("<9sQBQQ", index)
    assert (magic, version, code) == (b"MMIDIDX\0\0", 1, 8)
    assert len(index) == 34 + 12 * n + 8 * d
    return Files(
        np.fromfile(folder / "tokens.bin", "<u2"),
        np.frombuffer(index, "<i4", n, 34),
        np.frombuffer(index, "<i8", n, 34 + 4 * n),
        np.frombuffer(index, "<i8", d, 34 + 12 * n),
    )


def digests(folder: Path) -> dict[str, str]:
    return {p.name: sha256(p) for p in folder.iterdir() if p.name != ATTESTATIONS}


@pytest.mark.parametrize(
    ("language", "sentences"),
    [
        ("en", ["Dr. Smith came at 5 p.m. yesterday.", " He left!", "\n\nWhy?", ' "No. Yes."']),
        ("de", ["Am 3. Mai kam Hr. Abt, d. h. er.", " Nun ja.", " Gut?"]),
        ("fr", ["Le plan B\u00a0. Et puis\u00a0?", "\u2028Rien."]),
        ("ja", ["これは文です。", "次の文です。"]),
    ],
)
def test_sentences_are_those_of_the_language(language: str, sentences: list[str]) -> None:
    assert SentenceSplitter(language)("".join(sentences)) == sentences


@settings(deadline=None)
@given(
    text=st.text(
        st.one_of(st.sampled_from(' .!?\n\r\t"()A\u00a0\u2028\u3000…。'), st.characters()),
        min_size=1,
        max_size=300,
    ),
    language=st.sampled_from(["en", "fr", "hi", "zh", "xx"]),
)
def test_nothing_is_lost(text: str, language: str) -> None:
    if text := text.encode(errors="ignore").decode().strip():
        sentences = SentenceSplitter(language)(text)
        assert "".join(sentences) == text
        assert all(sentence.strip() for sentence in sentences)


def test_long_texts_are_split_like_short_ones() -> None:
    split = SentenceSplitter("en")
    sentences = [f" Sentence {i} has a number." for i in range(20_000)]
    sentences[0] = sentences[0].strip()
    assert split("".join(sentences)) == sentences
    long = "word " * (3 * WINDOW // 5) + "ends."
    assert split(f"{long} It goes on.") == [long, " It goes on."]
    pieces = split("word " * MAX_WINDOW + "ends. Another one.")
    assert [len(piece) for piece in pieces[:5]] == [MAX_WINDOW] * 5
    assert pieces[5:] == ["ends.", " Another one."]


def test_a_text_that_breaks_the_splitter_is_one_sentence(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        pass

    def fail(error: BaseException) -> Callable[..., list[str]]:
        def segment(*_: str) -> list[str]:
            raise error

        return segment

    monkeypatch.setattr(sentencex, "segment", fail(PanicException("not a char boundary")))
    assert SentenceSplitter("en")("One. Two.") == ["One. Two."]
    assert "not split into sentences: 'One. Two.'...: not a char boundary" in caplog.text
    monkeypatch.setattr(sentencex, "segment", fail(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        SentenceSplitter("en")("One. Two.")


def test_every_sentence_is_a_sequence(tmp_path: Path, corpus: str, texts: list[str]) -> None:
    done = prepare(recipe(), tmp_path / "out", corpus)
    files, tokenizer = read(done.folder), load_tokenizer(done.folder)
    documents, split = files.documents, SentenceSplitter("en")
    assert done.documents == len(documents) == len(texts)
    assert done.boundaries == (0, 60, 80, 100)
    assert len(documents[0]) == len(documents[-1]) == 1
    assert len(files.sizes) > 3 * len(texts)
    assert files.doc_idx[0] == 0 and files.doc_idx[-1] == len(files.sizes)
    assert files.sizes.sum() == len(files.tokens) == done.tokens
    assert (files.pointers == 2 * (np.cumsum(files.sizes) - files.sizes)).all()
    eos = tokenizer.token_to_id("<|endoftext|>")
    for rows, text in zip(documents, texts, strict=True):
        *inner, last = rows
        assert last[-1] == eos and eos not in [
            token for row in [*inner, last[:-1]] for token in row
        ]
        sentences = [tokenizer.decode(row) for row in [*inner, last[:-1]]]
        assert sentences == split(text) and "".join(sentences) == text
    metadata = json.loads((done.folder / "data.json").read_text())
    assert metadata["documents"] == 100 and metadata["sequences"] == len(files.sizes)


def test_the_tokens_are_those_of_whole_documents(tmp_path: Path, corpus: str) -> None:
    """GPT-2's tokens never contain white space behind a letter."""
    whole = prepare(recipe(split_sentences=False), tmp_path / "whole", corpus).folder
    split = prepare(recipe(), tmp_path / "split", corpus).folder
    same = {name for name, digest in digests(whole).items() if digests(split)[name] == digest}
    assert same == digests(whole).keys() - {"data.json", "tokens.idx"}
    before, after = (json.loads((at / "data.json").read_text()) for at in (whole, split))
    assert "sequences" not in before and "sentences" not in before["made_from"]
    for key in ("boundaries", "documents", "tokens", "part_tokens", "left_out", "ngrams"):
        assert after[key] == before[key]


def test_the_beginning_of_text_is_before_the_first_sentence_only() -> None:
    tokenizer = metaspace_tokenizer(puts_bos=True)
    settings = PrepareSettings(split_sentences=True)
    (batch,) = encoded(["fall. Dale. Oboe.", "bad", "\u200b"], tokenizer, settings)
    assert batch.sequences is not None and batch.sequences.tolist() == [3, 1, 1]
    rows = np.split(batch.ids, np.cumsum(batch.sizes)[:-1])
    assert [row[0] == 1 for row in rows] == [True, False, False, True, True]
    assert [row[-1] == 2 for row in rows] == [False, False, True, True, True]
    assert sum(int(np.isin(row, (1, 2)).sum()) for row in rows) == 2 * 3


def test_sentences_without_a_token_are_left_out(byte_tokenizer: Tokenizer) -> None:
    byte_tokenizer = Tokenizer.from_str(byte_tokenizer.to_str())
    byte_tokenizer.normalizer = normalizers.Replace(" Ha!", "")
    settings = PrepareSettings(split_sentences=True, fast_tokenizer=False)
    rows = ["Oh. Ha! No.", "Oh. Ha!", "Ha!"]
    (batch,) = encoded(rows, byte_tokenizer, settings)
    assert batch.sequences is not None and batch.sequences.tolist() == [2, 1, 1]
    assert batch.sizes.tolist() == [3, 5, 4, 4]
    byte_tokenizer.normalizer = normalizers.Replace("Ha!", "")
    (batch,) = encoded(["Ha!", "Oh."], byte_tokenizer, settings)
    assert batch.sizes.tolist() == [1, 4]


def test_near_copies_are_left_out_by_document(tmp_path: Path, texts: list[str]) -> None:
    """A sentence alone does not make a copy, and all sentences of a copy are left out."""
    rows = [*texts[:98], *texts[:2]]
    source = write(tmp_path / "corpus.jsonl", rows)
    done = prepare(recipe(), tmp_path / "out", source)
    whole = prepare(recipe(split_sentences=False), tmp_path / "whole", source)
    documents = read(done.folder).documents
    assert done.documents == whole.documents == len(documents) < 100
    tokens = [[token for row in rows for token in row] for rows in documents]
    assert tokens == [rows[0] for rows in read(whole.folder).documents]
    held_out = (done.folder / "heldout.txt").read_text()
    assert held_out == (whole.folder / "heldout.txt").read_text()
    assert held_out.endswith(f"{texts[1]}\n\n")


@pytest.mark.parametrize("format", ["megatron", "paddle"])
@pytest.mark.parametrize("count", [100, 4])
def test_the_same_bytes_in_shards(
    tmp_path: Path, texts: list[str], format: str, count: int
) -> None:
    """Four documents are cut into pieces, which are tokenized when the shards are joined."""
    rows = [*texts, texts[5]] if count == 100 else ["\n".join(texts[i::4]) for i in range(4)]
    source, settings = write(tmp_path / "corpus.jsonl", rows), recipe(format=format)
    whole = prepare(settings, tmp_path / "whole", source).folder
    tokenizer = str(make_tokenizer(settings, tmp_path / "tokenizer", source).folder)
    shards = [tmp_path / f"{i}-of-3" for i in (3, 1, 2)]
    for i, shard in zip((3, 1, 2), shards, strict=True):
        tokenize(settings, shard, Shard(i, 3), source, tokenizer)
    joined = join(settings, shards, tmp_path / "joined").folder
    assert digests(joined) == digests(whole)
    data = TokenDataset.open(joined)
    assert data.parts[0][1].arrays.documents < len(data.parts[0][1].sizes)
    assert data.metadata["sequences"] == len(data.parts[0][1].sizes)


def test_shards_of_other_rules_are_not_joined(tmp_path: Path, corpus: str) -> None:
    tokenizer = str(make_tokenizer(recipe(), tmp_path / "tokenizer", corpus).folder)

    def shard(i: int, **changes: object) -> Path:
        tokenize(recipe(**changes), tmp_path / str(i), Shard(i, 2), corpus, tokenizer)
        return tmp_path / str(i)

    folders = [shard(1), shard(2, split_sentences=False)]
    with raises(Code.MISMATCH, *folders, "Prepare.split_sentences"):
        join(recipe(), folders, tmp_path / "joined")
    folders = [shard(1), shard(2, sentence_language="de")]
    with raises(Code.MISMATCH, *folders, "Prepare.split_sentences"):
        join(recipe(), folders, tmp_path / "joined")
    assert not tokenize(recipe(), folders[1], Shard(2, 2), corpus, tokenizer).reused
    assert tokenize(recipe(), folders[1], Shard(2, 2), corpus, tokenizer).reused
    for changes in ({"split_sentences": False}, {"sentence_language": "de"}):
        with raises(Code.MISMATCH, folders[0], "sentencex", "Prepare.split_sentences"):
            join(recipe(**changes), folders, tmp_path / "joined")
    whole = {"split_sentences": False}
    assert not tokenize(recipe(**whole), folders[1], Shard(2, 2), corpus, tokenizer).reused


def test_other_rules_prepare_again(tmp_path: Path, corpus: str) -> None:
    changes: list[dict[str, Any]] = [{}, {"sentence_language": "de"}, {"split_sentences": False}]
    for change in changes:
        assert not prepare(recipe(**change), tmp_path / "out", corpus).reused
        assert prepare(recipe(**change), tmp_path / "out", corpus).reused


def _killed_while_writing(folder: Path, source: str) -> None:
    from lathe.data.megatron import MegatronWriter

    MegatronWriter._write_index = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    prepare(recipe(), folder, source)


def test_a_killed_prepare_leaves_nothing_that_counts(tmp_path: Path, corpus: str) -> None:
    whole = prepare(recipe(), tmp_path / "whole", corpus).folder
    killed = multiprocessing.get_context("spawn").Process(
        target=_killed_while_writing, args=(tmp_path / "out", corpus)
    )
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert not (tmp_path / "out" / "data.json").exists()
    assert not prepare(recipe(), tmp_path / "out", corpus).reused
    assert digests(tmp_path / "out") == digests(whole)


def test_samples_are_those_of_megatron(tmp_path: Path, corpus: str) -> None:
    """Megatron shuffles and concatenates sequences, whatever their documents."""
    data = TokenDataset.open(prepare(recipe(), tmp_path / "out", corpus).folder).parts[0][1]
    files = read(data.folder)
    training = range(int(files.doc_idx[60]))
    built = Samples(data, training, seq_len=32, num_samples=900, seed=1234)
    epochs, order, starts, shuffled, samples = reference(data, training, 32, 900, 1234)
    assert built.epochs == epochs > 1
    assert built.doc_idx.tolist() == order
    assert [tuple(row) for row in built.sample_idx.tolist()] == starts
    assert built.shuffle_idx.tolist() == shuffled
    assert [built[i].tolist() for i in range(len(built))] == samples
    spans = [sequence for sequence, begin, end in built.spans(3) if end > begin]
    of = [int(np.flatnonzero(files.doc_idx <= sequence)[-1]) for sequence in spans]
    assert built.origin(3) == ", ".join(map(str, of))


@pytest.mark.slow
def test_only_who_splits_imports_the_splitter(tmp_path: Path, texts: list[str]) -> None:
    source = write(tmp_path / "corpus.jsonl", texts[:30])
    program = (
        "import sys; from pathlib import Path; from lathe.data.prepare import prepare\n"
        "from lathe_base.config.settings import Recipe\n"
        "recipe = Recipe.model_validate({'Data': {'Train': {'dataset': {'max_seq_len': 32}}}})\n"
        f"prepare(recipe, Path({str(tmp_path / 'out')!r}), {source!r})\n"
        "assert 'sentencex' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_speed_is_that_of_documents(
    tmp_path: Path, corpus: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lathe")
    prepare(recipe(), tmp_path / "out", corpus)
    assert "tokenize: 100 documents" in caplog.text

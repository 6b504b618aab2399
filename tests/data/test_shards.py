"""Tokenizing a corpus in shards gives the same data set as `prepare` in one piece."""

import gzip
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from lathe.data.corpus_tokenizer import make_tokenizer
from lathe.data.join import join
from lathe.data.megatron import MegatronWriter
from lathe.data.prepare import prepare
from lathe.data.run_inputs import NEWEST
from lathe.data.sources import TEXT, Shard, Span, opened
from lathe.data.tokenize import tokenize, write_tokens
from lathe_base.config.settings import Recipe
from lathe_base.errors import Code
from lathe_base.storage import sha256, upload
from lathe_base.storage.ownership import ATTESTATIONS
from tests.support.errors import raises
from tests.support.tables import quick_only


def recipe(**changes: object) -> Recipe:
    return Recipe.model_validate(
        {
            "Prepare": {"vocab_size": 400, "cloze_examples": 20, **changes},
            "Data": {"Train": {"dataset": {"split": "6,2,2", "max_seq_len": 32}}},
        }
    )


@pytest.fixture(scope="session")
def texts(prose: list[str]) -> list[str]:
    """431 short documents."""
    return [text[:700].strip() for text in prose]


def json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def one_file(folder: Path, texts: list[str]) -> str:
    """A compressed file, which cannot be split before reading, with some blank documents."""
    file = folder / "corpus.jsonl.zst"
    rows = [text if i % 7 else " " for i, text in enumerate(texts)]
    file.write_bytes(zstandard.compress(json_lines(rows)))
    return str(file)


def text(folder: Path, texts: list[str]) -> str:
    (folder / "corpus.txt").write_text("\n\n".join(texts))
    return str(folder / "corpus.txt")


def several_files(folder: Path, texts: list[str]) -> str:
    """Files of all kinds, one with half of the corpus, an empty one, and some in a subfolder."""
    place = folder / "corpus"
    (place / "b").mkdir(parents=True)
    (place / "a.jsonl").write_bytes(json_lines(texts[:200]))
    (place / "b" / "c.txt.gz").write_bytes(gzip.compress("\n\n".join(texts[200:220]).encode()))
    (place / "b" / "empty.txt").write_text("")
    (place / "d.md").write_text("\n\n".join(texts[220:260]))
    (place / "e.jsonl").write_bytes(json_lines(texts[260:]))
    (place / "notes.pdf").write_bytes(b"%PDF")
    return str(place)


def few_documents(folder: Path, texts: list[str]) -> str:
    file = folder / "few.jsonl"
    file.write_bytes(json_lines(texts[:5]))
    return str(file)


def one_document(folder: Path, texts: list[str]) -> str:
    file = folder / "one.jsonl"
    file.write_bytes(json_lines(["\n".join(texts)]))
    return str(file)


def digests(folder: Path) -> dict[str, str]:
    """Digests of the data, without the attestation of time and machine."""
    return {p.name: sha256(p) for p in folder.iterdir() if p.name != ATTESTATIONS}


def in_shards(folder: Path, source: str, of: int, settings: Recipe, tokenizer: Path) -> list[Path]:
    made = []
    for number in reversed(range(1, of + 1)):
        shard = folder / f"shard-{number}-of-{of}"
        tokenize(settings, shard, Shard(number, of), source, str(tokenizer))
        made.append(shard)
    return made


@pytest.mark.parametrize(
    "corpus",
    quick_only(
        [one_file, text, several_files, few_documents, one_document], [one_file, several_files]
    ),
)
def test_the_same_bytes_in_any_number_of_shards(
    tmp_path: Path, texts: list[str], corpus: Callable[[Path, list[str]], str]
) -> None:
    source, settings = corpus(tmp_path, texts), recipe()
    whole = prepare(settings, tmp_path / "whole", source)
    made = make_tokenizer(settings, tmp_path / "tokenizer", source)
    assert made.trained and made.vocab_size == whole.vocab_size
    for of in (2, 7):
        shards = in_shards(tmp_path, source, of, settings, made.folder)
        joined = join(settings, shards, tmp_path / f"joined-{of}")
        assert digests(joined.folder) == digests(whole.folder)


@pytest.mark.slow
def test_the_same_bytes_of_pythons_prose(tmp_path: Path) -> None:
    whole = prepare(recipe(), tmp_path / "whole", "python").folder
    tokenizer = make_tokenizer(recipe(), tmp_path / "tokenizer", "python").folder
    shards = in_shards(tmp_path, "python", 2, recipe(), tokenizer)
    assert digests(join(recipe(), shards, tmp_path / "joined").folder) == digests(whole)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["megatron", "paddle"])
def test_the_same_bytes_with_a_given_tokenizer(
    tmp_path: Path, texts: list[str], shared: Path, format: str
) -> None:
    source, settings = one_file(tmp_path, texts[:200]), recipe(format=format)
    whole = prepare(settings, tmp_path / "whole", source, str(shared / "gpt2"))
    made = make_tokenizer(settings, tmp_path / "tokenizer", source, str(shared / "gpt2"))
    shards = in_shards(tmp_path, source, 2, settings, made.folder)
    joined = join(settings, shards, tmp_path / "joined")
    assert digests(joined.folder) == digests(whole.folder)
    assert join(settings, shards[::-1], tmp_path / "whole").reused


def test_a_corpus_in_a_store_is_the_same_and_a_shard_fetches_only_its_files(
    tmp_path: Path, texts: list[str], s3: str
) -> None:
    place = several_files(tmp_path, texts)
    upload(Path(place), f"{s3}/corpus")
    with opened(place) as here, opened(f"{s3}/corpus/", Shard(3, 3)) as there:
        assert [file.name for file in there.files] == [file.name for file in here.files]
        assert there.digest == here.digest
        own = [d.text for d in there.documents(TEXT, Shard(3, 3))]
        assert own == [d.text for d in here.documents(TEXT, Shard(3, 3))] != []
        with raises(Code.NOT_FOUND, "a.jsonl"):
            next(there.documents(TEXT))


def test_shards_are_of_about_the_same_size(tmp_path: Path) -> None:
    """With a large file between small ones, every shard gets a part of it."""
    sizes = [*[50] * 40, 10_000, *[50] * 40]
    blocks = {size: size // 10 for size in set(sizes)}
    total = sum(sizes)
    for of in (2, 5, 13):
        taken = dict.fromkeys(range(1, of + 1), 0)
        begin = 0
        for size in sizes:
            span = Span(begin, begin + size, total)
            for block in range(blocks[size]):
                (owner,) = (n for n in taken if Shard(n, of).takes(span, block))
                assert Shard(owner, of).reads(span)
                taken[owner] += 10
            begin += size
        assert max(taken.values()) < 1.1 * total / of


def test_a_finished_shard_is_kept_and_a_changed_one_is_not(
    tmp_path: Path, texts: list[str]
) -> None:
    source, settings = several_files(tmp_path, texts), recipe()
    tokenizer = make_tokenizer(settings, tmp_path / "tokenizer", source).folder

    def again() -> list[bool]:
        return [
            tokenize(settings, tmp_path / f"{n}", Shard(n, 3), source, str(tokenizer)).reused
            for n in (1, 2, 3)
        ]

    assert again() == [False] * 3
    assert again() == [True] * 3
    first = Path(source) / "a.jsonl"
    first.write_bytes(first.read_bytes().replace(b"the", b"teh", 1))
    assert again() == [False, True, True]


def _killed_while_tokenizing(folder: Path, source: str) -> None:
    import lathe.data.tokenize as module

    module.write_tokens = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    tokenize(recipe(), folder / "2", Shard(2, 2), source, str(folder / "tokenizer"))


@pytest.mark.slow
def test_a_killed_shard_resumes_alone(tmp_path: Path, texts: list[str]) -> None:
    source, settings = one_file(tmp_path, texts), recipe()
    whole = prepare(settings, tmp_path / "whole", source).folder
    make_tokenizer(settings, tmp_path / "tokenizer", source)
    tokenizer = str(tmp_path / "tokenizer")
    tokenize(settings, tmp_path / "1", Shard(1, 2), source, tokenizer)
    stamp = (tmp_path / "1" / "tokens.bin").stat().st_mtime_ns

    killed = multiprocessing.get_context("spawn").Process(
        target=_killed_while_tokenizing, args=(tmp_path, source)
    )
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    folders = [tmp_path / "1", tmp_path / "2"]
    with raises(Code.WRONG_KIND, folders[1], "shard.json"):
        join(settings, folders, tmp_path / "joined")

    assert not tokenize(settings, tmp_path / "2", Shard(2, 2), source, tokenizer).reused
    assert tokenize(settings, tmp_path / "1", Shard(1, 2), source, tokenizer).reused
    assert (tmp_path / "1" / "tokens.bin").stat().st_mtime_ns == stamp
    assert digests(join(settings, folders, tmp_path / "joined").folder) == digests(whole)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """A corpus with its tokenizer and the shards 1/2, 2/2 and 1/3."""
    folder = tmp_path_factory.mktemp("made")
    source = few_documents(folder, texts)
    make_tokenizer(recipe(), folder / "tokenizer", source)
    for shard in (Shard(1, 2), Shard(2, 2), Shard(1, 3)):
        name = f"{shard.number}-of-{shard.of}"
        tokenize(recipe(), folder / name, shard, source, str(folder / "tokenizer"))
    return folder


@pytest.fixture
def shards(tmp_path: Path, made: Path) -> Path:
    shutil.copytree(made, tmp_path / "shards")
    return tmp_path / "shards"


def refused(shards: Path, names: list[str], code: Code, *texts: object) -> None:
    with raises(code, *texts):
        join(recipe(), [shards / name for name in names], shards / "joined")
    assert not (shards / "joined").exists()


def test_every_shard_is_needed_once(shards: Path) -> None:
    refused(shards, ["1-of-2"], Code.INCOMPLETE, "1 of 2", "2/2")
    refused(shards, ["1-of-2", "2-of-2", "1-of-2"], Code.DUPLICATE, "shard 1/2")
    refused(shards, ["1-of-3", "2-of-2"], Code.MISMATCH, "number of shards")
    refused(shards, ["1-of-2", "tokenizer"], Code.WRONG_KIND, shards / "tokenizer")
    refused(shards, ["1-of-2", "nowhere"], Code.WRONG_KIND, shards / "nowhere")


def test_shards_of_something_else_are_refused(tmp_path: Path, texts: list[str]) -> None:
    source, tokenizer = few_documents(tmp_path, texts), tmp_path / "tokenizer"
    make_tokenizer(recipe(), tokenizer, source)
    shutil.copy(source, tmp_path / "other.jsonl")
    make_tokenizer(recipe(vocab_size=300), tmp_path / "smaller", source)
    first = tokenize(recipe(), tmp_path / "1", Shard(1, 2), source, str(tokenizer)).folder

    def refused_with(source: str, tokenizer: Path, differs: str) -> None:
        tokenize(recipe(), tmp_path / "2", Shard(2, 2), source, str(tokenizer))
        refused(tmp_path, [first.name, "2"], Code.MISMATCH, f"different {differs}\n")

    refused_with(str(tmp_path / "other.jsonl"), tokenizer, "corpus")
    refused_with(source, tmp_path / "smaller", "tokenizer")
    with Path(source).open("a") as file:
        file.write('{"text": "One more.", "body": "One more."}\n')
    refused_with(source, tokenizer, "file names or sizes of the corpus")


def test_an_altered_shard_is_refused(shards: Path) -> None:
    (shards / "1-of-2" / "tokens.bin").write_bytes(b"")
    refused(shards, ["1-of-2", "2-of-2"], Code.CORRUPT, shards / "1-of-2/tokens.bin")


def test_a_corpus_without_text_is_refused(tmp_path: Path, made: Path) -> None:
    (tmp_path / "blank.jsonl").write_text('{"text": " "}\n' * 3)
    source, settings = str(tmp_path / "blank.jsonl"), recipe()
    shards = in_shards(tmp_path, source, 2, settings, made / "tokenizer")
    with raises(Code.TOO_LITTLE_DATA, "blank.jsonl"):
        join(settings, shards, tmp_path / "joined")


def test_a_tokenizer_has_to_be_trained_before_the_shards(tmp_path: Path, made: Path) -> None:
    source = str(made / "few.jsonl")
    with raises(Code.CONFLICTING_OPTIONS, "--tokenizer train"):
        tokenize(recipe(), tmp_path / "1", Shard(1, 2), source, "train")
    with raises(Code.CONFLICTING_OPTIONS, f"{NEWEST}{tmp_path}"):
        tokenize(recipe(), tmp_path / "1", Shard(1, 2), f"{NEWEST}{tmp_path}", str(made / "1-of-2"))
    newest = f"{NEWEST}{tmp_path}"  # which contains no corpus now
    done = tokenize(recipe(), tmp_path / "1", Shard(1, 2), newest, str(made / "tokenizer"))
    assert json.loads((done.folder / "shard.json").read_text())["source"] == source


@pytest.mark.parametrize("text", ["0/3", "4/3", "1/0", "1/999", "1", "a/b", "1/2/3", "-1/2"])
def test_invalid_shards(text: str) -> None:
    with raises(Code.INVALID_VALUE, text):
        Shard.parse(text)
    assert Shard.parse("2/8") == Shard(2, 8)


@pytest.mark.slow
def test_a_corpus_whose_size_is_not_known_is_divided(tmp_path: Path) -> None:
    with opened("python") as corpus:
        counts = [sum(1 for _ in corpus.documents(TEXT, Shard(n, 3))) for n in (1, 2, 3)]
        whole = sum(1 for _ in corpus.documents(TEXT))
    assert sum(counts) == whole and min(counts) > whole // 6


def test_a_shard_without_documents_is_logged_without_a_speed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with MegatronWriter(tmp_path / "tokens", 300) as writer, caplog.at_level("INFO"):
        write_tokens(writer, [], 0, "tokenize")
    assert caplog.messages == ["tokenize: 0 documents, 0 tokens"]

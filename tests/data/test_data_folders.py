"""Folders that are data set repositories, compared with what Hugging Face's `datasets` reads."""

import bz2
import gzip
import json
import logging
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from lathe.data.run_inputs import content, resolve
from lathe.data.sources import TEXT, Shard, documents, opened
from lathe_base.errors import Code
from tests.support.errors import raises

CARD = "---\nlicense: mit\n{}---\n# A card, which is not text\n"
REPOSITORY = ("README.md", ".gitattributes", "LICENSE")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "sharded": (
        *REPOSITORY,
        *(f"data/train-{i:05d}-of-00012.parquet" for i in range(12)),
        "data/test-00000-of-00001.parquet",
        "data/validation-00000-of-00001-9f2a.parquet",
        "data/odd-00000-of-00001.parquet",
        "extra.parquet",
    ),
    "files": (*REPOSITORY, "train.jsonl", "valid.jsonl", "eval.jsonl", "other.jsonl"),
    "files without a card": ("train.jsonl", "dev.jsonl", "test.jsonl"),
    "compressed": (*REPOSITORY, "data/train.jsonl.gz", "data/test.jsonl.gz"),
    "folders": (
        *REPOSITORY,
        *("train/a.jsonl", "train/test.jsonl", "test/a.jsonl", "x/my_val/a.jsonl"),
    ),
    "years": ("2023/train/a.jsonl", "2024/train-b/b.jsonl", "2024/evaluation/b.jsonl"),
    "text": ("README.md", "wiki.train.txt", "wiki.valid.txt", "wiki.test.txt"),
    "words": (*REPOSITORY, "train_0.jsonl", "my-training.jsonl", "trainer.jsonl", "a.test.jsonl"),
    "no splits": (*REPOSITORY, "a.jsonl", "b/c.jsonl", "testers.jsonl"),
    "kinds": (*REPOSITORY, "a.jsonl", "b.jsonl", "notes.txt", "requirements.txt", "config.json"),
    "special": (*REPOSITORY, "train.jsonl", "test.jsonl", "__pycache__/train.jsonl"),
}
CONFIGS = {
    "paths": "- config_name: default\n  data_files:\n  - split: train\n    path: d/a-*\n"
    "  - split: test\n    path: ['d/b-*', 'd/c-1.jsonl']\n",
    "pattern": "- config_name: only\n  data_files: 'd/**/b-*.jsonl'\n",
    "list": "- config_name: only\n  data_files: ['d/c-*.jsonl', 'd/a-?.jsonl', d/b-1.jsonl]\n",
    "folder": "- config_name: only\n  data_dir: e\n",
    "several": "- config_name: en\n  data_files: 'd/a-*'\n"
    "- config_name: de\n  default: true\n  data_files: 'd/[bc]-*'\n",
}
NAMED = ("d/a-1.jsonl", "d/a-2.jsonl", "d/b-1.jsonl", "d/c-1.jsonl", "d/e/b-2.jsonl")


def write(folder: Path, names: tuple[str, ...], card: str = "") -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = [f"{name} {i}" for i in range(3)]
        if path.name == "README.md":
            path.write_text(card or CARD.format(""))
        elif path.suffix == ".parquet":
            parquet.write_table(pa.table({"text": texts}), path)
        elif ".jsonl" in path.name:
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            path.write_bytes(
                gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode()
            )
        else:
            path.write_text(f"{texts[0]}\n")


def read(source: Path | str) -> list[str]:
    return list(documents(str(source)))


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Any:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    cache = str(tmp_path_factory.mktemp("cache"))

    def load(folder: Path, config: str | None = None) -> Mapping[str, list[str]]:
        splits = datasets.load_dataset(str(folder), config, cache_dir=cache)
        return {split: list(rows["text"]) for split, rows in splits.items()}

    return load


@pytest.mark.parametrize("layout", LAYOUTS)
def test_splits_are_those_that_datasets_infers(tmp_path: Path, layout: str, reference: Any) -> None:
    write(tmp_path, LAYOUTS[layout])
    splits = reference(tmp_path)
    assert read(tmp_path) == splits["train"]
    for split, texts in splits.items():
        assert read(f"{tmp_path}::{split}") == texts
    assert read(f"{tmp_path}::all") == [*chain(*splits.values())]


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_of_the_card_decide(tmp_path: Path, case: str, reference: Any) -> None:
    card = CARD.format(f"configs:\n{CONFIGS[case]}")
    write(tmp_path, ("README.md", *NAMED, "e/train.jsonl", "e/test.jsonl"), card)
    splits = reference(tmp_path)
    assert read(tmp_path) == splits["train"]
    for split, texts in splits.items():
        assert read(f"{tmp_path}::{split}") == texts
    if case == "several":
        english = reference(tmp_path, "en")["train"]
        assert english == read(f"{tmp_path}:en") == read(f"{tmp_path}:en:train")


def test_a_split_or_config_that_is_not_there_is_an_error_with_those_that_are(
    tmp_path: Path,
) -> None:
    write(tmp_path / "a", LAYOUTS["files"])
    with raises(Code.UNKNOWN_NAME, "a: no split 'dev'", "'train', 'validation', 'test'"):
        read(f"{tmp_path}/a::dev")
    with raises(Code.UNKNOWN_NAME, "a: no config 'en'"):
        read(f"{tmp_path}/a:en")
    (tmp_path / "a/train.jsonl").unlink()
    with raises(Code.UNKNOWN_NAME, "no split 'train'", "a::validation"):
        read(tmp_path / "a")
    two = CONFIGS["several"].replace("  default: true\n", "")
    write(tmp_path / "b", ("README.md", *NAMED), CARD.format(f"configs:\n{two}"))
    with raises(Code.AMBIGUOUS, "b: ", "'en', 'de'", "b:en"):
        read(tmp_path / "b")
    with raises(Code.UNKNOWN_NAME, "b: no config 'fr'", "'en', 'de'"):
        read(f"{tmp_path}/b:fr:train")
    (tmp_path / "one.jsonl").write_text('{"text": "a"}\n')
    with raises(Code.WRONG_KIND, "one.jsonl"):
        read(f"{tmp_path}/one.jsonl::test")


@pytest.mark.parametrize(
    ("yaml", "code", "texts"),
    [
        ("configs: [\n", Code.MALFORMED, ["README.md: not YAML"]),
        ("configs: default\n", Code.MALFORMED, ["README.md: configs: not a list"]),
        ("configs:\n- data_files: a\n", Code.MALFORMED, ["README.md: configs: ", "config_name"]),
        (
            "configs:\n- config_name: a\n  data_files: {b: 1}\n",
            Code.MALFORMED,
            ["README.md: ", "'a'", "data_files"],
        ),
        (
            "configs:\n- config_name: a\n  data_files: b*.csv\n",
            Code.INCOMPLETE,
            ["data_files", "'b*.csv'"],
        ),
        ("configs:\n- config_name: a\n  data_dir: b\n", Code.INCOMPLETE, ["data_dir 'b'"]),
    ],
)
def test_broken_cards_are_named(tmp_path: Path, yaml: str, code: Code, texts: list[str]) -> None:
    write(tmp_path, ("README.md", *NAMED), CARD.format(yaml))
    with raises(code, *texts):
        read(tmp_path)


def test_what_a_repository_leaves_out_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, (*LAYOUTS["files"], "notes.md"))
    with caplog.at_level(logging.INFO, "lathe"):
        read(tmp_path)
    assert caplog.messages == [
        f"{tmp_path}: 1 files with other endings ignored",
        f"{tmp_path}: split train, 1 of 5 files; {tmp_path}::validation, {tmp_path}::test and "
        f"{tmp_path}::all for others",
    ]


@pytest.mark.parametrize(
    "names",
    [
        ("README.md", "LICENSE.md", "guide/train.md", "guide/test.md", "guide/index.md"),
        ("README.md", "eval.txt", "a.txt"),
        ("train.txt", "b.md"),
        ("a.jsonl", "test.jsonl"),
        ("notes.txt", "README.md", "table.jsonl"),
    ],
)
def test_plain_folders_are_read_whole(tmp_path: Path, names: tuple[str, ...]) -> None:
    write(tmp_path, names, "# Read me\n")
    texts = [
        "# Read me" if name == "README.md" else text
        for name in sorted(names, key=lambda name: Path(name).parts)
        for text in [f"{name} {i}" for i in range(3 if ".jsonl" in name else 1)]
    ]
    assert list(dict.fromkeys(texts)) == read(tmp_path)


def test_a_table_of_a_lake_is_refused_with_the_cure(tmp_path: Path) -> None:
    for kind, name in (
        ("Delta", "_delta_log/00000000000000000000.json"),
        ("Iceberg", "metadata/v1.metadata.json"),
        ("Hudi", ".hoodie/hoodie.properties"),
    ):
        folder = tmp_path / kind
        write(folder, ("part-0.parquet",))
        (folder / name).parent.mkdir()
        (folder / name).write_text("{}")
        for source in (folder, f"file://{folder}"):
            with raises(Code.UNSUPPORTED, folder, f"table of {kind}", "Parquet"):
                read(source)
        with raises(Code.UNSUPPORTED, folder, f"table of {kind}"):
            read(tmp_path / kind)


def test_names_that_begin_with_an_underscore_or_a_dot_are_not_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(
        tmp_path,
        ("a.txt", "_draft.txt", "._a.txt", "_SUCCESS", "_temporary/b.jsonl", "_day=1/c.jsonl"),
    )
    texts = [*(f"_day=1/c.jsonl {i}" for i in range(3)), "a.txt 0"]
    assert read(tmp_path) == texts
    assert caplog.messages == [
        f"{tmp_path}: left out, because names begin with _ or a dot: ._a.txt, _draft.txt, "
        "_temporary/b.jsonl"
    ]
    assert read(f"file://{tmp_path}") == texts


@pytest.mark.parametrize("name", ["b.jsonl.lz4", "b.txt.zip", "b.lz4", "b/c.csv.br"])
def test_unreadable_compression_is_an_error(tmp_path: Path, name: str) -> None:
    write(tmp_path, ("a.jsonl", name))
    for source in (tmp_path, tmp_path / name, f"file://{tmp_path}"):
        with raises(Code.UNSUPPORTED, name, Path(name).suffix):
            read(source)


def test_bzip2_in_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.bz2").write_bytes(bz2.compress(b'{"text": "a"}\n'))
    assert read(tmp_path) == ["a"]


def test_a_folder_whose_name_has_colons_is_that_folder(tmp_path: Path) -> None:
    for name in ("a", "a::test", "a:b"):
        write(tmp_path / name, LAYOUTS["files"])
    (tmp_path / "a::test/train.jsonl").write_text('{"text": "colons"}\n')
    assert read(tmp_path / "a::test") == ["colons"]
    assert read(f"{tmp_path}/a:b::test") == [f"eval.jsonl {i}" for i in range(3)]


def test_splits_in_shards_and_from_a_store(tmp_path: Path) -> None:
    write(tmp_path, LAYOUTS["sharded"])
    texts = read(tmp_path)
    assert read(f"file://{tmp_path}") == texts
    assert read(f"file://{tmp_path}::test") == read(f"{tmp_path}::test") != texts
    for source in (str(tmp_path), f"file://{tmp_path}"):
        found, digests = list[list[str]](), set[str]()
        for number in (1, 2, 3):
            shard = Shard(number, 3)
            with opened(source, shard) as corpus:
                found.append([d.text for d in corpus.documents(TEXT, shard)])
                digests.add(corpus.digest)
        assert all(found) and sorted(chain(*found)) == sorted(texts) and len(digests) == 1
    with opened(f"{tmp_path}::test") as corpus:
        assert corpus.digest not in digests


def test_the_identity_of_a_split_is_that_of_its_folder(tmp_path: Path) -> None:
    write(tmp_path / "a", LAYOUTS["files"])
    before = content(f"{tmp_path}/a::test")
    assert before == content(f"{tmp_path}/a") == content(f"{tmp_path}/a:x:test")
    (tmp_path / "a/eval.jsonl").write_text('{"text": "other"}\n')
    assert content(f"{tmp_path}/a::test") != before
    assert resolve(f"newest:{tmp_path}::test") == f"{tmp_path}/a::test"


def test_a_config_of_a_data_set_in_a_store(tmp_path: Path) -> None:
    several = "configs:\n- config_name: a\n  data_dir: d\n- config_name: b\n  data_dir: e\n"
    files = [f"{folder}/{split}.jsonl" for folder in "de" for split in ("train", "test")]
    write(tmp_path, ("README.md", *files), CARD.format(several))
    with raises(Code.AMBIGUOUS, "'a', 'b'") as asked:
        read(f"file://{tmp_path}")
    named = str(asked.value).partition("name one: ")[2]
    assert named == f"file://{tmp_path}/:a" and read(named) == read(f"{tmp_path}:a")
    assert read(f"file://{tmp_path}/:b:test") == read(f"{tmp_path}:b:test") != read(named)
    with raises(
        Code.UNKNOWN_NAME,
        "split 'dev'",
        f"file://{tmp_path}/:b:train, or file://{tmp_path}/:b:all",
    ):
        read(f"file://{tmp_path}/:b:dev")
    assert content(f"file://{tmp_path}/:b:test") == content(f"file://{tmp_path}/")

"""Parquet, Arrow, CSV and WebDataset corpora, written with their own libraries."""

import bz2
import csv
import gzip
import io
import json
import logging
import tarfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from pyarrow import ipc, parquet

from lathe.data.cleaning import Reading
from lathe.data.prepare import prepare
from lathe.data.rows import TextKey
from lathe.data.sources import TEXT, Shard, documents, opened
from lathe_base.config.settings import PrepareSettings, Recipe
from lathe_base.errors import Code
from tests.support.errors import raises

TEXTS = [f'Document {i}: naïve café, line one\nline "two" of {i * i}' for i in range(700)]


def rows(texts: list[Any]) -> list[dict[str, Any]]:
    return [{"id": i, "text": t, "meta": {"body": t, "n": i}} for i, t in enumerate(texts)]


def write_parquet(path: Path, texts: list[Any]) -> None:
    parquet.write_table(pa.Table.from_pylist(rows(texts)), path, row_group_size=300)


def write_arrow(path: Path, texts: list[Any]) -> None:
    table = pa.Table.from_pylist(rows(texts))
    with ipc.new_file(path, table.schema) as file:
        file.write_table(table, max_chunksize=300)


def write_stream(path: Path, texts: list[Any]) -> None:
    table = pa.Table.from_pylist(rows(texts))
    with ipc.new_stream(path, table.schema) as file:
        file.write_table(table)


def write_json(path: Path, texts: list[Any]) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows(texts)).encode()
    path.write_bytes(zstandard.compress(lines))


def write_csv(path: Path, texts: list[Any]) -> None:
    with io.StringIO(newline="") as file:
        writer = csv.writer(file, delimiter="\t" if ".tsv" in path.name else ",")
        writer.writerows([["id", "text"], *([i, t] for i, t in enumerate(texts))])
        path.write_bytes(gzip.compress(file.getvalue().encode()))


def write_tar(path: Path, texts: list[Any], ending: str = "txt") -> None:
    with tarfile.open(path, "w") as archive:
        for i, text in enumerate(texts):
            content = (
                json.dumps({"text": text, "meta": {"body": text}}) if ending == "json" else text
            )
            for end, data in (("jpg", b"\xff\xd8picture"), (ending, content.encode())):
                member = tarfile.TarInfo(f"shard/{i:06d}.{end}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


WRITERS: dict[str, Callable[[Path, list[Any]], None]] = {
    "c.parquet": write_parquet,
    "c.arrow": write_arrow,
    "c.feather": write_stream,
    "c.jsonl.zst": write_json,
    "c.csv.gz": write_csv,
    "c.tsv.gz": write_csv,
    "c.tar": write_tar,
}
NESTED = {"c.parquet", "c.arrow", "c.feather", "c.jsonl.zst"}


@pytest.mark.parametrize("name", WRITERS)
def test_every_text_is_read_in_order_whole_or_in_shards(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, TEXTS)
    assert list(documents(str(tmp_path / name))) == TEXTS
    assert list(documents(str(tmp_path))) == TEXTS
    if name in NESTED:
        assert list(documents(str(tmp_path / name), TextKey("meta.body"))) == TEXTS
    found: list[list[str]] = []
    for number in (1, 2, 3):
        shard = Shard(number, 3)
        with opened(str(tmp_path / name), shard) as corpus:
            found.append([d.text for d in corpus.documents(TEXT, shard)])
    assert all(found) and sorted(chain(*found)) == sorted(TEXTS)


def test_texts_of_a_web_dataset(tmp_path: Path) -> None:
    write_tar(tmp_path / "c.tar", TEXTS[:3], "json")
    plain = (tmp_path / "c.tar").read_bytes()
    (tmp_path / "c.tar.zst").write_bytes(zstandard.compress(plain))
    (tmp_path / "c.tar.bz2").write_bytes(bz2.compress(plain))
    for key in ("text", "json.text", "json.meta.body"):
        assert list(documents(str(tmp_path / "c.tar"), TextKey(key))) == TEXTS[:3]
    for packed in ("c.tar.zst", "c.tar.bz2"):
        assert list(documents(str(tmp_path / packed))) == TEXTS[:3]
    with raises(Code.UNKNOWN_NAME, "c.tar: sample shard/000000: no key 'txt' among none"):
        list(documents(str(tmp_path / "c.tar"), TextKey("txt")))
    (tmp_path / "cut.tar").write_bytes(plain[:1300])
    with raises(Code.MALFORMED, "cut.tar"):
        list(documents(str(tmp_path / "cut.tar")))


def test_json_lines_in_a_tar_are_read_in_order_whole_or_in_shards(tmp_path: Path) -> None:
    lines = [json.dumps(row).encode() + b"\n" for row in rows(TEXTS)]
    with tarfile.open(tmp_path / "c.tar", "w") as archive:
        for name, data in (
            ("d/README.md", b"# Not a document\n"),
            ("d/a.txt", TEXTS[0].encode()),  # a sample, not of the lines beside it
            ("d/a.jsonl", b"".join(lines[1:300])),
            ("d/._b.jsonl", b"\0 of a Mac"),
            ("d/b.v1.jsonl.gz", gzip.compress(b"".join(lines[300:500]))),
            ("e/a.ndjson.zst", zstandard.compress(b"\n".join(lines[500:]))),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    source = str(tmp_path / "c.tar")
    assert list(documents(source)) == TEXTS
    with raises(Code.UNKNOWN_NAME, "c.tar: d/a.jsonl:1: no key 'txt' among 'id', 'text'"):
        list(documents(source, TextKey("txt")))
    found: list[list[str]] = []
    for number in (1, 2, 3):
        shard = Shard(number, 3)
        with opened(source, shard) as corpus:
            found.append([d.text for d in corpus.documents(TEXT, shard)])
    assert all(found) and sorted(chain(*found)) == sorted(TEXTS)


@pytest.mark.parametrize("name", ["c.parquet", "c.arrow", "c.feather"])
def test_broken_tables_are_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    WRITERS[name](path, TEXTS)
    with raises(Code.UNKNOWN_NAME, f"{name}: no column 'body' among 'id', 'text', 'meta'"):
        list(documents(str(path), TextKey("body")))
    path.write_bytes(path.read_bytes()[:-400])
    with raises(Code.MALFORMED, name):
        list(documents(str(path)))


BROKEN: dict[str, tuple[str, list[str]]] = {
    "c.jsonl": (
        '{"text": "a"}\n{"text": 1}\n{"tex\n\xff\n{"text": "b"}\n',
        ["c.jsonl:2: 'text'", "int"],
    ),
    "c.csv": (
        'text,n\na,1\nx\n"y"z,3\nu,v,w\n\nb,2\n',
        ["c.csv:3", "1 fields, not 2"],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rows_fail_or_are_skipped_and_counted(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    content, texts = BROKEN[name]
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with raises(Code.MALFORMED, *texts, "Prepare.on_bad_row=skip"):
        list(documents(str(tmp_path / name)))
    broken = Reading(PrepareSettings(on_bad_row="skip"))
    assert list(documents(str(tmp_path / name), TEXT, broken)) == ["a", "b"]
    assert broken.left_out["broken_rows"] == 3 and caplog.messages[-1].endswith(": 3 broken rows")
    assert sum(message.startswith("skipped: ") for message in caplog.messages) == 3


def test_null_texts_of_a_table_are_broken_rows(tmp_path: Path) -> None:
    texts = [*TEXTS[:300], None, *TEXTS[300:]]
    write_parquet(tmp_path / "c.parquet", texts)
    with raises(Code.MALFORMED, "c.parquet: row 301: 'text'", "NoneType"):
        list(documents(str(tmp_path / "c.parquet")))
    broken = Reading(PrepareSettings(on_bad_row="skip"))
    assert list(documents(str(tmp_path / "c.parquet"), TEXT, broken)) == TEXTS
    assert broken.left_out["broken_rows"] == 1


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()])
def test_binary_columns_of_utf8_are_text(tmp_path: Path, kind: pa.DataType) -> None:
    """Spark and Impala may write strings without Parquet's annotation."""
    column = pa.array([text.encode() for text in TEXTS[:300]], pa.binary()).cast(kind)
    nested = pa.StructArray.from_arrays([column], ["body"])
    parquet.write_table(pa.table({"text": column, "meta": nested}), tmp_path / "c.parquet")
    for key in ("text", "meta.body"):
        assert list(documents(str(tmp_path / "c.parquet"), TextKey(key))) == TEXTS[:300]
    column = pa.array([b"a", b"\xff", b"b\0", b"c"], pa.binary())
    parquet.write_table(pa.table({"text": column}), tmp_path / "c.parquet")
    with raises(Code.MALFORMED, "c.parquet: row 2: 'text'", "UTF-8"):
        list(documents(str(tmp_path / "c.parquet")))
    broken = Reading(PrepareSettings(on_bad_row="skip"))
    assert list(documents(str(tmp_path / "c.parquet"), TEXT, broken)) == ["a", "c"]


def test_skipped_rows_are_in_the_metadata(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = [*TEXTS[:40], None, 3, *TEXTS[40:80]]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "c.jsonl").write_text(lines)
    recipe = Recipe.model_validate(
        {
            "Prepare": {"vocab_size": 300, "on_bad_row": "skip", "keep_heldout_apart": False},
            "Data": {"Train": {"dataset": {"split": "8,1,1", "max_seq_len": 32}}},
        }
    )
    with caplog.at_level(logging.WARNING, "lathe"):
        done = prepare(recipe, tmp_path / "out", str(tmp_path / "c.jsonl"))
    metadata = json.loads((done.folder / "data.json").read_text())
    assert (done.documents, metadata["left_out"]["broken_rows"]) == (80, 2)


def test_a_data_set_that_was_saved_is_read_as_a_folder(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    saved = datasets.Dataset.from_list(rows(TEXTS[:50]))
    datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk(tmp_path / "d")
    assert list(documents(str(tmp_path / "d"))) == TEXTS[:50]
    assert list(documents(str(tmp_path / "d"), TextKey("meta.body"))) == TEXTS[:50]
    assert list(documents(f"{tmp_path}/d::test")) == TEXTS[:1]
    assert list(documents(f"{tmp_path}/d::all")) == [*TEXTS[:50], TEXTS[0]]
    with raises(Code.NOT_FOUND, f"{tmp_path}/d", "dev"):
        list(documents(f"{tmp_path}/d::dev"))
    saved.save_to_disk(tmp_path / "one")
    assert list(documents(str(tmp_path / "one"))) == TEXTS[:50]
    with raises(Code.NOT_FOUND, f"{tmp_path}/one", "splits"):
        list(documents(f"{tmp_path}/one::test"))

"""Read documents from files, folders, addresses and Hugging Face data sets."""

import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from lathe.data.cleaning import Reading
from lathe.data.embedded import python_documents
from lathe.data.folders import data_files, names_below, require_readable
from lathe.data.rows import JSON_LINES, Row, Rows, RowText, Takes, TextKey, json_rows
from lathe.data.shard import BLOCK, STRIDE, WHOLE, Shard, Span
from lathe.data.splits import ALL, CARD, TRAIN, chosen
from lathe.data.tables import arrow_rows, csv_rows, parquet_rows
from lathe.data.tars import tar_rows
from lathe.data.text_lines import file_kind, text_lines
from lathe_base.config.settings import PrepareSettings
from lathe_base.errors import Code, UserError
from lathe_base.inputs import read_text
from lathe_base.storage import digest, fetch, is_remote, is_store, sizes_below
from lathe_base.storage.failures import shown
from lathe_base.storage.splits import Located, locate

log = logging.getLogger("lathe")

READERS: dict[str, Callable[[Path, RowText, Takes], Rows]] = {
    ".parquet": parquet_rows,
    ".arrow": arrow_rows,
    ".feather": arrow_rows,
    ".csv": csv_rows,
    ".tsv": partial(csv_rows, delimiter="\t"),
    ".tar": tar_rows,
}
IN_FOLDERS = JSON_LINES | READERS.keys() | {".txt", ".md"}
SAVED = ("state.json", "dataset_dict.json")
DOCUMENT_CHARACTERS = 4000
TEXT = TextKey("text")


class Document(NamedTuple):
    """A document, its file's number in the corpus, and its block's number in the file."""

    file: int
    block: int
    text: str


@dataclass(frozen=True)
class CorpusFile:
    """A file of a corpus, or all of one that has no files.

    Attributes:
        name: relative to the corpus.
        size: in bytes; rows of a Hugging Face data set.
        read: yields the rows that `takes` wants.
    """

    name: str
    size: int
    read: Callable[[RowText, Takes], Rows]


@dataclass(frozen=True)
class Corpus:
    """Files of a corpus, in reading order."""

    files: list[CorpusFile]

    @property
    def digest(self) -> str:
        """Digest of the files' names and sizes, and of how their documents are distributed."""
        files = [(file.name, file.size) for file in self.files]
        return digest(json.dumps([BLOCK, STRIDE, files]))

    def documents(
        self, row_text: RowText, shard: Shard = WHOLE, reading: Reading | None = None
    ) -> Iterator[Document]:
        """Yield the stripped, non-empty documents of a shard, in the order of the corpus."""
        reading = reading or Reading(PrepareSettings())
        for number, (file, span) in enumerate(spans(self.files)):
            if not shard.reads(span):
                continue

            def takes(record: int, span: Span = span) -> bool:
                return shard.of == 1 or shard.takes(span, record // BLOCK)

            for row in file.read(row_text, takes):
                stripped = reading.text(row).strip()
                if stripped and reading.keeps(stripped):
                    yield Document(number, row.number // BLOCK, stripped)
        reading.report()


def documents(
    source: str, row_text: RowText = TEXT, reading: Reading | None = None
) -> Iterator[str]:
    """Yield the stripped, non-empty documents of a corpus, always in the same order.

    Args:
        source: one of `python`: the prose that ships with CPython, nothing to download; a text file
            (`.txt`, `.md`, any other ending): blocks between blank lines are gathered until they
            hold at least 4,000 characters, and that is a document; JSON lines (`.jsonl`, `.ndjson`,
            `.json`): one object per line, each a document; CSV (`.csv`, `.tsv`), whose first line
            names the columns; tar files (`.tar`), see `lathe.data.tars.tar_rows`; any of them
            compressed (`.gz`, `.bz2`, `.xz`, `.zst`); Parquet (`.parquet`) or Arrow (`.arrow`,
            `.feather`): a row is a document; a folder: its `.txt` and `.md` files, those above, and
            those of its folders, sorted; a data set repository: its split `train`, or that in
            `folder::split` or `folder:config:split`, see `lathe.data.splits`; a folder that Hugging
            Face's `datasets` has saved: the same;
            `http(s)://...` or `s3://bucket/key`: the same, downloaded first (see `fetch`);
            `hf://name[:config][:split]`: a Hugging Face data set by name or local folder, split
            `train` unless named (`hf://name::validation` names a split and no config).
        row_text: what the document of a JSON line, or of a row of a table, is.
        reading: what is left out; unless given, nothing is, and the first broken row raises.

    Raises:
        UserError: missing or unreadable source, no text in it, a broken line (names file and line),
            a missing text key, bytes that are not UTF-8.
    """
    empty = True
    with opened(source) as corpus:
        for document in corpus.documents(row_text, WHOLE, reading):
            empty = False
            yield document.text
    if empty:
        raise no_text(source)


def no_text(source: str) -> UserError:
    """The error for a corpus without a document."""
    return UserError(
        f"{named(source)}: contains no text",
        "give a corpus with at least one document",
        Code.TOO_LITTLE_DATA,
    )


def named(source: str) -> str:
    """The source as shown in messages and metadata: an address without its password or
    signature."""
    return shown(source) if is_remote(source) else source


@contextmanager
def opened(source: str, shard: Shard = WHOLE) -> Iterator[Corpus]:
    """Open a corpus; of one in a store, the files that the shard reads are fetched.

    Raises:
        UserError: see `documents`.
    """
    place = locate(source)
    if source == "python":
        yield Corpus([CorpusFile(f"python {platform.python_version()}", 1, _python_rows)])
    elif source.startswith("hf://"):
        yield Corpus([_data_set(source)])
    elif any(os.path.isfile(os.path.join(place.location, name)) for name in SAVED):
        yield Corpus([_data_set(f"hf://{source}")])
    elif is_remote(source):
        with tempfile.TemporaryDirectory() as folder:
            yield Corpus(_fetched(place, Path(folder), shard))
    else:
        yield Corpus(_files(fetch(place.location, Path()), place))


def spans(files: Iterable[CorpusFile]) -> Iterator[tuple[CorpusFile, Span]]:
    """Yield each file with its bytes among those of all."""
    files = list(files)
    begin, total = 0, sum(file.size for file in files)
    for file in files:
        yield file, Span(begin, begin + file.size, total)
        begin += file.size


def _fetched(place: Located, folder: Path, shard: Shard) -> list[CorpusFile]:
    source = place.location
    sizes = sizes_below(source) if is_store(source) and shard.of > 1 else {}
    if not sizes:
        return _files(fetch(source, folder), place)
    card = fetch(source, folder, {CARD}) / CARD if CARD in sizes else folder / CARD
    names = _texts([*sizes], place, card)
    files = [_file(folder / name, name, sizes[name]) for name in names]
    if wanted := {file.name for file, span in spans(files) if shard.reads(span)}:
        fetch(source, folder, wanted)
    return files


def _files(path: Path, place: Located) -> list[CorpusFile]:
    if path.is_dir():
        names = _texts(names_below(path), place, path / CARD)
        return [_file(path / name, name, _size(path / name)) for name in names]
    if place.suffix:
        raise UserError(
            f"{named(place.location)}: a file, which has no splits",
            f"leave out {place.suffix}",
            Code.WRONG_KIND,
        )
    require_readable(PurePosixPath(path.name), str(path), IN_FOLDERS)
    return [_file(path, path.name, path.stat().st_size)]


def _texts(names: Sequence[str], place: Located, card: Path) -> Sequence[str]:
    """The names of a folder's text files, in reading order."""
    data = data_files(names, named(place.location), IN_FOLDERS)
    has_card = CARD in names and card.is_file()
    return chosen(place, names, data, read_text(card) if has_card else "")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # which reading it explains
        return 0


def _file(path: Path, name: str, size: int) -> CorpusFile:
    kind = file_kind(path)
    read = json_rows if kind in JSON_LINES else READERS.get(kind, _text_rows)
    return CorpusFile(name, size, partial(read, path))


def _python_rows(row_text: RowText, takes: Takes) -> Rows:
    return _wanted("python", python_documents(), row_text, takes)


def _text_rows(path: Path, row_text: RowText, takes: Takes) -> Rows:
    return _wanted(str(path), _blocks(text_lines(path)), row_text, takes)


def _wanted(where: str, texts: Iterable[str], row_text: RowText, takes: Takes) -> Rows:
    if not isinstance(row_text, TextKey):
        raise UserError(
            f"{where}: plain text, not conversations",
            f"give JSONL with {row_text.example}, Parquet or Arrow, or set Prepare.chat=False",
            Code.WRONG_KIND,
        )
    for number, text in enumerate(texts):
        if takes(number):
            yield Row(number, partial(str, text))


def _blocks(text: Iterable[str]) -> Iterator[str]:
    gathered: list[str] = []
    characters = 0
    for line in text:
        gathered.append(line)
        characters += len(line) + 1
        if not line.strip() and characters >= DOCUMENT_CHARACTERS:
            yield "\n".join(gathered)
            gathered, characters = [], 0
    yield "\n".join(gathered)


def _data_set(source: str) -> CorpusFile:
    import datasets  # type: ignore[import-untyped]  # slow to import, and few need it

    name, config, split, *more = (*source.removeprefix("hf://").split(":"), "", "")
    if not name or any(more):
        raise UserError(
            f"{source}: not a data set", "write hf://name[:config][:split]", Code.INVALID_VALUE
        )
    try:
        if any((Path(name) / saved).is_file() for saved in SAVED):
            rows = datasets.load_from_disk(name)
            if isinstance(rows, datasets.DatasetDict):
                parts = [*rows.values()] if split == ALL else [rows[split or TRAIN]]
                rows = datasets.concatenate_datasets(parts)
            elif split not in ("", ALL, str(rows.split)):
                raise ValueError("it was saved without splits")
        else:
            rows = datasets.load_dataset(name, config or None, split=split or TRAIN)
        size = len(rows)
    except Exception as error:  # `datasets` raises whatever its many readers raise
        raise UserError(
            f"{source}: cannot be loaded: {str(error).partition(chr(10))[0]}",
            "check the name, config and split; offline, give hf:// the folder of a local data set",
            Code.NOT_FOUND,
        ) from error

    def read(row_text: RowText, takes: Takes) -> Rows:
        for number, row in enumerate(rows):
            if takes(number):
                yield Row(number, partial(row_text, row, f"{source} row {number}"))

    return CorpusFile(name, size, read)

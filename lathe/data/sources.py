"""Read documents from files, folders, addresses and Hugging Face data sets, or from the prose that
ships with CPython; all of them, or those of one shard.
"""

import ast
import hashlib
import json
import logging
import os
import platform
import re
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import cleandoc
from pathlib import Path, PurePosixPath
from pydoc_data.topics import topics
from typing import NamedTuple

from lathe.data.cleaning import Reading
from lathe.data.folders import ALL, CARD, TRAIN, chosen, data_files, names_below, require_readable
from lathe.data.rows import (
    JSON_LINES,
    Row,
    Rows,
    RowText,
    Takes,
    TextKey,
    file_kind,
    json_rows,
    text_lines,
)
from lathe.data.tables import arrow_rows, csv_rows, parquet_rows
from lathe.data.tars import tar_rows
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

BLOCK = 64
"""Number of documents that are distributed together."""
SLOTS, STRIDE = 1 << 16, 40503
"""Places of a file at which blocks are put, and the step from one to the next: the golden ratio
(Knuth's multiplicative hashing), so that any number of blocks is spread evenly."""
MAX_SHARDS = 256

# Of the standard library: not prose, not its own, or one line repeated a hundred times.
SKIPPED = {
    *("test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data"),
    *("_bundled", "site-packages", "dist-packages", "__pycache__"),
}
MIN_CHARACTERS = 200
PROSE = re.compile(r"[\w\"'`(](?!\d*[.)]\s)")
HOLDS_DEFINITIONS = ast.stmt | ast.excepthandler | ast.match_case  # not expressions
WRAPPED = 50  # a shorter line ends where its author ended it


class Document(NamedTuple):
    """A document, its file's number in the corpus, and its block's number in the file."""

    file: int
    block: int
    text: str


class Span(NamedTuple):
    """The bytes of a file among those of its corpus."""

    begin: int
    end: int
    total: int


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
class Shard:
    """Shard `number`, from 1, of `of`: decides which documents are its, without reading others.

    Every shard is an equal range of the corpus's bytes. A file within a range belongs to that shard
    alone; the documents of a file that several ranges share are distributed in proportion, in
    blocks. So a shard reads only its own files; a shared file, which cannot be split before it is
    read (compressed, or text without separators), is read by all, but each shard parses and
    tokenizes only its own documents.
    """

    number: int = 1
    of: int = 1

    @staticmethod
    def parse(text: str) -> "Shard":
        """Parse `2/8`; raises UserError if it is malformed."""
        match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
        if not match:
            raise UserError(
                f"--shard {text}: not NUMBER/OF", "write --shard 2/8", Code.INVALID_VALUE
            )
        return Shard(int(match[1]), int(match[2])).checked()

    def checked(self) -> "Shard":
        """The shard; raises UserError if there is no such one."""
        if not 1 <= self.number <= self.of <= MAX_SHARDS:
            raise UserError(
                f"shard {self}: no such shard",
                f"count from 1, to {MAX_SHARDS} shards at most",
                Code.INVALID_VALUE,
            )
        return self

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def reads(self, span: Span) -> bool:
        """Whether documents of this file may belong to the shard."""
        first, end = span.begin * SLOTS, span.end * SLOTS
        return self._owner(first, span) <= self.number <= self._owner(max(first, end - 1), span)

    def takes(self, span: Span, block: int) -> bool:
        """Whether this block of the file belongs to the shard."""
        slot = block * STRIDE % SLOTS
        slot_begin = span.begin * SLOTS + (span.end - span.begin) * slot
        return self.number == self._owner(slot_begin, span)

    def _owner(self, position: int, span: Span) -> int:
        """The shard of a place, in slots: those of a byte are shared where there are few bytes, as
        of a corpus whose size is not known."""
        return min(position * self.of // (max(span.total, 1) * SLOTS), self.of - 1) + 1


WHOLE = Shard()


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

            # A row's block depends on its number alone: rows of other shards are not even parsed.
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
            `folder::split` or `folder:config:split`, see `lathe.data.folders.chosen`; a folder that
            Hugging Face's `datasets` has saved: the same;
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
    located = locate(source)
    if source == "python":
        yield Corpus([CorpusFile(f"python {platform.python_version()}", 1, _python_rows)])
    elif source.startswith("hf://"):
        yield Corpus([_data_set(source)])
    # The folder of a data set that `datasets` has saved is read by it.
    elif any(os.path.isfile(os.path.join(located.location, name)) for name in SAVED):
        yield Corpus([_data_set(f"hf://{source}")])
    elif is_remote(source):
        with tempfile.TemporaryDirectory() as folder:
            yield Corpus(_fetched(located, Path(folder), shard))
    else:
        yield Corpus(_files(fetch(located.location, Path()), located))


def spans(files: Iterable[CorpusFile]) -> Iterator[tuple[CorpusFile, Span]]:
    """Yield each file with its bytes among those of all."""
    files = list(files)
    begin, total = 0, sum(file.size for file in files)
    for file in files:
        yield file, Span(begin, begin + file.size, total)
        begin += file.size


def _fetched(located: Located, folder: Path, shard: Shard) -> list[CorpusFile]:
    source = located.location
    # A store lists names and sizes, which tell the files of the shard; else all are fetched.
    sizes = sizes_below(source) if is_store(source) and shard.of > 1 else {}
    if not sizes:
        return _files(fetch(source, folder), located)
    card = fetch(source, folder, {CARD}) / CARD if CARD in sizes else folder / CARD
    names = _texts([*sizes], located, card)
    files = [_file(folder / name, name, sizes[name]) for name in names]
    if wanted := {file.name for file, span in spans(files) if shard.reads(span)}:
        fetch(source, folder, wanted)
    return files


def _files(path: Path, located: Located) -> list[CorpusFile]:
    if path.is_dir():
        files = []
        for name in _texts(names_below(path), located, path / CARD):
            try:
                size = (path / name).stat().st_size
            except OSError:  # which reading it explains
                size = 0
            files.append(_file(path / name, name, size))
        return files
    if located.suffix:
        raise UserError(
            f"{named(located.location)}: a file, which has no splits",
            f"leave out {located.suffix}",
            Code.WRONG_KIND,
        )
    require_readable(PurePosixPath(path.name), str(path), IN_FOLDERS)
    return [_file(path, path.name, path.stat().st_size)]


def _texts(names: Sequence[str], located: Located, card: Path) -> Sequence[str]:
    """The names of a folder's text files, in reading order."""
    data = data_files(names, named(located.location), IN_FOLDERS)
    has_card = CARD in names and card.is_file()
    return chosen(located, names, data, read_text(card) if has_card else "")


def _file(path: Path, name: str, size: int) -> CorpusFile:
    kind = file_kind(path)
    read = json_rows if kind in JSON_LINES else READERS.get(kind, _text_rows)
    return CorpusFile(name, size, partial(read, path))


def _text_rows(path: Path, row_text: RowText, takes: Takes) -> Rows:
    return _wanted(str(path), _blocks(text_lines(path)), row_text, takes)


def _python_rows(row_text: RowText, takes: Takes) -> Rows:
    return _wanted("python", python_documents(), row_text, takes)


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
    """Documents of plain text, which end at the first blank line behind `DOCUMENT_CHARACTERS`."""
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

    # All rows are on this disk by now, and have a number: `takes` distributes them among shards.
    def read(row_text: RowText, takes: Takes) -> Rows:
        for number, row in enumerate(rows):
            if takes(number):
                yield Row(number, partial(row_text, row, f"{source} row {number}"))

    return CorpusFile(name, size, read)


def python_documents() -> Iterator[str]:
    """Topics of the language reference, and the docstrings of the standard library.

    A document is one topic of `pydoc_data.topics`, or all docstrings of one module in source order.
    Docstrings repeated from an earlier module are dropped, and so are documents of less than 200
    characters. Paragraphs become one line each. About 430 documents and 2 MB with CPython 3.11; the
    text differs a little between Python versions. Files are read with `ast`, nothing is imported.
    The order is by digest of the name, the same everywhere: splits that are cut in order then hold
    topics and modules of all kinds, not the end of the alphabet.
    """
    # Documents by text, so that equal ones are one, and what each is named after.
    library = Path(sysconfig.get_path("stdlib"))
    texts = {text: f"topic {name}" for name, text in sorted(topics.items())}  # some share a text
    seen: set[str] = set()
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if SKIPPED.isdisjoint(parts):
            fresh = [text for text in dict.fromkeys(_docstrings(path)) if text not in seen]
            seen.update(fresh)
            texts["\n\n".join(fresh)] = "/".join(parts)
    for text in sorted(texts, key=lambda text: hashlib.sha256(texts[text].encode()).digest()):
        text = _unwrap(cleandoc(text))
        if len(text) >= MIN_CHARACTERS:
            yield text


def _unwrap(text: str) -> str:
    """Join the lines of hard-wrapped paragraphs; otherwise a small model mostly learns line breaks.

    A line is joined to the previous one if both read as prose and that one is long and equally
    indented; lists, tables, code and doctests are kept.
    """
    lines: list[str] = []
    before = ""
    for line in text.splitlines():
        bare = line.lstrip()
        same_indent = len(line) - len(bare) == len(before) - len(before.lstrip())
        prose = PROSE.match(bare) and PROSE.match(before.lstrip())
        if prose and same_indent and len(before.strip()) >= WRAPPED:
            lines[-1] = f"{lines[-1].rstrip()} {bare}"
        else:
            lines.append(line.rstrip())
        before = line
    return "\n".join(lines)


def _docstrings(path: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in the library's own strings
        pending: list[ast.AST] = [ast.parse(path.read_bytes(), path.name)]
    # A stack in place of recursion, with children in reverse: docstrings come in source order.
    while pending:
        node = pending.pop()
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and (text := ast.get_docstring(node)):
            yield text
        children = reversed(list(ast.iter_child_nodes(node)))
        pending.extend(child for child in children if isinstance(child, HOLDS_DEFINITIONS))

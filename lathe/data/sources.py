"""Where text comes from: one iterator of documents for files, folders, addresses and data sets."""

import gzip
import json
import logging
import lzma
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from lathe.data.embedded import python_documents
from lathe.errors import UserError
from lathe.storage import fetch, is_remote

log = logging.getLogger("lathe")

JSON_LINES = {".jsonl", ".ndjson", ".json"}
COMPRESSED = {".gz", ".xz", ".zst"}
IN_FOLDERS = JSON_LINES | {".txt", ".md"}
DOCUMENT_CHARACTERS = 4000


def documents(source: str, text_key: str = "text") -> Iterator[str]:
    """Stripped, non-empty texts of a corpus, in an order that is always the same.

    Args:
        source: one of
            `python`: the prose that ships with CPython, nothing to download;
            a text file (`.txt`, `.md`, any other ending): blocks between blank lines are gathered
            until they hold at least 4,000 characters, and that is a document;
            JSON lines (`.jsonl`, `.ndjson`, `.json`): one object a line, a document each;
            either of them compressed (`.gz`, `.xz`, `.zst`);
            a folder: its `.txt`, `.md` and JSON-lines files and those of its folders, sorted;
            `http(s)://...` or `s3://bucket/key`: the same, downloaded first (see `fetch`);
            `hf://name[:config][:split]`: a Hugging Face data set by name or local folder, split
            `train` unless named (`hf://name::validation` names a split and no config).
        text_key: the field of a JSON line, or the column of a data set, that holds the text.

    Raises:
        UserError: missing or unreadable source, no text in it, a broken line (names file and
            line), a missing text key, bytes that are not UTF-8.
    """
    empty = True
    for text in _read(source, text_key):
        if stripped := text.strip():
            empty = False
            yield stripped
    if empty:
        raise UserError(f"{source}: no text in it", "give a corpus with at least one document")


def _read(source: str, text_key: str) -> Iterator[str]:
    if source == "python":
        yield from python_documents()
    elif source.startswith("hf://"):
        yield from _read_data_set(source, text_key)
    elif is_remote(source):
        with tempfile.TemporaryDirectory() as folder:
            yield from _read_path(fetch(source, Path(folder)), text_key)
    else:
        yield from _read_path(fetch(source, Path()), text_key)


def _read_path(path: Path, text_key: str) -> Iterator[str]:
    if not path.is_dir():
        lines = _lines(path)
        yield from (
            _json_texts(path, lines, text_key) if _kind(path) in JSON_LINES else _blocks(lines)
        )
        return
    below = (p for p in sorted(path.rglob("*")) if p.is_file())
    files = [p for p in below if not any(q.startswith(".") for q in p.relative_to(path).parts)]
    texts = [p for p in files if _kind(p) in IN_FOLDERS]
    if len(texts) < len(files):
        log.warning("%s: %d files with other endings ignored", path, len(files) - len(texts))
    for file in texts:
        yield from _read_path(file, text_key)


def _kind(path: Path) -> str:
    """The file name's ending, without that of the compression."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def _lines(path: Path) -> Iterator[str]:
    """Decoded lines without their ends, whatever the compression."""
    try:
        with _open(path) as raw:
            for number, line in enumerate(raw, 1):
                try:
                    text = line.decode()
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{path}:{number}: not UTF-8: {error.reason} at byte {error.start}",
                        "convert the file, for instance with iconv -t utf-8",
                    ) from error
                yield (text.removeprefix("\ufeff") if number == 1 else text).rstrip("\r\n")
    except (EOFError, OSError, lzma.LZMAError, zlib.error, zstandard.ZstdError) as error:
        raise UserError(
            f"{path}: cannot be read: {error}", "check the file; is it whole?"
        ) from error


@contextmanager
def _open(path: Path) -> Iterator[Iterable[bytes]]:
    match path.suffix.lower():
        case ".gz":
            with gzip.open(path) as file:
                yield file
        case ".xz":
            with lzma.open(path) as file:
                yield file
        case ".zst":
            with path.open("rb") as file:
                yield _zstandard_lines(file)
        case _:
            with path.open("rb") as file:
                yield file


def _zstandard_lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines of one or more frames. The library's own file reader ends a cut file in silence."""
    frame = zstandard.ZstdDecompressor().decompressobj()
    rest = b""
    while chunk := file.read(1 << 18):
        while chunk:
            if frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
            *lines, rest = (rest + frame.decompress(chunk)).split(b"\n")
            yield from lines
            chunk = frame.unused_data
    if not frame.eof:
        raise EOFError("the file ends inside a zstandard frame")
    if rest:
        yield rest


def _blocks(lines: Iterable[str]) -> Iterator[str]:
    gathered: list[str] = []
    characters = 0
    for line in lines:
        gathered.append(line)
        characters += len(line) + 1
        if not line.strip() and characters >= DOCUMENT_CHARACTERS:
            yield "\n".join(gathered)
            gathered, characters = [], 0
    yield "\n".join(gathered)


def _json_texts(path: Path, lines: Iterable[str], text_key: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where}: not JSON: {error}", "mend or remove the line") from error
        if not isinstance(row, dict):
            raise UserError(f"{where}: not a JSON object", f'write {{"{text_key}": "..."}}')
        yield _text(where, row, text_key)


def _text(where: str, row: dict[str, Any], text_key: str) -> str:
    if text_key not in row:
        raise UserError(
            f"{where}: no key {text_key!r} among {', '.join(map(repr, row)) or 'none'}",
            "set Prepare.text_key to the key that holds the text",
        )
    text = row[text_key]
    if not isinstance(text, str):
        raise UserError(
            f"{where}: {text_key!r} holds {type(text).__name__}, not text",
            "set Prepare.text_key to the key that holds the text",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: half of a surrogate pair at character {error.start}", "mend the text"
        ) from error
    return text


def _read_data_set(source: str, text_key: str) -> Iterator[str]:
    import datasets  # type: ignore[import-untyped]  # slow to import, and few need it

    name, config, split, *more = (*source.removeprefix("hf://").split(":"), "", "")
    if not name or any(more):
        raise UserError(f"{source}: not a data set", "write hf://name[:config][:split]")
    split = split or "train"
    try:
        if (Path(name) / "state.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
            saved = datasets.load_from_disk(name)
            rows = saved[split] if isinstance(saved, datasets.DatasetDict) else saved
        else:
            rows = datasets.load_dataset(name, config or None, split=split)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{source}: cannot be loaded: {error}",
            "check the name, config and split; offline, give hf:// the folder of a local data set",
        ) from error
    for number, row in enumerate(rows):
        yield _text(f"{source} row {number}", row, text_key)

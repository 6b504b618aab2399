"""Read documents from files, folders, addresses and Hugging Face data sets."""

import gzip
import io
import logging
import lzma
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import zstandard

from lathe.data.embedded import python_documents
from lathe.errors import UserError, explain_os_error
from lathe.inputs import lines, open_file, parse_json, require_text
from lathe.storage import fetch, is_remote
from lathe.storage.failures import shown

log = logging.getLogger("lathe")

JSON_LINES = {".jsonl", ".ndjson", ".json"}
COMPRESSED = {".gz", ".xz", ".zst"}
IN_FOLDERS = JSON_LINES | {".txt", ".md"}
DOCUMENT_CHARACTERS = 4000


def documents(source: str, text_key: str = "text") -> Iterator[str]:
    """Yield the stripped, non-empty documents of a corpus, always in the same order.

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
        raise UserError(
            f"{named(source)}: no text in it", "give a corpus with at least one document"
        )


def named(source: str) -> str:
    """The source for a message or a metadata file: an address without its password or signature."""
    return shown(source) if is_remote(source) else source


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
        is_json = _kind(path) in JSON_LINES
        yield from _json_texts(path, text_key) if is_json else _blocks(_lines(path))
        return
    files = _files(path)
    texts = [p for p in files if _kind(p) in IN_FOLDERS]
    if len(texts) < len(files):
        log.warning("%s: %d files with other endings ignored", path, len(files) - len(texts))
    for file in texts:
        yield from _read_path(file, text_key)


def _files(folder: Path) -> list[Path]:
    """All files below a folder, sorted, without hidden ones."""
    found: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
        for link in (p for p in (Path(parent, name) for name in folders) if p.is_symlink()):
            log.warning("%s: a link to a folder, passed over", link)
    return sorted(found)


def _raise(error: OSError) -> NoReturn:
    raise explain_os_error(error)


def _kind(path: Path) -> str:
    """The file name's extension, without that of the compression."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def _lines(path: Path) -> Iterator[str]:
    """Yield decoded lines, decompressed and without line ends."""
    with open_file(path) as file:
        try:
            yield from lines(_unpacked(file, path.suffix.lower()), path)
        except OSError as error:
            if error.errno:
                raise
            raise _broken(path, error) from error
        except (EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError) as error:
            raise _broken(path, error) from error


def _broken(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path}: cannot be read: {error}",
        "check that the file is complete and has the right extension",
    )


def _unpacked(file: BinaryIO, ending: str) -> io.BufferedIOBase | BinaryIO:
    match ending:
        case ".gz":
            return gzip.GzipFile(fileobj=file)
        case ".xz":
            return lzma.LZMAFile(file)
        case ".zst":
            return io.BufferedReader(_Zstandard(file), 1 << 18)
    return file


class _Zstandard(io.RawIOBase):
    """Read one or more frames. The library's own reader ignores that a file is truncated."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._unpacked = memoryview(b"")
        self._packed = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked:
            # A few bytes at a time: a block of a decompression bomb is expanded in memory.
            self._packed = self._packed or self._file.read(1 << 12)
            if not self._packed:
                if not self._frame.eof:
                    raise EOFError("the file ends inside a zstandard frame")
                return 0
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._unpacked = memoryview(self._frame.decompress(self._packed))
            self._packed = self._frame.unused_data
        room = memoryview(buffer)
        count = min(len(room), len(self._unpacked))
        room[:count], self._unpacked = self._unpacked[:count], self._unpacked[count:]
        return count


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


def _json_texts(path: Path, text_key: str) -> Iterator[str]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        row = parse_json(line, where, "mend or remove the line")
        if not isinstance(row, dict):
            raise UserError(f"{where}: not a JSON object", f'write {{"{text_key}": "..."}}')
        yield _text(where, row, text_key)


def _text(where: str, row: dict[str, Any], text_key: str) -> str:
    if text_key not in row:
        raise UserError(
            f"{where}: no key {text_key!r} among {', '.join(map(repr, [*row][:8])) or 'none'}",
            "set Prepare.text_key to the key that holds the text",
        )
    text = row[text_key]
    if not isinstance(text, str):
        raise UserError(
            f"{where}: {text_key!r} holds {type(text).__name__}, not text",
            "set Prepare.text_key to the key that holds the text",
        )
    return require_text(text, where)


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
        numbered = enumerate(iter(rows))
    except Exception as error:  # `datasets` raises whatever its many readers raise
        raise UserError(
            f"{source}: cannot be loaded: {str(error).partition(chr(10))[0]}",
            "check the name, config and split; offline, give hf:// the folder of a local data set",
        ) from error
    for number, row in numbered:
        yield _text(f"{source} row {number}", row, text_key)

"""Lines of a corpus's files, compressed or not, and their rows: each is a document, or bad."""

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Any, NamedTuple, Protocol

import zstandard

from lathe_base.errors import Code, UserError
from lathe_base.inputs import MAX_LINE_BYTES, decode, lines, open_file, parse_json, require_text

JSON_LINES = {".jsonl", ".ndjson", ".json"}
COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
NOTICE_ENDINGS = {"", ".md", ".txt", ".rst"}
NOTICE = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|contributing|code_of_conduct)([-_. ]|$)",
    re.IGNORECASE,
)
MAX_WINDOW_BYTES = 1 << 31
"""Largest window of zstandard's 64-bit format, which `zstd --long=31` writes; the library's own
limit is 128 MiB."""

Takes = Callable[[int], bool]
"""Whether to read the row with this number."""


class Row(NamedTuple):
    """A row of a file.

    Attributes:
        number: in the file, from 0.
        text: returns the document; raises UserError, which names the row, if it is broken.
    """

    number: int
    text: Callable[[], str]


Rows = Iterator[Row]


class RowText(Protocol):
    """What the document of a row is."""

    @property
    def example(self) -> str:
        """A row, for messages."""

    def columns(self, names: Sequence[str], where: str) -> list[str]:
        """The columns of a table with these names that are read; raises UserError if it lacks the
        text."""

    def __call__(self, row: Any, where: str) -> str:
        """The document of a row, a mapping; raises UserError, which names `where`, if there is
        none."""


@dataclass(frozen=True)
class TextKey:
    """The document is the text under a key.

    Attributes:
        key: a key, or keys of mappings in mappings with a dot between them.
    """

    key: str

    HINT = "set Prepare.text_key to the key that holds the text"

    @property
    def example(self) -> str:
        """See `RowText`."""
        return f'{{"{self.key}": "..."}}'

    def columns(self, names: Sequence[str], where: str) -> list[str]:
        """The column of the key, or of the struct that has it."""
        column = self.key if self.key in names else self.key.partition(".")[0]
        if column not in names:
            raise UserError(
                f"{where}: no column {self.key!r} among {', '.join(map(repr, names[:8]))}",
                "set Prepare.text_key to the column that holds the text",
                Code.UNKNOWN_NAME,
            )
        return [column]

    def __call__(self, row: Any, where: str) -> str:
        """The text of a row; raises UserError, which names `where`, if there is none."""
        value, key = row, self.key
        while isinstance(value, Mapping) and key not in value and "." in key:
            first, _, rest = key.partition(".")
            if first not in value:
                break
            value, key = value[first], rest
        if not isinstance(value, Mapping) or key not in value:
            keys = [*value][:8] if isinstance(value, Mapping) else []
            named = ", ".join(map(repr, keys)) or "none"
            raise UserError(
                f"{where}: no key {self.key!r} among {named}", self.HINT, Code.UNKNOWN_NAME
            )
        text = value[key]
        if isinstance(text, bytes):  # a binary column: Parquet's strings without that annotation
            text = decode(text, f"{where}: {self.key!r}")
        if not isinstance(text, str):
            raise UserError(
                f"{where}: {self.key!r} holds {type(text).__name__}, not text",
                self.HINT,
                Code.MALFORMED,
            )
        return checked_text(text, where)


def checked_text(text: str, where: str) -> str:
    """The text; raises UserError, which names `where`, if it has characters that no text has."""
    if "\0" in text:
        raise UserError(
            f"{where}: its text contains a NUL character",
            "correct or remove the row",
            Code.MALFORMED,
        )
    return require_text(text, where)


def json_rows(path: Path, row_text: RowText, takes: Takes) -> Rows:
    """Read a file of JSON lines; empty lines are numbered, but yield nothing."""
    with unpacked(path) as file:
        for number, line in enumerate(byte_lines(file, str(path))):
            if takes(number) and line.strip():
                yield Row(number, partial(line_text, line, f"{path}:{number + 1}", row_text))


def line_text(line: bytes, where: str, row_text: RowText) -> str:
    """The text of a line; raises UserError, which names `where`, if it is broken."""
    text = decode(line, where).removeprefix("\ufeff")
    if not text.strip():
        return ""
    # A line that begins with a bracket is often that of one JSON array over many lines.
    hint = ""
    if text.lstrip().startswith("["):
        hint = "write one object per line; to convert an array: jq -c '.[]' FILE > FILE.jsonl"
    row = parse_json(text, where, hint or "correct or remove the line")
    if not isinstance(row, dict):
        hint = hint or f"write {row_text.example}"
        raise UserError(f"{where}: not a JSON object", hint, Code.MALFORMED)
    return row_text(row, where)


def text_lines(path: Path) -> Iterator[str]:
    """Yield decoded lines, decompressed and without line ends.

    Raises:
        UserError: as `lathe_base.inputs.lines`, or the file is truncated or not what its
            ending says.
    """
    with unpacked(path) as file:
        yield from lines(file, path)


def byte_lines(file: io.BufferedIOBase | IO[bytes], where: str) -> Iterator[bytes]:
    """Yield lines that may not be text.

    Raises:
        UserError: a line is longer than 256 MiB; names `where` and the line.
    """
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise UserError(
                f"{where}:{number}: a line of more than 256 MiB", "break it", Code.TOO_LARGE
            )
        yield line


@contextmanager
def unpacked(path: Path, ending: str | None = None) -> Iterator[io.BufferedIOBase | IO[bytes]]:
    """Open a file, decompressed.

    Args:
        ending: one of `COMPRESSED`, or another for an uncompressed file; by default the file's own.

    Raises:
        UserError: while it is read: it is truncated or not what its ending says.
    """
    with open_file(path) as file:
        try:
            yield decompressed(file, path.suffix.lower() if ending is None else ending)
        except (OSError, EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError) as error:
            # gzip and bz2 raise OSError of broken data, without a number, unlike the system.
            if isinstance(error, OSError) and error.errno:
                raise
            raise UserError(
                f"{path}: cannot be read: {error}",
                "check that the file is complete and has the right extension",
                Code.CORRUPT,
            ) from error


def decompressed(file: IO[bytes], ending: str) -> io.BufferedIOBase | IO[bytes]:
    """The file, decompressed if `ending` is one of `COMPRESSED`."""
    match ending:
        case ".gz":
            return gzip.GzipFile(fileobj=file)
        case ".bz2":
            return bz2.BZ2File(file)
        case ".xz":
            return lzma.LZMAFile(file)
        case ".zst":
            return io.BufferedReader(_Zstandard(file), 1 << 18)
    return file


class _Zstandard(io.RawIOBase):
    """Read one or more frames. The library's own reader ignores that a file is truncated."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        self._frame = self._decompressor.decompressobj()
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
                self._frame = self._decompressor.decompressobj()
            self._unpacked = memoryview(self._frame.decompress(self._packed))
            self._packed = self._frame.unused_data
        room = memoryview(buffer)
        count = min(len(room), len(self._unpacked))
        room[:count], self._unpacked = self._unpacked[:count], self._unpacked[count:]
        return count


def file_kind(path: PurePath) -> str:
    """The file name's extension, without that of the compression."""
    suffix = path.suffix.lower()
    return PurePosixPath(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def is_notice(path: PurePath) -> bool:
    """Whether a file is about the data beside it: its card, its license, its citation."""
    return path.suffix.lower() in NOTICE_ENDINGS and NOTICE.match(path.name) is not None

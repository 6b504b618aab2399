"""Lines of text files, compressed or not."""

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath, PurePosixPath
from typing import IO, Any

import zstandard

from lathe_base.errors import Code, UserError
from lathe_base.inputs import MAX_LINE_BYTES, lines, open_file

COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
NOTICE_ENDINGS = {"", ".md", ".txt", ".rst"}
NOTICE = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|contributing|code_of_conduct)([-_. ]|$)",
    re.IGNORECASE,
)
MAX_WINDOW_BYTES = 1 << 31
"""Largest window of zstandard's 64-bit format, which `zstd --long=31` writes; the library's own
limit is 128 MiB."""


def file_kind(path: PurePath) -> str:
    """The file name's extension, without that of the compression."""
    suffix = path.suffix.lower()
    return PurePosixPath(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def is_notice(path: PurePath) -> bool:
    """Whether a file is about the data beside it: its card, its license, its citation."""
    return path.suffix.lower() in NOTICE_ENDINGS and NOTICE.match(path.name) is not None


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
        Code.CORRUPT,
    )


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

"""Read users' files: only regular ones, with a one-line error for anything wrong with them.

A pipe, a socket or a device could block forever or never end, so it is refused without being
opened.
"""

import io
import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

from lathe_base.errors import Code, UserError, explain_os_error, printable

MAX_LINE_BYTES = 1 << 28  # text8 is one line of 100 MB
MAX_TEXT_BYTES = 1 << 30

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
MAGIC = {
    b"\xff\xfe": ("UTF-16", "convert it: iconv -f utf-16 -t utf-8"),
    b"\xfe\xff": ("UTF-16", "convert it: iconv -f utf-16 -t utf-8"),
    b"\x1f\x8b": ("gzip data", "give it a name that ends in .gz, or unpack it"),
    b"\xfd7zXZ\0": ("xz data", "give it a name that ends in .xz, or unpack it"),
    b"\x28\xb5\x2f\xfd": ("zstandard data", "give it a name that ends in .zst, or unpack it"),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"BZh": ("bzip2 data", "give it a name that ends in .bz2, or unpack it"),
    b"PAR1": ("Parquet", "give it a name that ends in .parquet"),
}


def require_file(path: Path, hint: str = "give a file") -> None:
    """Raise UserError unless `path` is a regular file, or a link to one; nothing is opened."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise explain_os_error(error, path) from None
    except ValueError:  # it contains a NUL
        raise UserError(f"{printable(path)}: not a path", "check the path", Code.BAD_PATH) from None
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        raise UserError(f"{printable(path)}: {kind}, not a file", hint, Code.WRONG_KIND)


@contextmanager
def open_file(path: Path, hint: str = "give a file") -> Iterator[BinaryIO]:
    """Open a regular file for reading bytes.

    Raises:
        UserError: it is not a regular file, or is not readable.
        StageError: the disk fails.
    """
    require_file(path, hint)
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise explain_os_error(error, path) from error


def read_text(path: Path, hint: str = "give a text file", characters: int | None = None) -> str:
    r"""The text of a UTF-8 file, without a byte-order mark and with `\n` as line end.

    Args:
        characters: read only this many from the beginning.

    Raises:
        UserError: not a regular file, not text, or larger than 1 GiB.
        StageError: the disk fails.
    """
    with open_file(path, hint) as file:
        if characters:
            data = file.read(4 * characters)  # a character has at most four bytes
        else:
            # The limit is checked while reading: files in /proc, for one, have no size.
            parts, size = [], 0
            while part := file.read(1 << 24):
                parts.append(part)
                size += len(part)
                if size > MAX_TEXT_BYTES:
                    raise UserError(
                        f"{path}: more than 1 GiB", "give a smaller file", Code.TOO_LARGE
                    )
            data = b"".join(parts)
    if characters:  # the last character may be incomplete
        data = data[: len(data) - _cut_bytes(data)]
    text = decode(data, str(path)).removeprefix("\ufeff")
    return text.replace("\r\n", "\n").replace("\r", "\n")[:characters]


def _cut_bytes(data: bytes) -> int:
    """Number of bytes at the end that are the beginning of an incomplete UTF-8 character."""
    # A byte from 0xC0 on begins a character of two to four bytes, those from 0x80 on continue one.
    for count in range(1, min(4, len(data)) + 1):
        byte = data[-count]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return count if length > count else 0
        if byte < 0x80:
            return 0
    return 0


def lines(file: io.BufferedIOBase | IO[bytes], path: Path) -> Iterator[str]:
    """Yield decoded lines, without line ends or byte-order mark, one in memory at a time.

    Raises:
        UserError: a line is not text, or is longer than 256 MiB; names the line.
    """
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise UserError(
                f"{path}:{number}: a line of more than 256 MiB",
                "break it into lines",
                Code.TOO_LARGE,
            )
        text = decode(line, f"{path}:{number}")
        yield (text.removeprefix("\ufeff") if number == 1 else text).rstrip("\r\n")


def decode(data: bytes, where: str) -> str:
    """Decode UTF-8 bytes.

    Raises:
        UserError: not UTF-8, or contains a NUL byte.
    """
    # Only to explain a failure: a text may begin with the same letters, such as `BZh` or `PAR1`.
    kind, hint = next((MAGIC[m] for m in MAGIC if data.startswith(m)), (None, ""))
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if kind:
            raise UserError(f"{where}: not UTF-8 text but {kind}", hint, Code.WRONG_KIND) from None
        raise UserError(
            f"{where}: not UTF-8: {error.reason} at byte {error.start}",
            "convert the file, for instance with iconv -t utf-8",
            Code.MALFORMED,
        ) from None
    if "\0" in text:
        raise UserError(
            f"{where}: not text{f' but {kind}' if kind else ''}: it contains a NUL byte",
            hint or "give a text file; one in UTF-16: iconv -f utf-16 -t utf-8",
            Code.WRONG_KIND if kind else Code.MALFORMED,
        )
    return text


def parse_json(text: str | bytes, where: str, hint: str, allow_nan: bool = True) -> Any:
    """Parse a JSON text.

    Args:
        allow_nan: accept NaN and the infinities, which JSON lacks but Python writes.

    Raises:
        UserError: invalid, not UTF-8, nested too deeply, or with a number of thousands of digits.
    """
    try:
        return json.loads(text, parse_constant=None if allow_nan else _refuse)
    except RecursionError:
        raise UserError(f"{where}: not JSON: nested too deeply", hint, Code.MALFORMED) from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: not JSON: not UTF-8 at byte {error.start}", hint, Code.MALFORMED
        ) from None
    except ValueError as error:
        raise UserError(
            f"{where}: not JSON: {str(error).partition(';')[0]}", hint, Code.MALFORMED
        ) from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number in JSON")


def first_mistake(error: Any) -> str:
    """The first mistake in a pydantic ValidationError, as `where: reason (found value)`.

    This module does not import pydantic, because some environments that use it lack pydantic.
    """
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    reason = first["msg"].removeprefix("Value error, ")
    excerpt = (
        f" (found {repr(first['input'])[:60]})" if where and first["type"] != "missing" else ""
    )
    return f"{where}: {reason}{excerpt}" if where else reason


def require_text(text: str, where: str) -> str:
    """Return the text; raises UserError if it has a lone surrogate, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: half of a surrogate pair at character {error.start}",
            "correct the text",
            Code.MALFORMED,
        ) from None
    return text


def argument_text(text: str, name: str) -> str:
    """Check that a text from the command line is UTF-8, whatever the locale.

    Raises:
        UserError: it is not.
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode()
    except UnicodeError:
        raise UserError(
            f"{name} {printable(text)}: not UTF-8",
            "convert it, for instance with iconv -t utf-8",
            Code.MALFORMED,
        ) from None

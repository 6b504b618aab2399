"""The documents of a corpus on local disk: counted, digested, and read again in order."""

import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import zstandard

from lathe.progress import bar

LEVEL = 1
"""Of compression: it costs less time than the disk saves."""


class Spool:
    """Documents in a file, a line of JSON each, compressed (zstd).

    Attributes:
        documents: how many.
        sha256: of the lines.
    """

    def __init__(self, path: Path, lines: Iterable[bytes], what: str) -> None:
        """Write the file.

        Args:
            lines: as `line` makes them.
            what: is done, for the progress bar.
        """
        self.path, self.documents = path, 0
        digest = hashlib.sha256()
        packer = zstandard.ZstdCompressor(LEVEL)
        with path.open("wb") as file, packer.stream_writer(file) as packed, bar(what) as progress:
            for line in lines:
                digest.update(line)
                packed.write(line)
                self.documents += 1
                progress.advance()
        self.sha256 = digest.hexdigest()

    def __iter__(self) -> Iterator[str]:
        return map(json.loads, read_lines(self.path))


def line(text: str) -> bytes:
    """The line of a document."""
    return json.dumps(text, ensure_ascii=False).encode() + b"\n"


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a spool's file."""
    with path.open("rb") as file:
        yield from io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file))

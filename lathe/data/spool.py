"""The documents of a corpus on local disk: counted, digested, and read again in order."""

import hashlib
import io
import json
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import zstandard

from lathe.data.samples import compute_boundaries
from lathe_base.progress import bar

log = logging.getLogger("lathe")

PIECE_CHARACTERS = 256
"""Minimum size of the pieces that a document is split into, in characters."""
LEVEL = 1
"""Compression level: faster than writing the uncompressed text."""


class Spool:
    """Documents in a file, a line of JSON each, compressed (zstd).

    Attributes:
        documents: how many.
        bytes: of the lines.
        sha256: of the lines.
    """

    def __init__(self, path: Path, lines: Iterable[bytes], what: str) -> None:
        """Write the file.

        Args:
            lines: as `line` makes them.
            what: is done, for the progress bar.
        """
        self.path, self.documents, self.bytes = path, 0, 0
        digest = hashlib.sha256()
        packer = zstandard.ZstdCompressor(LEVEL)
        with path.open("wb") as file, packer.stream_writer(file) as packed, bar(what) as progress:
            for line in lines:
                digest.update(line)
                packed.write(line)
                self.documents += 1
                self.bytes += len(line)
                progress.advance()
        self.sha256 = digest.hexdigest()

    def __iter__(self) -> Iterator[str]:
        return map(json.loads, read_lines(self.path))


def with_validation(spool: Spool, split: Sequence[float]) -> Spool:
    """The spool, or where its few documents leave no validation part, one of their pieces.

    Documents are cut into equal pieces, at the end of a line or a word, as many as give every part
    of the split its share; where the text is too short for that, at least a validation part.
    """
    _, first, end, _ = compute_boundaries(split, spool.documents)
    if not split[1] or first < end:
        return spool
    # Pieces for all parts of the split; or, of too short a text, for training and validation.
    characters = sum(map(len, spool))
    for shares in (split, split[:2]):
        pieces = math.ceil(sum(shares) / min(share for share in shares if share > 0))
        if characters >= pieces * PIECE_CHARACTERS:
            size = characters / pieces
            break
    else:
        return spool
    lines = (line(piece) for text in spool for piece in _pieces(text, round(len(text) / size)))
    cut = Spool(spool.path.with_name("pieces"), lines, "cut large documents")
    log.warning(
        "cut %d large document(s) into %d pieces: otherwise split %s has no validation part",
        *(spool.documents, cut.documents, ",".join(f"{share:g}" for share in split)),
    )
    return cut


def _pieces(text: str, count: int) -> Iterator[str]:
    """Cut a text into about `count` stripped pieces, within the last quarter of each."""
    begin = 0
    for i in range(1, count + 1):
        end = len(text) * i // count
        earliest = end - len(text) // count // 4
        if i < count:
            # At the last line end in that quarter, or else the last space, or else in a word.
            breaks = (text.rfind(mark, earliest, end) + 1 for mark in ("\n", " "))
            end = next((position for position in breaks if position), end)
        if piece := text[begin:end].strip():
            yield piece
        begin = end


def line(text: str) -> bytes:
    """The line of a document, whose own line breaks JSON escapes."""
    return json.dumps(text, ensure_ascii=False).encode() + b"\n"


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a spool's file."""
    with path.open("rb") as file:
        yield from io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file))

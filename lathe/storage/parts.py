"""How a file is cut into parts, and what a store says of them: their MD5, as ETag."""

import hashlib
import re
from pathlib import Path

MIB = 1 << 20
PART_BYTES = 8 * MIB
MOST_PARTS = 10_000  # of one object; S3's limit


def part_size(size: int) -> int:
    """Bytes of each part, but the last, of a file of `size` bytes: the same at every try."""
    return max(PART_BYTES, -(-size // (MOST_PARTS * MIB)) * MIB)


def part_count(size: int) -> int:
    return -(-size // part_size(size))


class Etag:
    """A store's ETag of an object, from its bytes: the MD5 of the whole, or, after an upload in
    parts, that of the parts' MD5s with their number (S3, MinIO, SeaweedFS)."""

    def __init__(self, in_parts: bool) -> None:
        self._in_parts, self._count, self._md5 = in_parts, 0, hashlib.md5()

    def update(self, part: bytes) -> None:
        """The next `part_size` bytes, or what is left."""
        self.add(hashlib.md5(part).digest() if self._in_parts else part)

    def add(self, md5: bytes) -> None:
        """The MD5 of the next part, where it is known."""
        self._count += 1
        self._md5.update(md5)

    def text(self) -> str:
        return self._md5.hexdigest() + (f"-{self._count}" if self._in_parts else "")


def is_md5(etag: str) -> bool:
    """Whether an ETag looks like such a digest; under encryption it may be another."""
    return re.fullmatch(r"[0-9a-f]{32}(-\d+)?", etag) is not None


def same_content(path: Path, etag: str) -> str | None:
    """The file's SHA-256 where a store's ETag says that it holds the same bytes, else None."""
    found, digest = Etag("-" in etag), hashlib.sha256()
    with path.open("rb") as file:
        size = part_size(path.stat().st_size)
        while data := file.read(size):
            digest.update(data)
            found.update(data)
    return digest.hexdigest() if found.text() == etag else None

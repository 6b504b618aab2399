"""Splits files into parts, and computes the ETags that a store derives from their MD5s."""

import hashlib
import re
from pathlib import Path

MIB = 1 << 20
PART_BYTES = 8 * MIB
MOST_PARTS = 10_000  # of one object; S3's limit


def part_size(size: int) -> int:
    """Bytes of each part but the last, for a file of `size` bytes; the same in every attempt."""
    return max(PART_BYTES, -(-size // (MOST_PARTS * MIB)) * MIB)


def part_count(size: int) -> int:
    """Number of parts of a file of this size."""
    return -(-size // part_size(size))


class Etag:
    """Computes a store's ETag of an object: the MD5 of its bytes or, after a multipart upload, the
    MD5 of the parts' MD5s and the number of parts (S3, MinIO, SeaweedFS)."""

    def __init__(self, in_parts: bool) -> None:
        self._in_parts, self._count, self._md5 = in_parts, 0, hashlib.md5()

    def update(self, part: bytes) -> None:
        """Add the next `part_size` bytes, or the rest."""
        self.add(hashlib.md5(part).digest() if self._in_parts else part)

    def add(self, md5: bytes) -> None:
        """Add the next part by its MD5."""
        self._count += 1
        self._md5.update(md5)

    def text(self) -> str:
        """The ETag of the parts so far."""
        return self._md5.hexdigest() + (f"-{self._count}" if self._in_parts else "")


def is_md5(etag: str) -> bool:
    """Whether an ETag looks like an MD5; with encryption it may still be something else."""
    return re.fullmatch(r"[0-9a-f]{32}(-\d+)?", etag) is not None


def same_content(path: Path, etag: str) -> str | None:
    """The file's SHA-256 if a store's ETag is that of the file's bytes, else None."""
    found, digest = Etag("-" in etag), hashlib.sha256()
    with path.open("rb") as file:
        size = part_size(path.stat().st_size)
        while data := file.read(size):
            digest.update(data)
            found.update(data)
    return digest.hexdigest() if found.text() == etag else None

"""How a file is cut into parts, and what a store says of them: their MD5, as ETag."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

MIB = 1 << 20
PART_BYTES = 8 * MIB
MOST_PARTS = 10_000  # of one object; S3's limit
# Kept with an object that was put in parts: without their size its ETag says nothing.
PART_BYTES_HEADER = "x-amz-meta-lathe-part-bytes"


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


def says_other(etag: str, expected: str, headers: Mapping[str, str] | None) -> bool:
    """Whether an answer's ETag is the digest of something else than what is `expected`.

    Nothing can be said where it is none: under encryption with a key of one's own (SSE-KMS,
    SSE-C, as the headers tell).
    """
    encrypted = any(
        name.lower().startswith("x-amz-server-side-encryption") and value != "AES256"
        for name, value in (headers or {}).items()
    )
    is_digest = re.fullmatch(r"[0-9a-f]{32}(-\d+)?", etag) is not None
    return not encrypted and is_digest and etag != expected


def same_content(path: Path, etag: str) -> str | None:
    """The file's SHA-256 where a store's ETag says that it holds the same bytes, else None."""
    found, digest = Etag("-" in etag), hashlib.sha256()
    with path.open("rb") as file:
        size = part_size(path.stat().st_size)
        while data := file.read(size):
            digest.update(data)
            found.update(data)
    return digest.hexdigest() if found.text() == etag else None

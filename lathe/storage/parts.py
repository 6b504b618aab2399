"""How a file is cut into parts, and what a store says of them: their MD5, as ETag."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

MIB = 1 << 20
PART_BYTES = 16 * MIB
MOST_PARTS = 10_000  # of one object; S3's limit


def part_size(size: int) -> int:
    """Bytes of each part, but the last, of a file of `size` bytes: the same at every try."""
    return max(PART_BYTES, -(-size // (MOST_PARTS * MIB)) * MIB)


def part_count(size: int) -> int:
    return -(-size // part_size(size))


def compound_etag(md5s: list[bytes]) -> str:
    """ETag of an object that was uploaded in parts, in S3, MinIO and SeaweedFS."""
    return f"{hashlib.md5(b''.join(md5s)).hexdigest()}-{len(md5s)}"


def says_other(etag: str, md5: str, headers: Mapping[str, str] | None) -> bool:
    """Whether an answer's ETag is the MD5 of something else than what was sent.

    Under encryption with a key of one's own (SSE-KMS, SSE-C) it is no MD5 at all.
    """
    encrypted = any(
        name.lower().startswith("x-amz-server-side-encryption") and value != "AES256"
        for name, value in (headers or {}).items()
    )
    return not encrypted and bool(re.fullmatch(r"[0-9a-f]{32}(-\d+)?", etag)) and etag != md5


def same_content(path: Path, etag: str) -> str | None:
    """The file's SHA-256 where a store's ETag says that it holds the same bytes, else None.

    An ETag is the MD5 of the whole, or `compound_etag` of the parts that Lathe cuts; of parts cut
    otherwise nothing can be said.
    """
    whole, parts, digest = hashlib.md5(), [], hashlib.sha256()
    in_parts = "-" in etag
    with path.open("rb") as file:
        size = part_size(path.stat().st_size)
        while data := file.read(size):
            digest.update(data)
            if in_parts:
                parts.append(hashlib.md5(data).digest())
            else:
                whole.update(data)
    found = compound_etag(parts) if in_parts else whole.hexdigest()
    return digest.hexdigest() if found == etag else None

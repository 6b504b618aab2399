"""Content identifiers of addresses and paths: short texts that change when the bytes do."""

import json
import uuid
from collections.abc import Mapping
from pathlib import Path

from lathe_base.errors import Code, UserError
from lathe_base.storage.failures import explained
from lathe_base.storage.files import digest, files_below
from lathe_base.storage.http import validator
from lathe_base.storage.stores import is_store, open_store, uri_scheme
from lathe_base.storage.verified import known_sha256

UNKNOWN = "unknown "
"""Prefix of identifiers for contents that cannot be identified without reading all of them."""


def content_id(location: str) -> str:
    """The content identifier of a path or address.

    For a local file it is the SHA-256; for a folder, that of the names and SHA-256 of all files
    except hidden ones. A large file is read only once, as long as its times do not change. In a
    store the ETags of the objects count, with their names and sizes, and on a web server the strong
    ETag or, without one, the length and modification time. If none of these is available, the
    result is unique.

    Raises:
        UserError: not found, or a store or server does not answer.
    """
    if is_store(location):
        with explained(location):
            store, key = open_store(location)
            stat = None if key.endswith("/") else store.stat(key)
            objects = {"": stat} if stat else store.list_below(key.removesuffix("/") + "/")
        if not objects:
            raise UserError(f"{location}: not found", "check the address", Code.NOT_FOUND)
        tags = {n: [o.etag or o.time.isoformat(), o.size] for n, o in objects.items()}
        return f"etag {_digest_names(tags)}"
    if uri_scheme(location) in ("http", "https"):
        with explained(location):
            version = validator(location)
        return f"http {version}" if version else unknown()
    path = Path(location)
    if path.is_file():
        return f"sha256 {known_sha256(path)}"
    if not path.is_dir():
        raise UserError(f"{location}: no such file or folder", "check the path", Code.NOT_FOUND)
    files = {n: known_sha256(p) for n, p in files_below(path) if p.is_file() and not _is_hidden(n)}
    return f"sha256 {_digest_names(files)}"


def unknown() -> str:
    """A unique identifier for contents that cannot be identified."""
    return UNKNOWN + uuid.uuid4().hex


def _digest_names(values: Mapping[str, object]) -> str:
    return digest(json.dumps(sorted(values.items())))


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))

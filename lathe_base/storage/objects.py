"""Small operations by address: exists, list, read, write, remove and identify.

A prefix that Lathe has uploaded has a manifest, which lists its files. It is put last, so that it
marks a complete prefix.
"""

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lathe_base.errors import Code, UserError
from lathe_base.storage.failures import CHANGED, MISSING, StoreError, explained, shown
from lathe_base.storage.files import digest, files_below, is_digest, known_sha256, require_relative
from lathe_base.storage.http import validator
from lathe_base.storage.object_store import (
    JSON,
    ObjectStore,
    Stored,
    is_store,
    open_store,
    uri_scheme,
)

MARKER = ".lathe.json"
# Present during an upload or a removal; without the marker, the prefix then counts as absent.
UNFINISHED = ".lathe.unfinished"
# A folder on this machine: what a fetch has downloaded so far.
STAGE = ".lathe.partial"
RESERVED_NAMES = (MARKER, UNFINISHED)

UNKNOWN = "unknown "
"""Prefix of identifiers for contents that cannot be identified without reading all of them."""


# --- manifests ---


@dataclass(frozen=True)
class Entry:
    """A file of a prefix: its size and digest."""

    size: int  # bytes
    sha256: str  # lower-case hex


def to_json(files: Mapping[str, Entry]) -> str:
    """The text of the marker: the files by their relative names, with `/`."""
    listed = {name: {"size": e.size, "sha256": e.sha256} for name, e in sorted(files.items())}
    return json.dumps({"files": listed}, indent=1, ensure_ascii=False) + "\n"


def from_json(text: str | bytes, where: str) -> dict[str, Entry]:
    """Parse what `to_json` wrote.

    Raises:
        UserError: not a manifest, or a name in it leads out of the folder; names `where`.
    """
    try:
        files = dict[str, Entry]()
        for name, value in json.loads(text)["files"].items():
            size, sha256 = value["size"], value["sha256"]
            if type(size) is not int or size < 0:
                raise ValueError(f"size {size!r}")
            if not is_digest(sha256):
                raise ValueError(f"sha256 {sha256!r}")
            files[name] = Entry(size=size, sha256=sha256)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{where}: not a Lathe manifest ({type(error).__name__}: {error})",
            "upload the folder again",
            Code.MALFORMED,
        ) from error
    for name in files:
        require_relative(name, where)
    return files


# --- operations ---


def exists(uri: str) -> bool:
    """Whether the object or complete prefix exists. A prefix is complete if it has a marker or, if
    Lathe did not upload it, any object. An address without a final `/` may be either."""
    with explained(uri):
        store, key = open_store(uri)
        if not key.endswith("/") and store.stat(key):
            return True
        prefix = key.removesuffix("/") + "/"
        if store.stat(prefix + MARKER):
            return True
        return not store.stat(prefix + UNFINISHED) and store.has_any(prefix)


def is_unfinished(names: Iterable[str]) -> bool:
    """Whether a prefix with these relative names has an unfinished upload or removal."""
    return UNFINISHED in names and MARKER not in names


def claim_address(uri: str) -> None:
    """Check, before any work, that the result may replace what is at an address: anything in a
    bucket, but in a folder only what Lathe wrote.

    Raises:
        UserError: something else is there, or it is not an address.
    """
    with explained(uri):
        store, key = open_store(uri)
        store.claim(key)


def remove(uri: str) -> None:
    """Remove an object, or all objects below a prefix, the marker first; missing ones are not an
    error. An address without a final `/` means both."""
    with explained(uri):
        store, key = open_store(uri)
        store.claim(key)
        if not key.endswith("/") and store.stat(key):
            store.delete([key])
        prefix = key.removesuffix("/") + "/"
        if below := store.list_below(prefix):
            mark_unfinished(store, prefix)
            store.delete([prefix + n for n in below if n not in RESERVED_NAMES])
            store.delete([prefix + UNFINISHED])  # last: until then no reader takes what is left


def mark_unfinished(store: ObjectStore, prefix: str) -> str:
    """Hide a prefix from readers until its marker is put.

    Returns:
        The content of UNFINISHED, unique to this change.
    """
    token = uuid.uuid4().hex
    # In this order: without marker and UNFINISHED, the prefix would pass for one that Lathe did not
    # upload, and be read in part.
    store.put(prefix + UNFINISHED, token.encode(), JSON)
    store.delete([prefix + MARKER])
    return token


def list_uris(uri: str) -> list[str]:
    """Addresses of the objects and prefixes directly below a prefix, oldest first; a prefix ends
    in `/`.

    The time of a prefix is that of its marker or, without one, of its newest object. Prefixes with
    an unfinished upload or removal are omitted.
    """
    with explained(uri):
        store, key = open_store(uri)
        prefix = key.removesuffix("/") + "/"
        below = store.list_below(prefix)
    children: dict[str, dict[str, Stored]] = {}
    for name, stored in below.items():
        child, slash, rest = name.partition("/")
        if child not in RESERVED_NAMES:
            children.setdefault(child + slash, {})[rest] = stored
    times = {
        child: members[MARKER].time
        if MARKER in members
        else max(stored.time for stored in members.values())
        for child, members in children.items()
        if not is_unfinished(members)
    }
    return [store.address(prefix + c) for c in sorted(times, key=lambda c: (times[c], c))]


def list_objects(uri: str) -> list[str]:
    """Addresses of all objects below a prefix, at any depth, oldest first."""
    with explained(uri):
        store, key = open_store(uri)
        below = store.list_below(key.removesuffix("/") + "/").values()
    return [store.address(stored.key) for stored in sorted(below, key=lambda o: (o.time, o.key))]


def read_text(uri: str) -> str:
    """The text of a small object.

    Raises:
        UserError: no such object, access denied, no answer, or not UTF-8.
    """
    with explained(uri):
        store, key = open_store(uri)
        return store.get(key).decode()


def write_text(uri: str, text: str) -> None:
    """Write a small object atomically: a reader sees either the old text or the new."""
    with explained(uri):
        store, key = open_store(uri)
        store.put(key, text.encode(), JSON)


def replace_text(uri: str, text: str, seen: str | None) -> None:
    """Replace a small object if its text is still `seen`, or if there still is none (None).

    Some stores have no conditional requests: there, another process can write between the check
    and the put.

    Raises:
        UserError: the text has changed; and as `write_text`.
    """
    with explained(uri):
        store, key = open_store(uri)
        # The ETag is taken before the text: if the object changes in between, the put is refused.
        stored = store.stat(key)
        if _text(store, key) == seen:
            try:
                store.put(key, text.encode(), JSON, if_match=stored.etag if stored else "")
                return
            except StoreError as error:
                if error.code not in CHANGED:
                    raise
                if _text(store, key) == text:  # an attempt had succeeded, and its answer was lost
                    return
    raise UserError(
        f"{shown(uri)}: changed by another process",
        "check its current contents, and run it again",
        Code.CHANGED,
    )


def _text(store: ObjectStore, key: str) -> str | None:
    try:
        return store.get(key).decode()
    except StoreError as error:
        if error.code in MISSING:
            return None
        raise


# --- content identifiers ---


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
        return f"etag {digest(json.dumps(sorted(tags.items())))}"
    if uri_scheme(location) in ("http", "https"):
        with explained(location):
            version = validator(location)
        return f"http {version}" if version else unknown()
    path = Path(location)
    if path.is_file():
        return f"sha256 {known_sha256(path)}"
    if not path.is_dir():
        raise UserError(f"{location}: no such file or folder", "check the path", Code.NOT_FOUND)
    files = {
        name: known_sha256(file)
        for name, file in files_below(path)
        if file.is_file() and not any(part.startswith(".") for part in name.split("/"))
    }
    return f"sha256 {digest(json.dumps(sorted(files.items())))}"


def unknown() -> str:
    """A unique identifier for contents that cannot be identified."""
    return UNKNOWN + uuid.uuid4().hex

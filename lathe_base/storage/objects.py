"""Small operations by address: exists, list, read, write and remove."""

import uuid
from collections.abc import Iterable

from lathe_base.errors import Code, UserError
from lathe_base.storage.failures import CHANGED, MISSING, StoreError, explained, shown
from lathe_base.storage.manifest import MARKER, RESERVED_NAMES, UNFINISHED
from lathe_base.storage.object_store import JSON, ObjectStore, Stored
from lathe_base.storage.stores import open_store


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

"""The small requests by address: is it there, what is below, read, write and remove."""

import uuid
from collections.abc import Iterable

from lathe.errors import UserError
from lathe.storage.failures import CHANGED, MISSING, StoreError, explained, shown
from lathe.storage.manifest import MARKER, OWN_NAMES, UNFINISHED
from lathe.storage.object_store import JSON, ObjectStore, Stored
from lathe.storage.stores import open_store


def exists(uri: str) -> bool:
    """Whether there is such an object, or a whole prefix: its marker, or, where Lathe did not put
    it, any object below it. An address without a final `/` may be either."""
    with explained(uri):
        store, key = open_store(uri)
        if not key.endswith("/") and store.stat(key):
            return True
        prefix = key.removesuffix("/") + "/"
        if store.stat(prefix + MARKER):
            return True
        return not store.stat(prefix + UNFINISHED) and store.has_any(prefix)


def is_unfinished(names: Iterable[str]) -> bool:
    """Whether a prefix with these relative names is between none and whole."""
    return UNFINISHED in names and MARKER not in names


def claim_address(uri: str) -> None:
    """Decide, before any work, whether its result may take the place of what is at an address: a
    bucket is Lathe's, of a folder only what Lathe has put there.

    Raises:
        UserError: it holds something else; it is no address.
    """
    with explained(uri):
        store, key = open_store(uri)
        store.claim(key)


def remove(uri: str) -> None:
    """Remove an object, or a prefix with all below it, its marker first; nothing there is no
    error. An address without a final `/` is both."""
    with explained(uri):
        store, key = open_store(uri)
        store.claim(key)
        if not key.endswith("/") and store.stat(key):
            store.delete([key])
        prefix = key.removesuffix("/") + "/"
        if below := store.list_below(prefix):
            begin_change(store, prefix)
            store.delete([prefix + n for n in below if n not in OWN_NAMES])
            store.delete([prefix + UNFINISHED])


def begin_change(store: ObjectStore, prefix: str) -> str:
    """From now on until the marker is put, a reader finds nothing at the prefix.

    The text that this change, and no later one, has put there as UNFINISHED.
    """
    token = uuid.uuid4().hex
    store.put(prefix + UNFINISHED, token.encode(), JSON)
    store.delete([prefix + MARKER])
    return token


def list_uris(uri: str) -> list[str]:
    """Addresses of what lies directly in a prefix, the oldest first; a prefix ends in `/`.

    A prefix is as old as its marker, or the newest object below it where it has none. One whose
    upload or removal has not ended is left out.
    """
    with explained(uri):
        store, key = open_store(uri)
        prefix = key.removesuffix("/") + "/"
        below = store.list_below(prefix)
    children: dict[str, dict[str, Stored]] = {}
    for name, stored in below.items():
        child, slash, rest = name.partition("/")
        if child not in OWN_NAMES:
            children.setdefault(child + slash, {})[rest] = stored
    times = {
        child: members[MARKER].time
        if MARKER in members
        else max(stored.time for stored in members.values())
        for child, members in children.items()
        if not is_unfinished(members)
    }
    return [store.address(prefix + c) for c in sorted(times, key=lambda c: (times[c], c))]


def read_text(uri: str) -> str:
    """The text of a small object.

    Raises:
        UserError: nothing there, refused, no answer, not UTF-8.
    """
    with explained(uri):
        store, key = open_store(uri)
        return store.get(key).decode()


def write_text(uri: str, text: str) -> None:
    """Put a small object, whole: a reader sees the old text or the new."""
    with explained(uri):
        store, key = open_store(uri)
        store.put(key, text.encode(), JSON)


def replace_text(uri: str, text: str, seen: str | None) -> None:
    """Put a small object in place of the text `seen`, or where there was none (None).

    A store without conditional requests, of which there are some, leaves the time between its two
    answers for another to write in.

    Raises:
        UserError: it holds another text by now; and as `write_text`.
    """
    with explained(uri):
        store, key = open_store(uri)
        found = store.stat(key)
        if _text(store, key) == seen:
            try:
                store.put(key, text.encode(), JSON, if_match=found.etag if found else "")
                return
            except StoreError as error:
                if error.code not in CHANGED:
                    raise
                if _text(store, key) == text:  # the answer to an attempt of ours was lost
                    return
    raise UserError(
        f"{shown(uri)}: another process has changed it meanwhile",
        "look at what is there now, and run it again",
    )


def _text(store: ObjectStore, key: str) -> str | None:
    try:
        return store.get(key).decode()
    except StoreError as error:
        if error.code in MISSING:
            return None
        raise

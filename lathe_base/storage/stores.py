"""Maps addresses to stores; only this module knows the schemes."""

from importlib import import_module

from lathe_base.storage.object_store import ObjectStore

STORES = {
    "s3": "lathe_base.storage.s3",
    "minio": "lathe_base.storage.s3",
    "file": "lathe_base.storage.local",
}
"""The module of each scheme, imported when it is first needed; its `open_store` takes an address
and returns the store and the key."""


def scheme_of(uri: str) -> str:
    """The text before the first colon, in lower case; empty without a colon. `urlsplit` would raise
    an error if what follows is malformed."""
    scheme, colon, _ = uri.partition(":")
    return scheme.lower() if colon else ""


def is_store(uri: str) -> bool:
    """Whether `uri` is, or is meant to be, an address in an object store."""
    return scheme_of(uri) in STORES


def open_store(uri: str) -> tuple[ObjectStore, str]:
    """The store and the key of an address.

    Raises:
        UserError: not an address, or the store's settings are wrong.
    """
    store, key = import_module(STORES[scheme_of(uri)]).open_store(uri)
    return store, key

"""Which store an address is of: the one place that knows the schemes."""

from importlib import import_module

from lathe.storage.object_store import ObjectStore

STORES = {
    "s3": "lathe.storage.s3",
    "minio": "lathe.storage.s3",
    "file": "lathe.storage.local",
}
"""The module of each scheme, imported when it is first needed; its `open_store` takes an address
and returns the store and the key."""


def scheme_of(uri: str) -> str:
    """What is before the first colon, empty without one; `urlsplit` raises where something after
    it is wrong."""
    scheme, colon, _ = uri.partition(":")
    return scheme.lower() if colon else ""


def is_store(uri: str) -> bool:
    """Whether it is, or is meant to be, an address in an object store."""
    return scheme_of(uri) in STORES


def open_store(uri: str) -> tuple[ObjectStore, str]:
    """The store and the key of an address.

    Raises:
        UserError: it is none, or the store's own settings are wrong.
    """
    store, key = import_module(STORES[scheme_of(uri)]).open_store(uri)
    return store, key

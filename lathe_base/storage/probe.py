"""Tries every kind of request that Lathe sends to a store, on its own objects."""

import hashlib
import uuid
from collections.abc import Callable

from lathe_base.errors import Code, UserError
from lathe_base.storage.failures import CHANGED, StoreError, explained
from lathe_base.storage.object_store import Sent, open_store
from lathe_base.storage.parts import PART_BYTES

TEXT = b"lathe"
FOLDER = ".lathe-doctor-"


class StoreProbe:
    """Objects in a new folder below an address; `delete` removes them.

    Every operation raises a UserError if the store rejects it, or returns a wrong result.
    """

    def __init__(self, root: str) -> None:
        self.folder = f"{root.rstrip('/')}/{FOLDER}{uuid.uuid4().hex}/"
        with explained(self.folder):
            self._store, self._prefix = open_store(self.folder)
        self._keys = [f"{self._prefix}{name}" for name in ("small", "large")]

    def operations(self) -> dict[str, Callable[[], str]]:
        """The operations in order, by name; each returns a description of its result."""
        return {
            "put": self.put,
            "get": self.get,
            "list": self.list,
            "multipart upload": self.multipart,
            "conditional put": self.conditional_put,
            "delete": self.delete,
        }

    def put(self) -> str:
        """Put a small object."""
        with explained(self.folder):
            self._store.put(self._keys[0], TEXT)
        return f"below {self.folder.rpartition(FOLDER)[0]}"

    def get(self) -> str:
        """Get the small object."""
        with explained(self.folder):
            content = self._store.get(self._keys[0])
        if content != TEXT:
            raise UserError(
                f"{self.folder}small: returned different bytes than were uploaded",
                "check the store",
                Code.CORRUPT,
            )
        return ""

    def list(self) -> str:
        """List the folder."""
        with explained(self.folder):
            names = self._store.list_below(self._prefix)
        if list(names) != ["small"]:
            raise UserError(
                f"{self.folder}: the uploaded object is not listed",
                "check the store",
                Code.SERVER_ERROR,
            )
        return ""

    def multipart(self) -> str:
        """Upload an object in two parts."""
        # Only the last part may be smaller than 5 MiB.
        parts = [bytes(PART_BYTES), TEXT]
        size = sum(map(len, parts))
        sent: list[Sent] = []
        with explained(self.folder), self._store.multipart(self._keys[1], size, False) as upload:
            for number, data in enumerate(parts, 1):
                md5 = hashlib.md5(data).digest()
                sent.append(Sent(len(data), md5, upload.put(number, data, md5)))
            upload.complete(sent)
        return f"{size >> 20} MiB in {len(parts)} parts"

    def conditional_put(self) -> str:
        """Put an object on condition that it does not exist, although it does.

        Returns:
            the consequence if the store replaces it anyway; empty if it refuses.
        """
        with explained(self.folder):
            try:
                self._store.put(self._keys[0], TEXT, if_match="")
            except StoreError as error:
                if error.code not in CHANGED:
                    raise
                return ""
        return "the store ignores conditional requests: one of two concurrent releases may be lost"

    def delete(self) -> str:
        """Delete the objects."""
        with explained(self.folder):
            self._store.delete(self._keys)
            left = self._store.has_any(self._prefix)
        if left:
            raise UserError(
                f"{self.folder}: not deleted", "give the keys permission to delete", Code.FORBIDDEN
            )
        return ""

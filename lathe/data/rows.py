"""The rows of a corpus's files: each one document, or broken."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from lathe.errors import UserError
from lathe.inputs import require_text

log = logging.getLogger("lathe")

NAMED = 5
"""Skipped rows that are named; the others are counted."""

Takes = Callable[[int], bool]
"""Whether the row of this number is wanted."""


class Row(NamedTuple):
    """A row of a file.

    Attributes:
        number: in the file, from 0.
        text: returns the document; raises UserError, which names the row, if it is broken.
    """

    number: int
    text: Callable[[], str]


Rows = Iterator[Row]


class BrokenRows:
    """What becomes of broken rows: the first one ends the reading, or they are counted.

    Attributes:
        skipped: how many.
    """

    def __init__(self, on_bad_row: Literal["fail", "skip"] = "fail") -> None:
        self.on_bad_row, self.skipped = on_bad_row, 0

    def text(self, row: Row) -> str | None:
        """The text of a row; None if it is broken and skipped.

        Raises:
            UserError: it is broken.
        """
        try:
            return row.text()
        except UserError as error:
            if self.on_bad_row == "fail":
                raise UserError(
                    error.what, f"{error.hint}; Prepare.on_bad_row=skip leaves such rows out"
                ) from None
            self.skipped += 1
            if self.skipped <= NAMED:
                log.warning("skipped: %s", error.what)
            return None

    def report(self) -> None:
        """Log how many rows were skipped, if there were any."""
        if self.skipped:
            log.warning("%s broken rows skipped", f"{self.skipped:,}")


def text_of(row: Any, text_key: str, where: str) -> str:
    """The text of a row, a mapping.

    Args:
        text_key: a key, or keys of mappings in mappings with a dot between them.

    Raises:
        UserError: there is none; names `where`.
    """
    hint = "set Prepare.text_key to the key that holds the text"
    value, key = row, text_key
    while isinstance(value, Mapping) and key not in value and "." in key:
        first, _, rest = key.partition(".")
        if first not in value:
            break
        value, key = value[first], rest
    if not isinstance(value, Mapping) or key not in value:
        keys = [*value][:8] if isinstance(value, Mapping) else []
        named = ", ".join(map(repr, keys)) or "none"
        raise UserError(f"{where}: no key {text_key!r} among {named}", hint)
    text = value[key]
    if not isinstance(text, str):
        raise UserError(f"{where}: {text_key!r} holds {type(text).__name__}, not text", hint)
    if "\0" in text:
        raise UserError(f"{where}: its text contains a NUL character", "correct or remove the row")
    return require_text(text, where)

"""Rows of a corpus's files: each is a document, or bad."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from lathe_base.errors import UserError
from lathe_base.inputs import decode, require_text

Takes = Callable[[int], bool]
"""Whether to read the row with this number."""


class Row(NamedTuple):
    """A row of a file.

    Attributes:
        number: in the file, from 0.
        text: returns the document; raises UserError, which names the row, if it is broken.
    """

    number: int
    text: Callable[[], str]


Rows = Iterator[Row]


def row_text(row: Any, text_key: str, where: str) -> str:
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
    if isinstance(text, bytes):  # a binary column: Parquet's strings without that annotation
        text = decode(text, f"{where}: {text_key!r}")
    if not isinstance(text, str):
        raise UserError(f"{where}: {text_key!r} holds {type(text).__name__}, not text", hint)
    if "\0" in text:
        raise UserError(f"{where}: its text contains a NUL character", "correct or remove the row")
    return require_text(text, where)

"""Rows of a corpus's files: each is a document, or bad."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lathe.data.text_lines import byte_lines, unpacked
from lathe_base.errors import Code, UserError
from lathe_base.inputs import decode, parse_json, require_text

JSON_LINES = {".jsonl", ".ndjson", ".json"}
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


class RowText(Protocol):
    """What the document of a row is."""

    @property
    def example(self) -> str:
        """A row, for messages."""

    def columns(self, names: Sequence[str], where: str) -> list[str]:
        """The columns of a table with these names that are read; raises UserError if it lacks the
        text."""

    def __call__(self, row: Any, where: str) -> str:
        """The document of a row, a mapping; raises UserError, which names `where`, if there is
        none."""


@dataclass(frozen=True)
class TextKey:
    """The document is the text under a key.

    Attributes:
        key: a key, or keys of mappings in mappings with a dot between them.
    """

    key: str

    HINT = "set Prepare.text_key to the key that holds the text"

    @property
    def example(self) -> str:
        """See `RowText`."""
        return f'{{"{self.key}": "..."}}'

    def columns(self, names: Sequence[str], where: str) -> list[str]:
        """The column of the key, or of the struct that has it."""
        column = self.key if self.key in names else self.key.partition(".")[0]
        if column not in names:
            raise UserError(
                f"{where}: no column {self.key!r} among {', '.join(map(repr, names[:8]))}",
                "set Prepare.text_key to the column that holds the text",
                Code.UNKNOWN_NAME,
            )
        return [column]

    def __call__(self, row: Any, where: str) -> str:
        """The text of a row; raises UserError, which names `where`, if there is none."""
        value, key = row, self.key
        while isinstance(value, Mapping) and key not in value and "." in key:
            first, _, rest = key.partition(".")
            if first not in value:
                break
            value, key = value[first], rest
        if not isinstance(value, Mapping) or key not in value:
            keys = [*value][:8] if isinstance(value, Mapping) else []
            named = ", ".join(map(repr, keys)) or "none"
            raise UserError(
                f"{where}: no key {self.key!r} among {named}", self.HINT, Code.UNKNOWN_NAME
            )
        text = value[key]
        if isinstance(text, bytes):  # a binary column: Parquet's strings without that annotation
            text = decode(text, f"{where}: {self.key!r}")
        if not isinstance(text, str):
            raise UserError(
                f"{where}: {self.key!r} holds {type(text).__name__}, not text",
                self.HINT,
                Code.MALFORMED,
            )
        return checked_text(text, where)


def checked_text(text: str, where: str) -> str:
    """The text; raises UserError, which names `where`, if it has characters that no text has."""
    if "\0" in text:
        raise UserError(
            f"{where}: its text contains a NUL character",
            "correct or remove the row",
            Code.MALFORMED,
        )
    return require_text(text, where)


def json_rows(path: Path, row_text: RowText, takes: Takes) -> Rows:
    """Read a file of JSON lines; empty lines are numbered, but yield nothing."""
    with unpacked(path) as file:
        for number, line in enumerate(byte_lines(file, str(path))):
            if takes(number) and line.strip():
                yield Row(number, partial(line_text, line, f"{path}:{number + 1}", row_text))


def line_text(line: bytes, where: str, row_text: RowText) -> str:
    """The text of a line; raises UserError, which names `where`, if it is broken."""
    text = decode(line, where).removeprefix("\ufeff")
    if not text.strip():
        return ""
    row = parse_json(text, where, _hint(text))
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object", _hint(text, row_text), Code.MALFORMED)
    return row_text(row, where)


def _hint(line: str, row_text: RowText | None = None) -> str:
    """Hint for a line that is not a JSON object: the file may be one JSON array over many lines."""
    if line.lstrip().startswith("["):
        return "write one object per line; to convert an array: jq -c '.[]' FILE > FILE.jsonl"
    return f"write {row_text.example}" if row_text else "correct or remove the line"

"""Rows of JSON lines: one object per line."""

from functools import partial
from pathlib import Path

from lathe.data.rows import Row, Rows, RowText, Takes
from lathe.data.text_lines import byte_lines, unpacked
from lathe_base.errors import UserError
from lathe_base.inputs import decode, parse_json

JSON_LINES = {".jsonl", ".ndjson", ".json"}


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
        raise UserError(f"{where}: not a JSON object", _hint(text, row_text))
    return row_text(row, where)


def _hint(line: str, row_text: RowText | None = None) -> str:
    """Hint for a line that is not a JSON object: the file may be one JSON array over many lines."""
    if line.lstrip().startswith("["):
        return "write one object per line; to convert an array: jq -c '.[]' FILE > FILE.jsonl"
    return f"write {row_text.example}" if row_text else "correct or remove the line"

"""Rows of JSON lines: one object per line."""

from functools import partial
from pathlib import Path

from lathe.data.rows import Row, Rows, Takes, row_text
from lathe.data.text_lines import byte_lines, unpacked
from lathe_base.errors import UserError
from lathe_base.inputs import decode, parse_json

JSON_LINES = {".jsonl", ".ndjson", ".json"}


def json_rows(path: Path, text_key: str, takes: Takes) -> Rows:
    """Read a file of JSON lines; empty lines are numbered, but yield nothing."""
    with unpacked(path) as file:
        for number, line in enumerate(byte_lines(file, str(path))):
            if takes(number) and line.strip():
                yield Row(number, partial(line_text, line, f"{path}:{number + 1}", text_key))


def line_text(line: bytes, where: str, text_key: str) -> str:
    """The text of a line; raises UserError, which names `where`, if it is broken."""
    text = decode(line, where).removeprefix("\ufeff")
    if not text.strip():
        return ""
    row = parse_json(text, where, _hint(text))
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object", _hint(text, text_key))
    return row_text(row, text_key, where)


def _hint(line: str, text_key: str = "") -> str:
    """Hint for a line that is not a JSON object: the file may be one JSON array over many lines."""
    if line.lstrip().startswith("["):
        return "write one object per line; to convert an array: jq -c '.[]' FILE > FILE.jsonl"
    return f'write {{"{text_key}": "..."}}' if text_key else "correct or remove the line"

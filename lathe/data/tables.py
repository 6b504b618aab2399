"""Rows of Parquet, Arrow and CSV files, a few in memory at a time.

pyarrow is imported where it is used: environments that read no tables, such as Paddle's, lack it.
"""

import csv
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lathe.data.rows import Row, Rows, RowText, Takes, text_lines
from lathe_base.errors import Code, UserError
from lathe_base.inputs import require_file

BATCH_ROWS = 256


def parquet_rows(path: Path, row_text: RowText, takes: Takes) -> Rows:
    """Read the column of the text, one row group after the other.

    Raises:
        UserError: not a Parquet file, a broken one, or one without such a column.
    """
    from pyarrow import parquet  # type: ignore[import-untyped]

    with _explained(path, "Parquet"), parquet.ParquetFile(path) as file:
        columns = row_text.columns(file.schema_arrow.names, str(path))
        yield from _rows(file.iter_batches(BATCH_ROWS, columns=columns), path, row_text, takes)


def arrow_rows(path: Path, row_text: RowText, takes: Takes) -> Rows:
    """Read an Arrow file, or a stream, which Hugging Face's `datasets` writes; raises as
    `parquet_rows` does."""
    import pyarrow as pa
    from pyarrow import ipc

    with _explained(path, "Arrow"), pa.memory_map(str(path)) as source:
        try:
            file = ipc.open_file(source)
            batches: Iterable[Any] = map(file.get_batch, range(file.num_record_batches))
        except pa.ArrowInvalid:
            source.seek(0)
            batches = file = ipc.open_stream(source)
        columns = row_text.columns(file.schema.names, str(path))
        slices = (
            batch.select(columns).slice(begin, BATCH_ROWS)
            for batch in batches
            for begin in range(0, batch.num_rows, BATCH_ROWS)
        )
        yield from _rows(slices, path, row_text, takes)


def _rows(batches: Iterable[Any], path: Path, row_text: RowText, takes: Takes) -> Rows:
    first = 0
    for batch in batches:
        # A cell becomes a Python string only when the row's text is read.
        for index in filter(lambda i: takes(first + i), range(batch.num_rows)):
            yield Row(first + index, partial(_cell, batch, index, row_text, path, first + index))
        first += batch.num_rows


def _cell(batch: Any, index: int, row_text: RowText, path: Path, number: int) -> str:
    where = f"{path}: row {number + 1}"
    try:
        row = {name: batch.column(name)[index].as_py() for name in batch.schema.names}
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: not UTF-8 at byte {error.start}", "remove the row", Code.MALFORMED
        ) from None
    return row_text(row, where)


@contextmanager
def _explained(path: Path, kind: str) -> Iterator[None]:
    import pyarrow as pa

    require_file(path)
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{path}: cannot be read as {kind}: {reason}",
            "check that the file is complete and has the right extension",
            Code.MALFORMED,
        ) from error


def csv_rows(path: Path, row_text: RowText, takes: Takes, delimiter: str = ",") -> Rows:
    """Read a CSV file whose first line names the columns.

    Raises:
        UserError: no column of this name; or the file is not text.
    """
    csv.field_size_limit(sys.maxsize)  # 128 KiB by default, less than a long document
    # The reader needs line ends for fields that contain them, in quotes. Without `strict` it would
    # take a broken row for another one.
    lines = (f"{line}\n" for line in text_lines(path))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    number = 0
    while True:
        try:
            cells = next(reader, None)
            if cells is None:
                return
            problem = None
        except csv.Error as error:
            cells, problem = [], str(error)
        if header is None:
            header = cells
            try:
                row_text.columns(header, str(path))
            except UserError as error:
                raise UserError(
                    f"{path}: {problem}" if problem else error.what,
                    f"put column names into the first line, and {error.hint}",
                    Code.MALFORMED if problem else error.code,
                ) from None
            continue
        if not cells and not problem:  # an empty line
            continue
        if takes(number):
            where = f"{path}:{reader.line_num}"
            yield Row(number, partial(_field, cells, header, row_text, where, problem))
        number += 1


def _field(
    cells: list[str], header: list[str], row_text: RowText, where: str, problem: str | None
) -> str:
    if problem is None and len(cells) != len(header):
        problem = f"{len(cells)} fields, not {len(header)}"
    if problem:
        raise UserError(f"{where}: not a CSV row: {problem}", "quote the fields", Code.MALFORMED)
    return row_text(dict(zip(header, cells, strict=True)), where)

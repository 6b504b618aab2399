"""Models side by side: parameters, bytes, perplexity, cloze accuracy, latency."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from lathe.errors import UserError
from lathe.evaluate.results import read_metrics
from lathe.model.config import read_config
from lathe.model.folder import WEIGHTS

ONNX = "model.onnx"


@dataclass(frozen=True)
class Candidate:
    """A model of the run; the first one of a report is what the others are compared with.

    Attributes:
        model: checkpoint folder, with `train.jsonl` where it was trained.
        evaluation: folder of `lathe evaluate`.
        exported: folder of `lathe export`.
    """

    name: str
    model: Path
    evaluation: Path | None = None
    exported: Path | None = None


@dataclass(frozen=True)
class Row:
    """Figures of one candidate; None where they were not measured.

    `accuracy` is of whole last words of the cloze set, `last_token_accuracy` of their last tokens,
    `word_perplexity` is of the words.
    `flops` are multiplications and additions of a forward pass, a token of the longest sequence;
    `n_bytes` is the ONNX file's, or the checkpoint's weights' where nothing was exported.
    """

    name: str
    n_params: int
    flops: float
    n_bytes: int
    perplexity: float | None = None
    perplexity_stderr: float | None = None
    accuracy: float | None = None
    accuracy_stderr: float | None = None
    last_token_accuracy: float | None = None
    last_token_stderr: float | None = None
    word_perplexity: float | None = None
    word_perplexity_stderr: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None


@dataclass(frozen=True)
class Cell:
    """A figure as it is shown: `12.9 MB`, its error `± 0.3`, to the first row `0.27x`."""

    value: str
    error: str = ""
    ratio: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.value, self.error, self.ratio) if part)


@dataclass(frozen=True)
class Column:
    title: str
    show: Callable[[float], str]
    of: Callable[[Row], float | None]
    stderr: Callable[[Row], float | None] | None = None
    has_ratio: bool = True

    def cell(self, row: Row, first: Row) -> Cell:
        value, reference = self.of(row), self.of(first)
        if value is None:
            return Cell("-")
        stderr = self.stderr(row) if self.stderr else None
        error = f"± {self.show(stderr).split(' ')[0]}" if stderr is not None else ""
        ratio = ""
        if self.has_ratio and row is not first and reference:
            ratio = f"{value / reference:.2f}x"
        return Cell(self.show(value), error, ratio)


COLUMNS = (
    Column("Parameters", lambda x: _scaled(x, ("", " k", " M", " B")), lambda r: r.n_params),
    Column("FLOPs, a token", lambda x: _scaled(x, ("", " k", " M", " G")), lambda r: r.flops),
    Column("File", lambda x: _scaled(x, (" B", " kB", " MB", " GB")), lambda r: r.n_bytes),
    Column(
        "Perplexity", lambda x: f"{x:.2f}", lambda r: r.perplexity, lambda r: r.perplexity_stderr
    ),
    Column(
        "Cloze accuracy",
        lambda x: f"{100 * x:.1f} %",
        lambda r: r.accuracy,
        lambda r: r.accuracy_stderr,
        has_ratio=False,
    ),
    Column(
        "Last-token accuracy",
        lambda x: f"{100 * x:.1f} %",
        lambda r: r.last_token_accuracy,
        lambda r: r.last_token_stderr,
        has_ratio=False,
    ),
    Column(
        "Cloze word perplexity",
        lambda x: f"{x:.0f}" if x >= 100 else f"{x:.2f}",
        lambda r: r.word_perplexity,
        lambda r: r.word_perplexity_stderr,
    ),
    Column("Prefill", lambda x: f"{x:.2f} ms", lambda r: r.prefill_ms),
    Column("Decode, a token", lambda x: f"{x:.2f} ms", lambda r: r.decode_ms),
)


def summarize(
    candidates: Sequence[Candidate], latency: Mapping[str, Mapping[str, float]] | None = None
) -> list[Row]:
    """Read the figures of every candidate; `latency` is by candidate name.

    Raises:
        UserError: no candidates, or a folder without what it should hold.
    """
    if not candidates:
        raise UserError("a report of no models", "give at least one model folder")
    return [_row(candidate, (latency or {}).get(candidate.name, {})) for candidate in candidates]


def cells(rows: Sequence[Row]) -> list[list[Cell]]:
    """One list a row, in the order of `columns(rows)`."""
    return [[column.cell(row, rows[0]) for column in columns(rows)] for row in rows]


def columns(rows: Sequence[Row]) -> list[Column]:
    """The columns that were measured for any row."""
    return [column for column in COLUMNS if any(column.of(row) is not None for row in rows)]


def summary_table(rows: Sequence[Row]) -> Table:
    """The table for a terminal, a column a model: `rich.print(summary_table(rows))`."""
    table = Table("", *(row.name for row in rows))
    for of_model in table.columns[1:]:
        of_model.justify = "right"
    for column, shown in zip(columns(rows), zip(*cells(rows), strict=True), strict=True):
        table.add_row(column.title, *map(str, shown))
    return table


def _row(candidate: Candidate, latency: Mapping[str, float]) -> Row:
    metrics = read_metrics(candidate.evaluation) if candidate.evaluation else {}
    cloze, text = metrics.get("cloze") or {}, metrics.get("text") or {}
    file = candidate.exported / ONNX if candidate.exported else candidate.model / WEIGHTS
    if not file.is_file():
        raise UserError(f"{file}: no such file", "give the folder that the stage wrote")
    config = read_config(candidate.model)
    return Row(
        name=candidate.name,
        n_params=config.n_params(),
        flops=config.flops_per_token(config.n_positions) / 3,
        n_bytes=file.stat().st_size,
        perplexity=text.get("perplexity"),
        perplexity_stderr=text.get("perplexity_stderr"),
        accuracy=cloze.get("accuracy"),
        accuracy_stderr=cloze.get("accuracy_stderr"),
        last_token_accuracy=cloze.get("last_token_accuracy"),
        last_token_stderr=cloze.get("last_token_accuracy_stderr"),
        word_perplexity=cloze.get("target_perplexity"),
        word_perplexity_stderr=cloze.get("target_perplexity_stderr"),
        prefill_ms=latency.get("prefill_ms"),
        decode_ms=latency.get("decode_ms"),
    )


def _scaled(value: float, units: Sequence[str]) -> str:
    """Three significant digits: 12_900_000 -> `12.9 MB`."""
    power = 0
    while value >= 999.5 and power < len(units) - 1:
        value, power = value / 1000, power + 1
    digits = f"{value:.0f}" if power == 0 or value >= 99.95 else f"{value:#.3g}"
    return digits + units[power]

"""The table that compares models: parameters, bytes, evaluation results, latency."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.table import Table
from scipy.stats import binomtest  # type: ignore[import-untyped]

from lathe.evaluate.comparison import Accuracy, Measure
from lathe.evaluate.evaluation_folder import STDERR, measured, read_metrics
from lathe.evaluate.tasks import SLOTS
from lathe.model.folder import WEIGHTS, CheckpointFolder, open_folder
from lathe_base.artifacts.kinds import open_export
from lathe_base.errors import Code, UserError
from lathe_serving.runtime.exported_model import n_bytes

ONNX = "model.onnx"


@dataclass(frozen=True)
class Candidate:
    """A model of the run; a report compares the others with the first.

    Attributes:
        model: checkpoint folder, with `train.jsonl` if it was trained.
        evaluation: folder of `lathe evaluate`.
        exported: folder of `lathe export`.
    """

    name: str
    model: Path
    evaluation: Path | None = None
    exported: Path | None = None

    @cached_property
    def checkpoint(self) -> CheckpointFolder:
        """The folder `model`, opened once for the whole report."""
        return open_folder(self.model)


def format_name(exported: Path | None) -> str:
    """`INT8` or `INT4`, from the export of a quantized model, if there is one."""
    return open_export(exported).flavour.upper() if exported else "INT8"


@dataclass(frozen=True)
class Score:
    """A figure of an evaluation task, with its standard error, over `n` units; `title` is the
    column's."""

    measure: Measure
    title: str
    value: float
    stderr: float | None
    n: int = field(default=0, compare=False)

    @property
    def interval(self) -> tuple[float, float]:
        """Its 95 % interval. That of a share is Wilson's (1927), also for 0 and 100 %, where the
        standard error is 0."""
        if isinstance(self.measure, Accuracy) and self.n:
            bounds = binomtest(round(self.n * self.value), self.n).proportion_ci(method="wilson")
            return float(bounds.low), float(bounds.high)
        reach = 1.96 * (self.stderr or 0.0)
        return self.value - reach, self.value + reach


@dataclass(frozen=True)
class Row:
    """Figures of one candidate; None if they were not measured.

    Attributes:
        scores: evaluation results by column name.

    `flops` are multiplications and additions of a forward pass, per token of the longest sequence;
    `n_bytes` is the size of the ONNX graph, or of the checkpoint's weights if nothing was exported.
    """

    name: str
    n_params: int
    flops: float | None
    n_bytes: int
    prefill_ms: float | None = None
    decode_ms: float | None = None
    scores: Mapping[str, Score] = field(default_factory=dict)

    @property
    def perplexity(self) -> float | None:
        """Perplexity of the held-out text."""
        score = self.scores.get("perplexity")
        return score.value if score else None

    def figures(self) -> dict[str, float | None]:
        """All figures by name, for a pipeline's metrics; `of_figures` reads them back."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        del values["name"], values["scores"]
        for key, score in self.scores.items():
            values |= {key: score.value, f"{key}{STDERR}": score.stderr}
        return values

    @classmethod
    def of_figures(cls, name: str, metrics: Mapping[str, float]) -> "Row":
        """The row of a model from its figures; those without a column are omitted."""
        # Metrics may be of a later version, with columns that this one does not know.
        names = {f.name for f in fields(cls)} - {"name", "scores"}
        values: dict[str, Any] = {key: value for key, value in metrics.items() if key in names}
        scores = {
            m.key: Score(m, m.title, metrics[m.key], metrics.get(f"{m.key}{STDERR}"))
            for task in SLOTS
            for m in task.measures
            if m.key in metrics
        }
        return cls(name=name, **values, scores=scores)


@dataclass(frozen=True)
class Cell:
    """A figure as text: `12.9 MB`, its standard error `± 0.3`, its ratio to the first row
    `0.27x`."""

    value: str
    error: str = ""
    ratio: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.value, self.error, self.ratio) if part)


@dataclass(frozen=True)
class Panel:
    """The chart of a column: title, axis label, and factor to the axis's unit."""

    title: str
    axis: str
    factor: float = 1.0


@dataclass(frozen=True)
class Column:
    """A column of the table: its title, figure and format."""

    title: str
    show: Callable[[float], str]
    of: Callable[[Row], float | None]
    stderr: Callable[[Row], float | None] | None = None
    interval: Callable[[Row], tuple[float, float] | None] | None = None
    has_ratio: bool = True
    panel: Panel | None = None

    def cell(self, row: Row, first: Row) -> Cell:
        """The cell of a row, with its ratio to the first row."""
        value, reference = self.of(row), self.of(first)
        if value is None:
            return Cell("-")
        stderr = self.stderr(row) if self.stderr else None
        # Without the unit, which the figure before it has.
        error = f"± {self.show(stderr).split(' ')[0]}" if stderr is not None else ""
        ratio = ""
        if self.has_ratio and row is not first and reference:
            ratio = f"{value / reference:.2f}x"
        return Cell(self.show(value), error, ratio)


SIZES = (
    Column("Parameters", lambda x: _scaled(x, ("", " k", " M", " B")), lambda r: r.n_params),
    Column("FLOPs per token", lambda x: _scaled(x, ("", " k", " M", " G")), lambda r: r.flops),
    Column(
        "File",
        lambda x: _scaled(x, (" B", " kB", " MB", " GB")),
        lambda r: r.n_bytes,
        panel=Panel("File size", "megabytes", 1e-6),
    ),
)
TIMES = (
    Column(
        "Prefill",
        lambda x: f"{x:.2f} ms",
        lambda r: r.prefill_ms,
        panel=Panel("Latency: prefill", "ms for the prompt, batch size 1"),
    ),
    Column(
        "Decode per token",
        lambda x: f"{x:.2f} ms",
        lambda r: r.decode_ms,
        panel=Panel("Latency: decode", "ms per generated token, batch size 1"),
    ),
)


def summarize(
    candidates: Sequence[Candidate], latency: Mapping[str, Mapping[str, float]] | None = None
) -> list[Row]:
    """Read the figures of every candidate; `latency` is by candidate name.

    Raises:
        UserError: no candidates, or a folder that lacks its files.
    """
    if not candidates:
        raise UserError(
            "no models to report", "give at least one model folder", Code.MISSING_OPTION
        )
    return [_row(candidate, (latency or {}).get(candidate.name, {})) for candidate in candidates]


def cells(rows: Sequence[Row]) -> list[list[Cell]]:
    """One list per row, in the order of `columns(rows)`."""
    return [[column.cell(row, rows[0]) for column in columns(rows)] for row in rows]


def columns(rows: Sequence[Row]) -> list[Column]:
    """The columns with a figure in any row."""
    # Any row may be the only one with a figure; the first that has it decides the order.
    scores = {key: score for row in rows for key, score in row.scores.items()}

    def score_column(key: str, score: Score) -> Column:
        """The column of a task's measure; the title of its chart says which direction is better."""
        measure = score.measure
        better = "higher" if measure.higher_is_better else "lower"
        panel = Panel(
            f"{score.title}, {better} is better",
            f"{measure.axis}, with 95 % interval",
            measure.factor,
        )
        return Column(
            score.title,
            measure.show,
            lambda row: row.scores[key].value if key in row.scores else None,
            lambda row: row.scores[key].stderr if key in row.scores else None,
            lambda row: row.scores[key].interval if key in row.scores else None,
            measure.has_ratio,
            panel if measure.axis else None,
        )

    tasks = [score_column(key, score) for key, score in scores.items()]
    every = (*SIZES, *tasks, *TIMES)
    return [column for column in every if any(column.of(row) is not None for row in rows)]


def summary_table(rows: Sequence[Row]) -> Table:
    """The table for a terminal, one column per model: `rich.print(summary_table(rows))`."""
    table = Table("", *(row.name for row in rows))
    for model in table.columns[1:]:
        model.justify = "right"
    for column, shown in zip(columns(rows), zip(*cells(rows), strict=True), strict=True):
        table.add_row(column.title, *map(str, shown))
    return table


def _row(candidate: Candidate, latency: Mapping[str, float]) -> Row:
    scores = {}
    if evaluation := candidate.evaluation:
        for result in measured(read_metrics(evaluation), evaluation):
            n = int(result.figures[result.task.unit])
            for measure, value, stderr in result.scores():
                key = f"{result.name}.{measure.key}" if result.is_named else measure.key
                scores[key] = Score(measure, result.label(measure), value, stderr, n)
    # What is served counts, if there is one.
    file = candidate.exported / ONNX if candidate.exported else candidate.model / WEIGHTS
    if not file.is_file():
        raise UserError(
            f"{file}: no such file", "give the folder written by the stage", Code.NOT_FOUND
        )
    config = candidate.checkpoint.config
    return Row(
        name=candidate.name,
        n_params=config.n_params,
        flops=config.flops_per_token(config.n_positions) / 3,  # without the backward pass
        n_bytes=n_bytes(file.parent) if candidate.exported else file.stat().st_size,
        prefill_ms=latency.get("prefill_ms"),
        decode_ms=latency.get("decode_ms"),
        scores=scores,
    )


def _scaled(value: float, units: Sequence[str]) -> str:
    """Three significant digits: 12_900_000 -> `12.9 MB`."""
    power = 0
    # 999.5 and 99.95 round up to a fourth digit.
    while value >= 999.5 and power < len(units) - 1:
        value, power = value / 1000, power + 1
    digits = f"{value:.0f}" if power == 0 or value >= 99.95 else f"{value:#.3g}"
    return digits + units[power]

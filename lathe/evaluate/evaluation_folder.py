"""An evaluation folder: the figures of `lathe evaluate`, and the units over which they are
averaged."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lathe.evaluate.comparison import Measure, Units
from lathe.evaluate.tasks import CLOZE, SLOTS, TEXT, task_named
from lathe.evaluate.tasks.task import Task
from lathe_base.artifacts.kinds import EVALUATION, read_intact
from lathe_base.artifacts.metadata import EvaluationMetadata
from lathe_base.errors import Code, UserError

METRICS = EVALUATION.metadata_file
UNITS = {CLOZE.name: "examples.jsonl", TEXT.name: "blocks.jsonl"}
KEYS = ("model", "cloze", "text", "protocol", "sources", "digests", "seconds")
HINT = "evaluate the model again"
STDERR = "_stderr"
"""Suffix of a standard error's name."""


@dataclass(frozen=True)
class TaskResult:
    """The result of one task in `metrics.json`.

    Attributes:
        name: the task's name for cloze and text, else the file's without `.jsonl`.
        figures: means with their standard errors, and the number of units.
        digest: SHA-256 of the file.
    """

    name: str
    task: Task[Any, Any]
    figures: Mapping[str, Any]
    digest: str | None

    @property
    def is_named(self) -> bool:
        """Whether it is named after the file, not the task."""
        return self.task not in SLOTS

    def scores(self) -> Iterator[tuple[Measure, float, float | None]]:
        """Yield every measure with its figure and standard error."""
        for measure in self.task.measures:
            value = self.figures.get(measure.key)
            if value is not None:
                yield measure, value, self.figures.get(f"{measure.key}{STDERR}")

    def label(self, measure: Measure) -> str:
        """The name of a figure in tables and charts."""
        return f"{self.name} {measure.title}" if self.is_named else measure.title

    def metrics(self) -> dict[str, float]:
        """The figures by their metric names, and the number of units."""
        names = {m.key: m.metric or m.key for m in self.task.measures}
        names |= {key: key for key in self.task.extra}
        prefix = f"{self.name}." if self.is_named else ""
        values = {f"{self.name}_{self.task.unit}": self.figures[self.task.unit]}
        for key, name in names.items():
            for ending in ("", STDERR):
                if (value := self.figures.get(f"{key}{ending}")) is not None:
                    values[f"{prefix}{name}{ending}"] = value
        return values


@dataclass(frozen=True)
class Evaluation:
    """The measurements of one model.

    Attributes:
        metrics: `metrics.json`.
        measured: the results, by name.
        units: the scores of every result's units, by name.
    """

    folder: Path
    metrics: dict[str, Any]
    measured: Mapping[str, TaskResult]
    units: Mapping[str, Units]


def units_file(name: str) -> str:
    """The file of an evaluation folder with the units of the result `name`, one per line."""
    return UNITS.get(name, f"tasks/{name}.jsonl")


def read_evaluation(folder: Path, cluster_by: str | None = None) -> Evaluation:
    """Read all of an evaluation folder.

    Args:
        cluster_by: the key of a unit that names its document.

    Raises:
        UserError: there is none, or it is broken or incomplete.
    """
    metrics = read_metrics(folder)
    results = {result.name: result for result in measured(metrics, folder)}
    units = {}
    for name, result in results.items():
        path = folder / units_file(name)
        rows = _read_rows(path, result.figures[result.task.unit])
        units[name] = Units(
            *(path, result.figures, rows, cluster_by, result.task.is_stream),
            vocab_size=metrics["vocab_size"],
        )
    return Evaluation(folder, metrics, results, units)


def read_metrics(folder: Path) -> dict[str, Any]:
    """`metrics.json` of an evaluation folder.

    Raises:
        UserError: there is none, or it is broken.
    """
    path = folder / METRICS
    if not path.is_file():
        raise UserError(
            f"{folder}: no {METRICS}",
            "give the folder that `lathe evaluate` wrote",
            Code.WRONG_KIND,
        )
    metadata = read_intact(folder, METRICS, EvaluationMetadata, HINT)
    return {key: metadata.raw[key] for key in KEYS} | {
        key: metadata.raw.get(key, absent)
        for key, absent in (("tasks", {}), ("contamination", {}), ("vocab_size", None))
    }


def measured(metrics: Mapping[str, Any], folder: Path) -> list[TaskResult]:
    """The results in `metrics.json`, in the order in which tables show them.

    Args:
        folder: the evaluation folder, for messages.

    Raises:
        UserError: an unknown task, or one without its figures.
    """
    digests = metrics["digests"]
    measurements = [
        TaskResult(task.name, task, metrics[task.name], digests.get(task.name))
        for task in SLOTS
        if metrics[task.name]
    ]
    for name, entry in metrics["tasks"].items():
        task = task_named(entry["task"], f"{folder}: {HINT}")
        figures = entry["figures"]
        for key in (task.unit, *(measure.key for measure in task.measures)):
            if not isinstance(figures.get(key), int | float):
                raise UserError(
                    f"{folder / METRICS}: tasks.{name}.figures.{key}: missing",
                    HINT,
                    Code.INCOMPLETE,
                )
        measurements.append(TaskResult(name, task, figures, entry["sha256"]))
    return measurements


def _read_rows(path: Path, n: int) -> list[dict[str, Any]]:
    """The `n` lines of a JSONL file."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        raise UserError(f"{path}: no such file", HINT, Code.INCOMPLETE) from None
    except (OSError, RecursionError, ValueError):
        raise UserError(f"{path}: broken", HINT, Code.MALFORMED) from None
    if len(rows) != n:
        raise UserError(f"{path}: {len(rows)} lines, {METRICS} counts {n}", HINT, Code.INCOMPLETE)
    return rows

"""An evaluation folder: the figures of `lathe evaluate`, the units over which they are averaged,
and the pairs of two folders that the gate compares."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lathe.evaluate.comparison import Accuracy, Measure, Pair, Pairing, Units
from lathe.evaluate.tasks import CLOZE, SLOTS, TEXT, task_named
from lathe.evaluate.tasks.task import Task
from lathe_base.artifacts.kinds import EVALUATION, read_intact
from lathe_base.artifacts.metadata import EvaluationMetadata
from lathe_base.errors import Code, UserError
from lathe_base.storage import digest

METRICS = EVALUATION.metadata_file
UNITS = {CLOZE.name: "examples.jsonl", TEXT.name: "blocks.jsonl"}
KEYS = ("model", "cloze", "text", "protocol", "sources", "digests", "seconds")
HINT = "evaluate the model again"
STDERR = "_stderr"
"""Suffix of a standard error's name."""
PARTS = ("protocol", "sources", "digests", "contamination")
"""Keys of `metrics.json` that a verdict repeats."""


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
        path, n = folder / units_file(name), result.figures[result.task.unit]
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except FileNotFoundError:
            raise UserError(f"{path}: no such file", HINT, Code.INCOMPLETE) from None
        except (OSError, RecursionError, ValueError):
            raise UserError(f"{path}: broken", HINT, Code.MALFORMED) from None
        if len(rows) != n:
            raise UserError(
                f"{path}: {len(rows)} lines, {METRICS} counts {n}", HINT, Code.INCOMPLETE
            )
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
    # Earlier versions wrote neither tasks nor contamination.
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
        # An earlier version may have written fewer figures: say so here, not with a KeyError later.
        for key in (task.unit, *(measure.key for measure in task.measures)):
            if not isinstance(figures.get(key), int | float):
                raise UserError(
                    f"{folder / METRICS}: tasks.{name}.figures.{key}: missing",
                    HINT,
                    Code.INCOMPLETE,
                )
        measurements.append(TaskResult(name, task, figures, entry["sha256"]))
    return measurements


def pair_evaluations(baseline: Path, candidate: Path, cluster_by: str | None) -> Pairing:
    """Pair two folders of `lathe evaluate`.

    Args:
        cluster_by: the key of an example that names its document.

    Raises:
        UserError: a folder is not an evaluation, or the two were measured on different data, or
            with a different tokenizer or protocol.
    """
    before, after = read_evaluation(baseline, cluster_by), read_evaluation(candidate, cluster_by)

    # Units are compared one by one, so both models must have been asked exactly the same.
    hint = "evaluate both models on the same data with the same recipe"
    names = f"{before.folder} and {after.folder}"
    a, b = _data_digests(before), _data_digests(after)
    for name in dict.fromkeys((*a, *b)):
        if a.get(name) != b.get(name):
            shown = [sha[:12] if sha else "none" for sha in (a.get(name), b.get(name))]
            raise UserError(
                f"{names} differ in {name}: {shown[0]} against {shown[1]}", hint, Code.MISMATCH
            )
    # Windows and limits of answers change the figures as much as the data does.
    ours, theirs = before.metrics["protocol"], after.metrics["protocol"]
    precisions = {ours.get("dtype"), theirs.get("dtype")}
    if len(precisions) > 1:
        hint = "evaluate both models with Offline_Eval.dtype=float32"
    if ours != theirs:
        raise UserError(f"{names} differ in protocol: {ours} against {theirs}", hint, Code.MISMATCH)
    if any(len(before.units[name].rows) != len(after.units[name].rows) for name in before.units):
        raise UserError(f"{names} have different examples or blocks", hint, Code.MISMATCH)

    pairs, notes = [], []
    for name, result in before.measured.items():
        for measure in result.task.measures:
            label = result.label(measure) if result.is_named else measure.title.lower()
            pairs.append(Pair(label, measure, before.units[name], after.units[name]))
        if result.task.generates and any(
            before.units[name].noise_floor(measure.column) is None
            for measure in result.task.measures
            if isinstance(measure, Accuracy)
        ):
            notes.append(
                f"{name}: the noise floor is unknown: evaluate the baseline with "
                "Offline_Eval.noise_floor=True and without a reference"
            )
    # The candidate is its model on its data: on other data, it is looked at again.
    live, new = (evaluation.metrics["digests"].get("model") or "" for evaluation in (before, after))
    return Pairing(
        pairs=tuple(pairs),
        before=_description(before),
        after=_description(after),
        baseline=live,
        candidate=digest(json.dumps([new, b])),
        notes=tuple(notes),
    )


def _data_digests(evaluation: Evaluation) -> dict[str, str | None]:
    """SHA-256 of a model's evaluation data, by name."""
    tokenizer = evaluation.metrics["digests"].get("tokenizer")
    results = evaluation.measured.items()
    return {**{name: result.digest for name, result in results}, "tokenizer": tokenizer}


def _description(evaluation: Evaluation) -> dict[str, Any]:
    """Description of one side for the verdict's file."""
    parts = {name: evaluation.metrics[name] for name in PARTS}
    digests = {name: r.digest for name, r in evaluation.measured.items() if r.is_named}
    return {"folder": str(evaluation.folder), **parts, "digests": parts["digests"] | digests}

"""Pair the samples of two runs of lm-evaluation-harness (0.4), document by document.

It writes them with `--log_samples`. A run is a folder with `samples_TASK_DATE.jsonl`, a line per
document and filter, and beside them `results_DATE.json`, with the aggregated figures and which
direction of a metric is better. Only numbers and hashes are kept in memory.
"""

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from lathe.evaluate.comparison import (
    Accuracy,
    MeanCost,
    MeanScore,
    Measure,
    Pair,
    Pairing,
    Perplexity,
    Units,
)
from lathe_base.errors import Code, UserError
from lathe_base.inputs import first_mistake, lines, open_file, parse_json, read_text
from lathe_base.storage import digest, sha256

log = logging.getLogger("lathe")

SAME_RUNS_HINT = "run lm_eval with the same tasks, filters and settings on both models"
HIGHER_IS_BETTER = {"acc", "acc_norm", "acc_mutual_info", "acc_bytes", "exact_match", "em", "f1"}
"""Metrics whose direction is known without the results of the run."""
PER_WEIGHT = {"word_perplexity", "byte_perplexity"}
"""Metrics with two numbers per document: a log-likelihood, and its words or bytes."""
TOLERANCE = 1e-6
"""Difference at which a run's own figure is not the mean over its documents."""

HINT = "give the output of `lm_eval --log_samples --output_path FOLDER`"
SAMPLES = re.compile(r"samples_(?P<task>.+?)(_(?P<date>\d{4}-\d\d-\d\dT[\d.-]+))?\.jsonl")
PARTS = ("document", "prompt", "target")

Key = tuple[str, int | str]
"""Filter and `doc_id` of a line."""


@dataclass(frozen=True)
class LoggedSample:
    """A model's scores on one document, after one filter.

    Attributes:
        hashes: of document, prompt and target.
        values: the metrics: a number, a list of numbers, or None for anything else.
        document: the cluster of the document, if its key is given and present.
    """

    hashes: tuple[str, ...]
    values: Mapping[str, Any]
    document: str | None


@dataclass(frozen=True)
class LoggedTask:
    """The samples of one task.

    Attributes:
        results: the whole `results_DATE.json`; empty without one.
    """

    name: str
    path: Path
    sha256: str
    samples: Mapping[Key, LoggedSample]
    results: Mapping[str, Any]

    def result(self, *keys: str) -> Any:
        """An entry of the results in the group `keys[0]`, of this task; further keys select within
        it. None if there is none: versions of lm-eval differ in what they write."""
        entry: Any = self.results
        for key in (keys[0], self.name, *keys[1:]):
            entry = entry.get(key) if isinstance(entry, dict) else None
        return entry


def pair_logged(baseline: Path, candidate: Path, cluster_by: str | None) -> Pairing:
    """Pair two folders, or files, of lm-eval's samples by filter and `doc_id`.

    A metric of zeros and ones becomes an accuracy, `perplexity` and its relatives a perplexity, and
    any other number the mean of a score or a cost. A metric is skipped, with a note, if its values
    are not numbers, if the run's own figure is not their mean, or if it is unknown which direction
    is better.

    Args:
        cluster_by: the key of a document by which samples are clustered.

    Raises:
        UserError: a broken file; different tasks, versions, filters, metrics, documents, prompts or
            targets; or no metric that can be compared.
    """
    before, after = read_logged(baseline, cluster_by), read_logged(candidate, cluster_by)
    pairs: list[Pair] = []
    notes: list[str] = []
    _require_same(f"{baseline} and {candidate}", "tasks", before, after)
    for name in before:
        for pair in _pair_task(before[name], after[name]):
            if isinstance(pair, Pair):
                pairs.append(pair)
            else:
                notes.append(pair)
    if not pairs:
        raise UserError(
            f"{baseline}: no metric can be compared: {'; '.join(notes)}",
            SAME_RUNS_HINT,
            Code.MISMATCH,
        )
    described = (_described(baseline, before), _described(candidate, after))
    a, b = (digest("".join(logged.sha256 for logged in run.values())) for run in (before, after))
    return Pairing(tuple(pairs), *described, a, b, tuple(notes))


def _described(path: Path, run: Mapping[str, LoggedTask]) -> dict[str, Any]:
    """Description of a run for the verdict's file."""
    results = next(iter(run.values())).results
    return {
        "folder": str(path),
        "model": results.get("model_name"),
        "lm_eval": results.get("lm_eval_version"),
        "digests": {name: task.sha256 for name, task in run.items()},
    }


def _require_same(names: str, what: str, before: object, after: object) -> None:
    a, b = (set(value) if isinstance(value, dict | set) else {value} for value in (before, after))
    if a != b:
        shown = [", ".join(sorted(map(str, side))) or "none" for side in (a - b, b - a)]
        raise UserError(
            f"{names} differ in {what}: {shown[0]} against {shown[1]}",
            SAME_RUNS_HINT,
            Code.MISMATCH,
        )


def _pair_task(before: LoggedTask, after: LoggedTask) -> Iterator[Pair | str]:
    # The tasks are the same, and so are their documents, prompts and targets, one by one.
    names = f"{before.path} and {after.path}"
    versions = [task.result("versions") for task in (before, after)]
    if None not in versions:
        _require_same(names, "version", *map(str, versions))
    _require_same(names, "filters", *({key[0] for key in t.samples} for t in (before, after)))
    for ours, theirs, path in ((before, after, after.path), (after, before, before.path)):
        # In both directions: either may have more.
        if missing := [key[1] for key in ours.samples if key not in theirs.samples]:
            few = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
            raise UserError(
                f"{path}: lacks {len(missing)} samples: doc_id {few}", SAME_RUNS_HINT, Code.MISMATCH
            )
    for key, sample in before.samples.items():
        other = after.samples[key]
        for part, a, b in zip(PARTS, sample.hashes, other.hashes, strict=True):
            if a != b:
                raise UserError(
                    f"{names}: doc_id {key[1]} has a different {part} in each",
                    SAME_RUNS_HINT,
                    Code.MISMATCH,
                )
        _require_same(f"{names}: doc_id {key[1]}", "metrics", set(sample.values), set(other.values))

    for filter_name in dict.fromkeys(key[0] for key in before.samples):
        keys = [key for key in before.samples if key[0] == filter_name]
        metrics = dict.fromkeys(name for key in keys for name in before.samples[key].values)
        for metric in metrics:
            yield _pair_metric(before, after, keys, metric)


def _pair_metric(
    before: LoggedTask, after: LoggedTask, keys: Sequence[Key], metric: str
) -> Pair | str:
    """The pair for one metric and filter, or the reason why there is none."""
    filter_name = keys[0][0]
    name = f"{before.name} {metric}" + (f" ({filter_name})" if filter_name != "none" else "")

    # A row per document: the value, and for word and byte perplexities its weight.
    size = 2 if metric in PER_WEIGHT else 1
    units = []
    for task in (before, after):
        rows = []
        for sample in (task.samples[key] for key in keys):
            value = sample.values.get(metric)
            parts = value if isinstance(value, list) else [value]
            if len(parts) != size or None in parts:
                return f"{name} is skipped: it is not one number per document"
            rows.append({"value": parts[0], "weight": parts[-1], "document": sample.document})
        units.append(Units(task.path, {}, rows))
    first, second = units

    measure = _measure(before, metric, first, second)
    if measure is None:
        return f"{name} is skipped: no results_*.json says whether higher is better"
    # Some figures are no means over documents, such as the F1 of a corpus: their paired
    # differences would say nothing about them.
    for task, unit in ((before, first), (after, second)):
        reported = task.result("results", f"{metric},{filter_name}")
        overall = measure.overall(unit)
        if isinstance(reported, int | float) and not math.isclose(
            reported, overall, rel_tol=TOLERANCE, abs_tol=TOLERANCE
        ):
            return (
                f"{name} is skipped: the run's {reported:.6g} is not a mean over documents, "
                f"which is {overall:.6g}"
            )
    return Pair(name, measure, first, second)


def _measure(task: LoggedTask, metric: str, first: Units, second: Units) -> Measure | None:
    """The comparison method of a metric; None if it is unknown which direction is better."""
    if metric == "perplexity" or metric in PER_WEIGHT:
        weighted = metric in PER_WEIGHT
        return Perplexity(
            key=metric,
            title=metric,
            loss=lambda units: -units.column("value"),
            tokens=lambda units: units.column("weight") if weighted else np.ones(len(units.rows)),
            method="linearized ratio over documents" if weighted else "paired Student's t",
            unit="documents",
            margin=lambda gate: gate.max_perplexity_increase,
        )
    higher = task.result("higher_is_better", metric)
    if higher is None and metric in HIGHER_IS_BETTER:
        higher = True
    if not isinstance(higher, bool):
        return None
    values = np.concatenate([first.column("value"), second.column("value")])
    # Zeros and ones are answers that are right or wrong, to which McNemar's test applies.
    if higher and np.isin(values, (0.0, 1.0)).all():
        return Accuracy(
            key=metric,
            title=metric,
            column="value",
            margin=lambda gate: gate.max_task_accuracy_drop,
        )
    # The margin for accuracies also fits other scores from 0 to 1; a score in another unit is
    # tested only with a margin of its own, of `Gate.margins`.
    is_share = bool((values >= 0).all() and (values <= 1).all())
    kind = MeanScore if higher else MeanCost
    return kind(
        key=metric,
        title=metric,
        column="value",
        margin=lambda gate: gate.max_task_accuracy_drop if is_share else None,
    )


class SampleLine(BaseModel):
    """A line of the samples; its other keys are the metrics. Early versions wrote no hashes."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    doc_id: int | str
    doc: Any = None
    target: Any = None
    arguments: Any = None
    resps: Any = None
    filtered_resps: Any = None
    filter: str = "none"
    metrics: list[str] | None = None
    doc_hash: str | None = None
    prompt_hash: str | None = None
    target_hash: str | None = None

    def hashes(self) -> tuple[str, ...]:
        """Hashes of the document, the prompt and the target."""
        recorded = (self.doc_hash, self.prompt_hash, self.target_hash)
        contents = (self.doc, self.arguments, self.target)
        return tuple(
            actual or digest(json.dumps(content, sort_keys=True))
            for actual, content in zip(recorded, contents, strict=True)
        )

    def values(self) -> dict[str, Any]:
        """The metrics by name; values other than a number or a list of numbers are None."""
        fields = (
            self.model_extra or {}
        )  # early versions do not list the metrics, and log nothing else
        return {name: _number(fields.get(name)) for name in self.metrics or fields}


def is_logged(path: Path) -> bool:
    """Whether this is a file or a folder of samples."""
    return path.suffix == ".jsonl" if path.is_file() else bool(_sample_files(path))


def read_logged(path: Path, cluster_by: str | None = None) -> dict[str, LoggedTask]:
    """The tasks of a run, by name: of a folder, or of one file of samples.

    Args:
        cluster_by: the key of a document by which samples are clustered, such as `title`.

    Raises:
        UserError: a broken or truncated file, or a folder with the samples of several models.
    """
    files = [path] if path.is_file() else _sample_files(path)
    if len({file.parent for file in files}) > 1:
        folders = sorted({file.parent.name for file in files})
        raise UserError(
            f"{path}: samples of several models: {', '.join(folders)}", "give one", Code.AMBIGUOUS
        )
    latest: dict[str, tuple[str, Path]] = {}
    for file in files:
        match = SAMPLES.fullmatch(file.name)
        task, date = (match["task"], match["date"] or "") if match else (file.stem, "")
        if task in latest:
            log.info("%s: several runs of %s: using the latest", path, task)
        # ISO dates sort as text.
        latest[task] = max(latest.get(task, ("", file)), (date, file))
    return {task: _read_task(task, *latest[task], cluster_by) for task in sorted(latest)}


def _sample_files(folder: Path) -> list[Path]:
    """The samples files in a folder, or else in its subfolders, one per model."""
    if not folder.is_dir():
        return []
    here = sorted(folder.glob("samples_*.jsonl"))
    return here or sorted(folder.glob("*/samples_*.jsonl"))


def _read_task(name: str, date: str, path: Path, cluster_by: str | None) -> LoggedTask:
    samples: dict[Key, LoggedSample] = {}
    with open_file(path, HINT) as file:
        for number, text in enumerate(lines(file, path), start=1):
            if not text.strip():
                continue
            where = f"{path}:{number}"
            try:
                values = parse_json(text, f"{where}: malformed line", HINT)
                line = SampleLine.model_validate(values)
            except ValidationError as error:
                raise UserError(
                    f"{where}: malformed line: {first_mistake(error)}", HINT, Code.MALFORMED
                ) from None
            key = (line.filter, line.doc_id)
            if key in samples:
                raise UserError(
                    f"{where}: duplicate doc_id {line.doc_id} ({line.filter})", HINT, Code.DUPLICATE
                )
            is_clustered = isinstance(line.doc, dict) and cluster_by
            # Documents may be anything, also a list or a text.
            cluster = line.doc.get(cluster_by) if is_clustered else None
            document = None if cluster is None else str(cluster)
            samples[key] = LoggedSample(line.hashes(), line.values(), document)
    if not samples:
        raise UserError(f"{path}: no samples", HINT, Code.TOO_LITTLE_DATA)

    # The aggregated results of the run, if they are next to the samples.
    results: dict[str, Any] = {}
    if date and (files := sorted(path.parent.glob(f"*_{date}.json"))):
        results = parse_json(read_text(files[0], HINT), str(files[0]), HINT)
        if not isinstance(results, dict):
            raise UserError(f"{files[0]}: not lm_eval results", HINT, Code.WRONG_KIND)
    task = LoggedTask(name, path, sha256(path), samples, results)
    expected = task.result("n-samples", "effective")
    documents = len({doc_id for _, doc_id in samples})
    # Whole lines may be missing, which only the count shows.
    if isinstance(expected, int) and documents != expected:
        raise UserError(
            f"{path}: {documents} documents, but the run's results count {expected}",
            "the file is incomplete: run lm_eval again",
            Code.INCOMPLETE,
        )
    return task


def _number(value: Any) -> Any:
    """A number, or a list of numbers; numpy's are written as text (`True`, `0.5`)."""
    if isinstance(value, list | tuple):
        parts = [_number(part) for part in value]
        return None if not parts or any(not isinstance(p, float) for p in parts) else parts
    if isinstance(value, str):
        value = {"True": 1.0, "False": 0.0}.get(value, value)
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None

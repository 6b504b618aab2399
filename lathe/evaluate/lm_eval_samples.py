"""Read what lm-evaluation-harness (0.4) writes with `--log_samples`.

A run is a folder with `samples_TASK_DATE.jsonl`, a line per document and filter, and beside them
`results_DATE.json`, with the aggregated figures and which direction of a metric is better. Only
numbers and hashes are kept in memory.
"""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from lathe_base.errors import UserError
from lathe_base.inputs import first_mistake, lines, open_file, parse_json, read_text
from lathe_base.storage import digest, sha256

log = logging.getLogger("lathe")

HINT = "give the output of `lm_eval --log_samples --output_path FOLDER`"
SAMPLES = re.compile(r"samples_(?P<task>.+?)(_(?P<date>\d{4}-\d\d-\d\dT[\d.-]+))?\.jsonl")
PARTS = ("document", "prompt", "target")

Key = tuple[str, int | str]
"""Filter and `doc_id` of a line."""


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
        fields = self.model_extra or {}
        return {name: _number(fields.get(name)) for name in self.metrics or fields}


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

    def of_results(self, group: str, key: str) -> Any:
        """An entry of the task in a group of the results, or None."""
        of_task = self.in_results(group)
        return of_task.get(key) if isinstance(of_task, dict) else None

    def in_results(self, group: str) -> Any:
        """The task's entry in a group of the results, or None."""
        result = self.results.get(group)
        return result.get(self.name) if isinstance(result, dict) else None


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
        raise UserError(f"{path}: samples of several models: {', '.join(folders)}", "give one")
    latest: dict[str, tuple[str, Path]] = {}
    for file in files:
        match = SAMPLES.fullmatch(file.name)
        task, date = (match["task"], match["date"] or "") if match else (file.stem, "")
        if task in latest:
            log.info("%s: several runs of %s: using the latest", path, task)
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
                raise UserError(f"{where}: malformed line: {first_mistake(error)}", HINT) from None
            key = (line.filter, line.doc_id)
            if key in samples:
                raise UserError(f"{where}: duplicate doc_id {line.doc_id} ({line.filter})", HINT)
            is_clustered = isinstance(line.doc, dict) and cluster_by
            cluster = line.doc.get(cluster_by) if is_clustered else None
            document = None if cluster is None else str(cluster)
            samples[key] = LoggedSample(line.hashes(), line.values(), document)
    if not samples:
        raise UserError(f"{path}: no samples", HINT)
    task = LoggedTask(name, path, sha256(path), samples, _results(path.parent, date))
    expected = task.of_results("n-samples", "effective")
    documents = len({doc_id for _, doc_id in samples})
    if isinstance(expected, int) and documents != expected:
        raise UserError(
            f"{path}: {documents} documents, but the run's results count {expected}",
            "the file is incomplete: run lm_eval again",
        )
    return task


def _results(folder: Path, date: str) -> dict[str, Any]:
    """The aggregated results of the run, if they are next to the samples."""
    files = sorted(folder.glob(f"*_{date}.json")) if date else []
    if not files:
        return {}
    values = parse_json(read_text(files[0], HINT), str(files[0]), HINT)
    if not isinstance(values, dict):
        raise UserError(f"{files[0]}: not lm_eval results", HINT)
    return values


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

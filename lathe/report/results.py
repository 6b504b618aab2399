"""The results of a pipeline run: the metrics, verdict and report of its last steps.

They are read from the steps' artifacts, `<pipeline root>/<pipeline>/<run>/<step>/<execution>/
<artifact>` in the object store, or below the folder of a local run. Pipelines' own API (2.17) does
not return a step's outputs.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from lathe.evaluate.wording import outcome
from lathe.report.summary import Row, summary_table
from lathe_base import storage
from lathe_base.errors import UserError

RECORDED = re.compile(r"(?:^|/)(?:report|choose|gate)(?:-\d+)?/(?:[^/]+/)?(metrics|page|verdict)$")
"""Artifacts of the steps that summarize a run, in any sub-pipeline."""


@dataclass(frozen=True)
class Results:
    """The results of one run.

    Attributes:
        rows: the models' figures, the dense one's first; empty without a report.
        best: figures of the model chosen by the pipeline `compress`.
        verdict: the gate's, in the words of `lathe.evaluate.wording.outcome`; empty without a gate.
        reasons: those of the gate, a sentence each.
        page: address or path of the HTML report; empty without one.
    """

    rows: tuple[Row, ...] = ()
    best: dict[str, float] | None = None
    verdict: str = ""
    reasons: tuple[str, ...] = ()
    page: str = ""

    def table(self) -> Table:
        """The table that `make run` prints."""
        if self.best is None:
            return summary_table(self.rows)
        table = Table("", "chosen")
        for name, value in self.best.items():
            table.add_row(name, f"{value:.4g}")
        return table


def read_results(location: str) -> Results:
    """The results below a folder or an address; the latest of each kind.

    Raises:
        UserError: the store does not answer, or rejects the keys; or a file is not a step's output.
    """
    names: Iterable[str]  # oldest first
    if storage.is_store(location):
        names = storage.list_objects(location)
    else:
        paths = [x for x in Path(location).rglob("*") if x.is_file() and not x.is_symlink()]
        names = map(str, sorted(paths, key=lambda path: path.stat().st_mtime))
    files: dict[str, str] = {}
    for name in names:
        if match := RECORDED.search(name):
            step = name[match.start() :].strip("/").partition("/")[0].partition("-")[0]
            files[f"{step}/{match[1]}"] = name
    metrics = _json(files, "report/metrics")
    verdict = _json(files, "gate/verdict")
    return Results(
        tuple(rows(metrics)),
        _json(files, "choose/metrics") or None,
        outcome(verdict.get("verdict", ""), verdict.get("passed", False)),
        tuple(verdict.get("reasons", ())),
        files.get("report/page") or files.get("choose/page") or "",
    )


def _json(files: dict[str, str], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        values = json.loads(read_text(files[name]))
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise UserError(f"{files[name]}: not the output of a step", "run the pipeline again")
    return values


def read_text(name: str) -> str:
    """The text of a file or of an object."""
    return storage.read_text(name) if storage.is_store(name) else Path(name).read_text("utf-8")


def rows(metrics: dict[str, float]) -> list[Row]:
    """The report's rows, from metrics named `dense.perplexity`."""
    table: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        name, _, field = key.partition(".")
        table.setdefault(name, {})[field] = value
    return [Row.of_figures(name, values) for name, values in table.items()]

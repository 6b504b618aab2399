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


def read_results(place: str) -> Results:
    """The results below a folder or an address; the latest of each kind.

    Raises:
        UserError: the store does not answer, or rejects the keys; or a file is not a step's output.
    """
    found: dict[str, str] = {}
    for name in _names(place):
        if match := RECORDED.search(name):
            step = name[match.start() :].strip("/").partition("/")[0].partition("-")[0]
            found[f"{step}/{match[1]}"] = name
    figures = _json(found, "report/metrics")
    verdict = _json(found, "gate/verdict")
    return Results(
        tuple(rows(figures)),
        _json(found, "choose/metrics") or None,
        outcome(verdict.get("verdict", ""), verdict.get("passed", False)),
        tuple(verdict.get("reasons", ())),
        found.get("report/page") or found.get("choose/page") or "",
    )


def _names(place: str) -> Iterable[str]:
    """Paths or addresses of all files below a location, oldest first."""
    if storage.is_store(place):
        return storage.list_objects(place)
    files = (path for path in Path(place).rglob("*") if path.is_file() and not path.is_symlink())
    return map(str, sorted(files, key=lambda path: path.stat().st_mtime))


def _json(found: dict[str, str], name: str) -> dict[str, Any]:
    if name not in found:
        return {}
    try:
        values = json.loads(read_text(found[name]))
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise UserError(f"{found[name]}: not the output of a step", "run the pipeline again")
    return values


def read_text(name: str) -> str:
    """The text of a file or of an object."""
    return storage.read_text(name) if storage.is_store(name) else Path(name).read_text("utf-8")


def rows(figures: dict[str, float]) -> list[Row]:
    """The report's rows, from metrics named `dense.perplexity`."""
    found: dict[str, dict[str, float]] = {}
    for key, value in figures.items():
        name, _, field = key.partition(".")
        found.setdefault(name, {})[field] = value
    return [Row.of_figures(name, values) for name, values in found.items()]

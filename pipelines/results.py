"""What a run has made: the figures, the verdict and the page that its steps have recorded.

They are read from where the steps put them, `<pipeline root>/<pipeline>/<run>/<step>/<execution>/
<artifact>` in the object store, or below the folder of a local run. Pipelines' own API (2.17) says
nothing of a step's outputs.
"""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.table import Table

from lathe import storage
from lathe.errors import StageError, UserError
from lathe.report.summary import Row, summary_table
from pipelines.cluster import config_map, open_cluster
from pipelines.compile import FUNCTIONS
from pipelines.inputs import STORE_SECONDS, within
from pipelines.pods import Pods
from pipelines.server import Client
from pipelines.summary import rows

RECORDED = re.compile(r"(?:^|/)(?:report|choose|gate)(?:-\d+)?/(?:[^/]+/)?(metrics|page|verdict)$")
"""Artifacts of the steps that sum a run up, in whatever sub-pipeline they are."""
ROOT, LAUNCHER = "LATHE_PIPELINE_ROOT", "kfp-launcher"
KEYS = ("AWS_ACCESS_KEY_ID", "LATHE_S3_SECRET_DIR")
VERDICTS = {"pass": "passed", "fail": "failed"}


@dataclass(frozen=True)
class Results:
    """What one run has recorded.

    Attributes:
        rows: the models' figures, the dense one's first; empty without a report.
        best: figures of the model that the pipeline `compress` has chosen.
        verdict: `passed`, `failed` or `inconclusive`, as the gate found; empty without a gate.
        reasons: the gate's, a sentence each.
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
    """The results below a folder or an address; of several of a kind, the latest.

    Raises:
        UserError: the store does not answer, or refuses the keys; or a file is not what a step
            has written.
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
        VERDICTS.get(verdict.get("verdict", ""), verdict.get("verdict", "")),
        tuple(verdict.get("reasons", ())),
        found.get("report/page") or found.get("choose/page") or "",
    )


def results_of_logs(pods: Pods) -> Results:
    """What the logs of a run's pods say, while they are there; they have no page, and of the
    verdict only whether the gate let the model through.

    Raises:
        UserError, StageError: the pods cannot be listed.
    """
    found = pods.figures(("report", "choose", "gate"))
    verdict = ""
    if gate := found.get("gate"):
        verdict = "passed" if gate.get("passed") else "failed"
    return Results(tuple(rows(found.get("report", {}))), found.get("choose") or None, verdict)


def _names(place: str) -> Iterable[str]:
    """Paths or addresses of all files below, oldest first."""
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
        raise UserError(f"{found[name]}: not what a step writes", "run the pipeline again")
    return values


def read_text(name: str) -> str:
    """The text of a file or of an object."""
    return storage.read_text(name) if storage.is_store(name) else Path(name).read_text("utf-8")


class ResultsReader:
    """Reads the results of runs on the cluster."""

    def __init__(self, client: Client) -> None:
        self._namespace = client.steps_namespace

    def read(self, run: Any) -> Results:
        """The results of a run; empty ones where its steps have recorded nothing.

        Raises:
            UserError: they cannot be read from here; the hint says what to set.
        """
        root = self.root_of(run)
        # The folder has the pipeline's own name, and a run's display name begins with it.
        for name in sorted(FUNCTIONS, key=lambda name: name not in (run.display_name or "")):
            place = f"{root}/{name}/{run.run_id}/"
            results: Results = within(STORE_SECONDS, place, read_results, place)
            if results != Results():
                return results
        return Results()

    def root_of(self, run: Any) -> str:
        """The address below which the run's artifacts are.

        Raises:
            UserError: it is not known, or cannot be read from here.
        """
        root = run.runtime_config.pipeline_root if run.runtime_config else None
        root = (root or self._root).partition("?")[0].rstrip("/")
        _check_store(root)
        return root

    @cached_property
    def _root(self) -> str:
        """As the environment says, or else the namespace's own."""
        if given := os.environ.get(ROOT):
            return given
        try:
            root = config_map(open_cluster(self._namespace), LAUNCHER).get("defaultPipelineRoot")
            reason = f"the ConfigMap {LAUNCHER} cannot be read"
        except StageError as error:
            root, reason = None, str(error)
        if root:
            return root
        raise UserError(
            f"where the server puts artifacts is not known: {reason}",
            f"set {ROOT} to the defaultPipelineRoot of the ConfigMap {LAUNCHER}",
        )


def _check_store(root: str) -> None:
    scheme = urlsplit(root).scheme
    if scheme not in ("s3", "minio"):
        raise UserError(f"{root}: not on S3", "look at the report in the UI")
    if not any(os.environ.get(key) for key in KEYS):
        raise UserError(
            f"{root}: no keys of the store are set here",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and AWS_ENDPOINT_URL where it is "
            "not Amazon's",
        )
    if scheme == "minio" and not os.environ.get("AWS_ENDPOINT_URL"):
        raise UserError(
            f"{root}: where this store is reached from here is not set",
            "set AWS_ENDPOINT_URL; for the store of Pipelines: kubectl -n kubeflow port-forward "
            "svc/seaweedfs 9000:9000, and http://localhost:9000",
        )

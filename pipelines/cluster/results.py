"""Reads the results of runs on the cluster, from the store or else from their pods' logs."""

import os
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from lathe.report.results import Results, read_results, rows
from lathe_base.errors import Code, StageError, UserError
from lathe_base.storage import uri_scheme
from lathe_launch.cluster.doctor import PIPELINES_ROOT
from lathe_launch.usage import PREFIX
from pipelines.cluster.pods import Pods
from pipelines.cluster.server import Client, config_map, open_cluster
from pipelines.commands.inputs import STORE_SECONDS, within
from pipelines.compiler.compile import FUNCTIONS

ROOT, LAUNCHER = "LATHE_PIPELINE_ROOT", "kfp-launcher"
KEYS = ("AWS_ACCESS_KEY_ID", "LATHE_S3_SECRET_DIR")


def results_from_logs(pods: Pods) -> Results:
    """Results from the logs of a run's pods, while they exist: no report, and only the gate's
    decision as verdict.

    Raises:
        UserError, StageError: the pods cannot be listed.
    """
    metrics_by_step = pods.figures(("report", "choose", "gate"))
    verdict = ""
    if gate := metrics_by_step.get("gate"):
        verdict = "passed" if gate.get("passed") else "failed"
    return Results(
        tuple(rows(metrics_by_step.get("report", {}))),
        {k: v for k, v in metrics_by_step.get("choose", {}).items() if PREFIX not in k} or None,
        verdict,
    )


class ResultsReader:
    """Reads the results of runs on the cluster."""

    def __init__(self, client: Client) -> None:
        self._namespace = client.steps_namespace

    def read(self, run: Any) -> Results:
        """The results of a run; empty if its steps have recorded nothing.

        Raises:
            UserError: they cannot be read from here; the hint says what to set.
        """
        root = self.artifact_root(run)
        # The folder has the pipeline's own name, and a run's display name begins with it.
        for name in sorted(FUNCTIONS, key=lambda name: name not in (run.display_name or "")):
            address = f"{root}/{name}/{run.run_id}/"
            results: Results = within(STORE_SECONDS, address, read_results, address)
            if results != Results():
                return results
        return Results()

    def artifact_root(self, run: Any) -> str:
        """The address of the run's artifacts.

        Raises:
            UserError: it is unknown, or cannot be read from here.
        """
        root = run.runtime_config.pipeline_root if run.runtime_config else None
        return _readable(root or self.default_root)

    def readable_default_root(self) -> str:
        """The pipeline root of a run without one of its own, checked to be readable.

        Raises:
            UserError: it is unknown, or cannot be read from here.
        """
        return _readable(self.default_root)

    @cached_property
    def default_root(self) -> str:
        """Pipeline root of runs without one of their own: the environment's, or the namespace's.

        Raises:
            UserError: it is unknown here.
        """
        configured = os.environ.get(ROOT, "")
        # A volume has models and data sets only.
        if configured and uri_scheme(configured) != "file":
            return configured
        try:
            root = config_map(open_cluster(self._namespace), LAUNCHER).get("defaultPipelineRoot")
            if root == "":  # as Pipelines comes
                return PIPELINES_ROOT
            reason = f"the ConfigMap {LAUNCHER} cannot be read"
        except StageError as error:
            root, reason = None, str(error)
        if root:
            return root
        raise UserError(
            f"the server's artifact location is unknown: {reason}",
            f"set {ROOT} to the defaultPipelineRoot of the ConfigMap {LAUNCHER}",
            Code.MISSING_OPTION,
        )


def _readable(root: str) -> str:
    root = root.partition("?")[0].rstrip("/")
    scheme = urlsplit(root).scheme
    if scheme not in ("s3", "minio"):
        raise UserError(f"{root}: not on S3", "look at the report in the UI", Code.UNSUPPORTED)
    if not any(os.environ.get(key) for key in KEYS):
        raise UserError(
            f"{root}: the store's keys are not set",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and AWS_ENDPOINT_URL if it is not "
            "Amazon's",
            Code.UNAUTHORIZED,
        )
    # minio:// is Pipelines' own store, whose address is known within the cluster only.
    if scheme == "minio" and not os.environ.get("AWS_ENDPOINT_URL"):
        raise UserError(
            f"{root}: the store's address as seen from this machine is not set",
            "set AWS_ENDPOINT_URL; for the store of Pipelines: kubectl -n kubeflow port-forward "
            "svc/seaweedfs 9000:9000, and http://localhost:9000",
            Code.MISSING_OPTION,
        )
    return root

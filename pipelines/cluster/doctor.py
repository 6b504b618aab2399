"""Checks a cluster for a pipeline, from here and from within a pod like those of its steps.

    python -m pipelines.cluster.doctor full --gpus 1

The pod is always deleted. The exit status is 1 if a check fails.
"""

import functools
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer
from kfp.dsl.graph_component import GraphComponent

from components.machines import Pool
from lathe.backends import paddle_backend
from lathe_base.checks import Check, Finding, State, findings_table, run_checks
from lathe_base.config.settings import LaunchSettings, Placements
from lathe_base.errors import Code, UserError
from lathe_base.storage import exists
from lathe_launch.cluster.api import Cluster
from lathe_launch.cluster.doctor import pipeline_root, require_account
from lathe_launch.cluster.nodes import LABELS
from lathe_serving.environment import VULNERABLE, find_environment
from pipelines.cluster.capacity import capacity_checks, resource_needs
from pipelines.cluster.doctor_pod import NoRoom, run_pod, step_pod
from pipelines.cluster.follow import UI_ACCOUNT
from pipelines.cluster.kube_context import config_map, open_cluster
from pipelines.cluster.schedule import stale_schedules
from pipelines.cluster.server import HELP, KUBEFLOW, connect, token_expiry
from pipelines.cluster.submit import Root
from pipelines.commands.arguments import takes_arguments
from pipelines.commands.errors import error_messages
from pipelines.commands.inputs import STORE_SECONDS, within
from pipelines.commands.summary import wide_console
from pipelines.commands.variants import (
    choose_variant,
    launch_settings,
    run_pool,
    takes_machines,
    with_machines,
    with_store,
)
from pipelines.compiler.compile import build, step_images

PROGRAM = ["python", "-m", "lathe_launch.cluster.doctor"]
METADATA = "metadata-grpc-configmap"
FRESH_MINUTES = 15  # the shortest life of a token that a submission and its checks need
COLUMNS = 120

FROM_HERE = "`make runs` and `make resume` need it: docs/how-to/cluster-runs.md#results"
Inside = Annotated[str, typer.Option(help="Address of Pipelines' API within the cluster.")]


@dataclass(frozen=True)
class Doctor:
    """Checks a namespace for one pipeline.

    Attributes:
        pool, launch: the requested machines, and the Launch settings of a TrainJob.
        placement: placement of the steps' pods.
        requests: what the steps' pods request, as the run's first step finds it.
        root: the pipeline root; default: the namespace's.
        inside: address of Pipelines' API within the cluster.
    """

    cluster: Cluster
    pipeline: GraphComponent
    pool: Pool
    placement: Placements
    launch: LaunchSettings
    requests: Mapping[str, Any]
    root: str
    inside: str

    def checks(self) -> list[Check]:
        """What is checked from here, and by a pod."""
        account = "pipeline-runner" if self.cluster.namespace == KUBEFLOW else "default-editor"
        ui = functools.partial(require_account, self.cluster, account, UI_ACCOUNT)
        stale = functools.partial(stale_schedules, self.cluster)
        # With the keys in this environment, as `make runs` and `make resume` read it.
        has_store = bool(os.environ.get("AWS_ENDPOINT_URL"))
        store = Check("object store, from here", self._ask_store, FROM_HERE, "warning")
        needs = resource_needs(self.pipeline, self.launch, self.requests)
        return [
            Check("Pipelines, from here", _sign_in),
            Check("Triton, here", _triton, severity="warning"),
            *([store] if has_store else []),
            Check("schedules", stale, severity="warning"),
            Check("runs made in the UI", ui, UI_ACCOUNT, "warning"),
            *capacity_checks(self.cluster, needs, self.pool, self.placement),
            Check("the doctor's pod", self._pod, "kubectl get events"),
        ]

    def _ask_store(self) -> str:
        root = self.root or pipeline_root(self.cluster)
        within(STORE_SECONDS, root, exists, f"{root.rstrip('/')}/")
        return root

    def _pod(self) -> Iterator[Finding]:
        """The checks from inside a pod; one without GPUs if no node has those."""
        try:
            yield from self._inside(self.pool.gpus)
        except NoRoom as error:
            what = f"a node with {self.pool.gpus} GPUs" if self.pool.gpus else "a node"
            state: State = "warning" if self.pool.gpus else "broken"
            hint = f"{LABELS}: add nodes, change Launch's placement, or request less (GPUS=)"
            yield Finding(what, state, str(error), hint, error.code)
            if self.pool.gpus:
                yield from self._inside(gpus=0)

    def _inside(self, gpus: int) -> Iterator[Finding]:
        """The checks from inside a pod with this many GPUs."""
        command = [*PROGRAM, "--pipelines", self.inside]
        if metadata := config_map(self.cluster, METADATA):  # Pipelines after 2.17 has no such store
            host = metadata.get("METADATA_GRPC_SERVICE_HOST", "metadata-grpc-service.kubeflow")
            port = metadata.get("METADATA_GRPC_SERVICE_PORT", "8080")
            command += ["--metadata", f"{host}:{port}"]
        root = self.placement.store or self.root
        command += ["--root", root, "--gpus", str(gpus)]
        command += ["--launch", self.launch.model_dump_json(exclude_unset=True)]
        pool = self.pool if gpus else None
        body = step_pod(step_images(self.pipeline), command, pool, self.placement)
        return run_pod(self.cluster, body)


def _sign_in() -> str:
    connect()
    if (expiry := token_expiry()) is None:
        return "signed in"
    minutes = (expiry - datetime.now(UTC)) // timedelta(minutes=1)
    renewal = " renew the file before a run is followed" if minutes < FRESH_MINUTES else ""
    return f"signed in; the token expires in {minutes} min:{renewal}".rstrip(":")


def _triton() -> str:
    """Check for known vulnerabilities in the Triton version of `make serve` and of images of the
    CPU flavour."""
    try:
        version = find_environment().triton
    except UserError:
        return "none"
    if version in VULNERABLE:
        raise UserError(
            f"{version}, as in images of the CPU flavour, has published vulnerabilities",
            "`make audit` lists them, and docs/security.md describes the mitigations",
            Code.WRONG_VERSION,
        )
    return version


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog=HELP)
@takes_arguments
@takes_machines
def main(
    pipeline: str,
    arguments: dict[str, Any],
    root: Root = "",
    inside: Inside = "http://ml-pipeline.kubeflow.svc:8888",
) -> None:
    """Check the cluster for a pipeline, with a fix for each problem."""

    def end_with_exception(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    # An exception, so that the pod is deleted on the way out.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end_with_exception)
    with error_messages():
        arguments, root = with_store(arguments, root)
        arguments = with_machines(pipeline, arguments)
        variant, pool = choose_variant(pipeline, arguments), run_pool(arguments)
        launch, requests = launch_settings(pipeline, arguments)
        if variant.engine == "paddle" and launch.runtime is None:
            launch = launch.model_copy(update={"runtime": paddle_backend.TRAINJOB_RUNTIME})
        namespace = os.environ.get("LATHE_KFP_NAMESPACE") or KUBEFLOW
        cluster = replace(open_cluster(namespace), role="lathe-doctor")
        built = build(pipeline, variant)
        doctor = Doctor(cluster, built, pool, variant.placement, launch, requests, root, inside)
        print(f"checking namespace {cluster.namespace}, from here and from a pod", flush=True)
        findings = list(run_checks(doctor.checks()))
    wide_console(COLUMNS).print(findings_table(findings))
    if any(finding.state == "broken" for finding in findings):
        raise SystemExit(1)


if __name__ == "__main__":
    app()

"""Checks a cluster for a pipeline, from here and from within a pod like those of its steps.

    python -m pipelines.cluster.doctor full --gpus 1

With --all-reduce, another pod then starts a TrainJob on two nodes, which measures the bandwidth
between them.

The pod has the identity, labels, secrets and network of a pipeline's step, and is always deleted.
The exit status is 1 if a check fails.
"""

import functools
import os
import re
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer
from kfp.dsl.graph_component import GraphComponent
from kubernetes import client as kubernetes  # type: ignore[import-untyped]

from components.machines import Pool, requests, trainjob_overrides
from components.plan import run_sizes
from lathe.backends import paddle_backend
from lathe_base.checks import Check, Finding, State, findings_table, run_checks
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import LaunchSettings, Placements
from lathe_base.config.settings.placement import USER
from lathe_base.errors import Code, StageError, UserError
from lathe_base.provenance.keys import MOUNTED
from lathe_base.storage import exists
from lathe_launch.cluster.api import LABELS, Cluster
from lathe_launch.cluster.doctor import pipeline_root, require_account
from lathe_launch.cluster.logs import LogFollower
from lathe_launch.cluster.nodes import LABELS as SHOW_LABELS
from lathe_launch.cluster.placement import place
from lathe_launch.cluster.reasons import CONFIGURATION, IMAGE_PULL, unschedulable
from lathe_serving.environment import VULNERABLE, find_environment
from pipelines.cluster.capacity import capacity_checks, resource_needs
from pipelines.cluster.follow import UI_ACCOUNT
from pipelines.cluster.pods import CONTAINER, STAGE
from pipelines.cluster.schedule import stale_schedules
from pipelines.cluster.server import (
    HELP,
    KUBEFLOW,
    config_map,
    connect,
    open_cluster,
    token_expiry,
)
from pipelines.cluster.submit import (
    Root,
    choose_variant,
    with_machines,
    with_store,
)
from pipelines.commands.arguments import (
    error_messages,
    recipe_names,
    takes_arguments,
    takes_machines,
    wide_console,
)
from pipelines.commands.inputs import STORE_SECONDS, within
from pipelines.compiler.compile import build, step_images
from pipelines.steps.resources import (
    CONFIG_MAP,
    KEYS,
    POD_FIELDS,
    SECRET,
    SERVICE_ACCOUNT,
    SIGNING,
    STORE,
)

PROGRAM = ["python", "-m", "lathe_launch.cluster.doctor"]
ALL_REDUCE_PROGRAM = ["python", "-m", "lathe_launch.cluster.all_reduce"]
METADATA = "metadata-grpc-configmap"
FRESH_MINUTES = 15  # the shortest life of a token that a submission and its checks need
COLUMNS = 120
DOCTOR = "lathe-doctor"
# The network policies know a step by Argo's label.
STEP_LABELS = LABELS | {STAGE: "doctor", "workflows.argoproj.io/workflow": DOCTOR}
POD_SECONDS = 900
"""Seconds after which the pod ends by itself, if it could not be deleted."""
ALL_REDUCE_SECONDS, ALL_REDUCE_POD_SECONDS = 20.0, 1200
"""Seconds that an all-reduce is repeated for, and as above, with time to wait for two nodes."""
SCHEDULING_SECONDS, STARTING_SECONDS, POLL_SECONDS = 30.0, 600.0, 0.5
LOG_SECONDS = 10.0
RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
"""What the pod-security level `restricted` requires of containers."""
OLD_IMAGE = "if the image is older than this checkout: make images, make push"

FROM_HERE = "`make runs` and `make resume` need it: docs/how-to/cluster-runs.md#results"
Inside = Annotated[str, typer.Option(help="Address of Pipelines' API within the cluster.")]

AllReduce = Annotated[
    bool,
    typer.Option(
        "--all-reduce", help="Also measure an all-reduce between two nodes, with --gpus on each."
    ),
]


class NoRoom(StageError):
    """No node has room for the pod; the message is the scheduler's."""


@dataclass(frozen=True)
class Doctor:
    """Checks a namespace for one pipeline.

    Attributes:
        pool, launch: the requested machines, and the Launch settings of a TrainJob.
        placement: placement of the steps' pods.
        requests: what the steps' pods request, as the run's first step finds it.
        root: the pipeline root; default: the namespace's.
        inside: address of Pipelines' API within the cluster.
        measured: the Launch settings of a TrainJob that measures an all-reduce; None for none.
    """

    cluster: Cluster
    pipeline: GraphComponent
    pool: Pool
    placement: Placements
    launch: LaunchSettings
    requests: Mapping[str, Any]
    root: str
    inside: str
    measured: LaunchSettings | None = None

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
            *([Check("all-reduce", self._all_reduce)] if self.measured else []),
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
            hint = f"{SHOW_LABELS}: add nodes, change Launch's placement, or request less (GPUS=)"
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

    def _all_reduce(self) -> Iterator[Finding]:
        """Bandwidth between two nodes, by a TrainJob that a pod without GPUs owns."""
        assert self.measured is not None
        command = [*ALL_REDUCE_PROGRAM, f"--seconds={ALL_REDUCE_SECONDS:g}"]
        command += ["--launch", self.measured.model_dump_json(exclude_unset=True)]
        images = step_images(self.pipeline)[:1]
        body = step_pod(images, command, None, self.placement)
        body["spec"]["activeDeadlineSeconds"] = ALL_REDUCE_POD_SECONDS
        for finding in run_pod(self.cluster, body):
            if finding.state != "ok" or not finding.check.startswith("image "):
                yield finding


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


def step_pod(
    images: Sequence[str],
    command: list[str],
    pool: Pool | None,
    placement: Placements = Placements(),  # noqa: B008
) -> dict[str, Any]:
    """The pod to create.

    Args:
        images: images of the pipeline's steps; `command` runs in the first, and the others are only
            pulled.
        pool: the pool whose GPUs the pod requests; None for no GPUs.
        placement: the recipe's placement of all pods.
    """
    gpus = {placement.gpu_resource: str(pool.gpus)} if pool else {}
    fields: dict[str, dict[str, Any]] = {
        name: {"fieldRef": {"fieldPath": path}} for name, path in POD_FIELDS.items()
    }
    for key, name in KEYS.items():
        fields[name] = {"secretKeyRef": {"name": SECRET, "key": key, "optional": True}}
    for key, name in STORE.items():
        fields[name] = {"configMapKeyRef": {"name": CONFIG_MAP, "key": key}}
    main: dict[str, Any] = {
        "name": CONTAINER,
        "command": command,
        "env": [{"name": name, "valueFrom": source} for name, source in fields.items()],
        "volumeMounts": [{"name": "signing-key", "mountPath": str(MOUNTED), "readOnly": True}],
    }
    rest: list[dict[str, Any]] = [
        {"name": f"image-{i}", "command": ["true"]} for i in range(1, len(images))
    ]
    # Little CPU and memory, and the GPUs for the first.
    containers = [main, *rest]
    for container, image in zip(containers, images, strict=True):
        limits = gpus if container is main else {}
        requested = {"cpu": "100m", "memory": "512Mi", **limits}
        container |= {"image": image, "resources": {"requests": requested, "limits": limits}}
        container["securityContext"] = dict(RESTRICTED)
    spec: dict[str, Any] = {
        "serviceAccountName": placement.service_account or SERVICE_ACCOUNT,
        "restartPolicy": "Never",
        "activeDeadlineSeconds": POD_SECONDS,
        "terminationGracePeriodSeconds": 5,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": containers,
        "volumes": [{"name": "signing-key", "secret": {"secretName": SIGNING, "optional": True}}],
    }
    if placement.priority_class:
        spec["priorityClassName"] = placement.priority_class
    # Without a sidecar: it would outlive the program, and the pod would never end.
    metadata: dict[str, Any] = {
        "name": f"{DOCTOR}-{uuid.uuid4().hex[:8]}",
        "labels": STEP_LABELS,
        "annotations": {"sidecar.istio.io/inject": "false"},
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    place(pod, placement, pool.node_pool if pool else None, bool(pool))
    return pod


def run_pod(cluster: Cluster, body: dict[str, Any]) -> Iterator[Finding]:
    """Run the pod, yield its program's findings, and always delete it.

    Raises:
        NoRoom: the pod could not be scheduled.
        UserError, StageError: it could not be created, or has not started.
    """
    with _temporary_pod(cluster, body) as name:
        images = [container["image"] for container in body["spec"]["containers"]]
        if trouble := _wait_for_start(cluster, name):
            yield trouble
            return
        yield from (Finding(f"image {image}", "ok", "pulled") for image in images)
        lines: list[str] = []
        # The program's findings are lines of its log.
        log = LogFollower(cluster, name, CONTAINER, lines.append)
        log.start()
        code = _wait_for_end(cluster, name)
        log.finish(LOG_SECONDS)
        # Those of a TrainJob's workers begin with their rank.
        texts = (re.sub(r"^\[rank\d+\]:", "", line) for line in lines)
        findings = [finding for text in texts if (finding := Finding.of_line(text))]
        yield from findings
        if code or not findings:
            said = "\n".join(list(log.tail)[-3:]) or "its log cannot be read"
            yield Finding("the doctor's pod", "broken", f"exit code {code}: {said}", OLD_IMAGE)


@contextmanager
def _temporary_pod(cluster: Cluster, body: dict[str, Any]) -> Iterator[str]:
    """Create the pod; leaving the block deletes it, undisturbed by further signals."""
    core, name = kubernetes.CoreV1Api(cluster.api), body["metadata"]["name"]
    try:
        cluster.ask(core.create_namespaced_pod, cluster.namespace, body)
        yield name
    finally:
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
        try:
            cluster.ask(core.delete_namespaced_pod, name, cluster.namespace, unless=404)
        except (UserError, StageError) as error:
            print(
                f"pod {name} was not deleted, and ends after {POD_SECONDS} s: {error}\n"
                f"  kubectl -n {cluster.namespace} delete pod {name}",
                file=sys.stderr,
            )
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait_for_start(cluster: Cluster, name: str) -> Finding | None:
    """Wait until every container has started; returns the finding if one cannot start."""
    began = time.monotonic()
    while True:
        pod = _read(cluster, name)
        waited = time.monotonic() - began
        statuses = pod.status.container_statuses or []
        waiting = [s for s in statuses if s.state and s.state.waiting]
        if pod.status.phase != "Pending" and not waiting:
            return None
        message = unschedulable(pod)
        if message and waited > SCHEDULING_SECONDS:
            raise NoRoom(message, Code.NO_ROOM)
        for status in waiting:
            reason, said = status.state.waiting.reason, status.state.waiting.message
            if reason in IMAGE_PULL:
                hint = "make push, or a registry's credentials: imagePullSecrets of the account"
                what = f"image {status.image}"
                return Finding(what, "broken", f"{reason}: {said}", hint, Code.NOT_FOUND)
            if reason in CONFIGURATION:
                hint = "create what is missing: docs/how-to/cluster-install.md#secrets"
                what = "secrets and settings"
                return Finding(what, "broken", f"{reason}: {said}", hint, Code.NOT_FOUND)
        if waited > STARTING_SECONDS:  # pulled slowly, or a volume that cannot be mounted
            said = "; ".join(cluster.warnings(name)[-2:]) or "no events explain why"
            raise StageError(
                f"pod {name} has not started after {STARTING_SECONDS:.0f} s: {said}", Code.TIMEOUT
            )
        time.sleep(POLL_SECONDS)


def _wait_for_end(cluster: Cluster, name: str) -> int:
    """The exit code of the program."""
    while True:
        pod = _read(cluster, name)
        for status in pod.status.container_statuses or []:
            if status.name == CONTAINER and status.state.terminated:
                return int(status.state.terminated.exit_code)
        if pod.status.phase in ("Succeeded", "Failed"):
            raise StageError(f"pod {name}: {pod.status.reason}: {pod.status.message}", Code.FAILED)
        time.sleep(POLL_SECONDS)


def _read(cluster: Cluster, name: str) -> Any:
    pod = cluster.pod(name)
    if pod is None:
        raise StageError(f"pod {name} was deleted by another process", Code.NOT_RUNNING)
    return pod


def launch_settings(name: str, arguments: dict[str, Any]) -> tuple[LaunchSettings, dict[str, Any]]:
    """The group Launch of a run's first recipe, as for its TrainJobs, and what its pods request:
    the same that the run's first step finds."""
    recipe = next(iter(recipe_names(name, arguments).values()))
    overrides = [*Pool.from_arguments(arguments).overrides, *arguments["overrides"]]
    settings = load_recipe(recipe, overrides)
    sizes = None
    with suppress(UserError):  # the model's store does not answer in time
        model = arguments.get("model", "")
        sizes = within(STORE_SECONDS, model, run_sizes, settings, model)
    more = trainjob_overrides(settings.Launch, sizes)
    return load_recipe(recipe, [*overrides, *more]).Launch, requests(settings.Launch, sizes)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(epilog=HELP)
@takes_arguments
@takes_machines
def main(
    pipeline: str,
    arguments: dict[str, Any],
    root: Root = "",
    inside: Inside = "http://ml-pipeline.kubeflow.svc:8888",
    all_reduce: AllReduce = False,
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
        variant, pool = choose_variant(pipeline, arguments), Pool.from_arguments(arguments)
        launch, requested = launch_settings(pipeline, arguments)
        measured = launch if all_reduce else None
        if variant.engine == "paddle" and launch.runtime is None:
            launch = launch.model_copy(update={"runtime": paddle_backend.TRAINJOB_RUNTIME})
        namespace = os.environ.get("LATHE_KFP_NAMESPACE") or KUBEFLOW
        cluster = replace(open_cluster(namespace), role="lathe-doctor")
        built = build(pipeline, variant)
        doctor = Doctor(
            cluster, built, pool, variant.placement, launch, requested, root, inside, measured
        )
        print(f"checking namespace {cluster.namespace}, from here and from a pod", flush=True)
        findings = list(run_checks(doctor.checks()))
    wide_console(COLUMNS).print(findings_table(findings))
    if any(finding.state == "broken" for finding in findings):
        raise SystemExit(1)


if __name__ == "__main__":
    app()

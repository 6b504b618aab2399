"""A throw-away pod with the identity, labels, secrets and network of a pipeline's step."""

import signal
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kubernetes import client as kubernetes  # type: ignore[import-untyped]

from components.machines import Pool
from lathe_base.checks import Finding
from lathe_base.config.settings import Placements
from lathe_base.config.settings.placement import USER
from lathe_base.errors import Code, StageError, UserError
from lathe_base.provenance.keys import MOUNTED
from lathe_launch.cluster.api import LABELS, Cluster
from lathe_launch.cluster.logs import LogFollower
from lathe_launch.cluster.placement import place
from lathe_launch.cluster.reasons import CONFIGURATION, IMAGE_PULL, unschedulable
from pipelines.cluster.pods import CONTAINER, STAGE
from pipelines.steps.resources import (
    CONFIG_MAP,
    KEYS,
    POD_FIELDS,
    SECRET,
    SERVICE_ACCOUNT,
    SIGNING,
    STORE,
)

DOCTOR = "lathe-doctor"
# The network policies know a step by Argo's label.
STEP_LABELS = LABELS | {STAGE: "doctor", "workflows.argoproj.io/workflow": DOCTOR}
SECONDS = 900
"""Seconds after which the pod ends by itself, if it could not be deleted."""
SCHEDULING_SECONDS, STARTING_SECONDS, POLL_SECONDS = 30.0, 600.0, 0.5
LOG_SECONDS = 10.0
OLD_IMAGE = "if the image is older than this checkout: make images, make push"


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
    rest = [{"name": f"image-{i}", "command": ["true"]} for i in range(1, len(images))]
    containers = [
        {**container, "image": image, **_bounds(gpus if container is main else {})}
        for container, image in zip([main, *rest], images, strict=True)
    ]
    spec: dict[str, Any] = {
        "serviceAccountName": placement.service_account or SERVICE_ACCOUNT,
        "restartPolicy": "Never",
        "activeDeadlineSeconds": SECONDS,
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
    metadata: dict[str, Any] = {
        "name": f"{DOCTOR}-{uuid.uuid4().hex[:8]}",
        "labels": STEP_LABELS,
        "annotations": {"sidecar.istio.io/inject": "false"},
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    place(pod, placement, pool.node_pool if pool else None, bool(pool))
    return pod


def _bounds(gpus: dict[str, str]) -> dict[str, Any]:
    """Little CPU and memory, GPUs, and the settings that the pod-security level `restricted`
    requires."""
    return {
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi", **gpus}, "limits": gpus},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }


class NoRoom(StageError):
    """No node has room for the pod; the message is the scheduler's."""


def run_pod(cluster: Cluster, body: dict[str, Any]) -> Iterator[Finding]:
    """Run the pod, yield its program's findings, and always delete it.

    Raises:
        NoRoom: the pod could not be scheduled.
        UserError, StageError: it could not be created, or has not started.
    """
    with _pod(cluster, body) as name:
        images = [container["image"] for container in body["spec"]["containers"]]
        if trouble := _wait_for_start(cluster, name):
            yield trouble
            return
        yield from (Finding(f"image {image}", "ok", "pulled") for image in images)
        lines: list[str] = []
        log = LogFollower(cluster, name, CONTAINER, lines.append)
        log.start()
        code = _wait_for_end(cluster, name)
        log.finish(LOG_SECONDS)
        findings = [finding for line in lines if (finding := Finding.of_line(line))]
        yield from findings
        if code or not findings:
            said = "\n".join(list(log.tail)[-3:]) or "its log cannot be read"
            yield Finding("the doctor's pod", "broken", f"exit code {code}: {said}", OLD_IMAGE)


@contextmanager
def _pod(cluster: Cluster, body: dict[str, Any]) -> Iterator[str]:
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
                f"pod {name} was not deleted, and ends after {SECONDS} s: {error}\n  kubectl -n "
                f"{cluster.namespace} delete pod {name}",
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
        if waited > STARTING_SECONDS:
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

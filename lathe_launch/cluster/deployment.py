"""The Deployment that serves a model: the release that its pods fetch, and a rollout lock.

An initContainer of its pods downloads the release named in its environment to where Triton looks
for models. The lock is an annotation, taken by compare-and-swap on the Deployment's resource
version and renewed by its holder; a lock that is no longer renewed expires.
"""

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kubernetes import client as kubernetes  # type: ignore[import-untyped]

from lathe_base.errors import Code, StageError, UserError
from lathe_launch.cluster.api import connect

log = logging.getLogger("lathe")

VARIABLE = "LATHE_RELEASE"
RELEASE = "lathe/release"  # annotation of the pods
LOCK = "lathe/rollout-lock"
CAUSE = "kubernetes.io/change-cause"
POLL_SECONDS = 2.0
RENEW_SECONDS = 10.0
LOCK_SECONDS = 60.0
ATTEMPTS = 20  # to change it, in competition with the Deployment controller
CONFLICT = 409
LOG_LINES = 20

Object = Any  # the client's models have no types


def has_cluster() -> bool:
    """Whether a cluster is configured."""
    variables = ("KUBECONFIG", "KUBERNETES_SERVICE_HOST")
    return any(v in os.environ for v in variables) or Path("~/.kube/config").expanduser().is_file()


class Deployment:
    """One Deployment, and which release its pods run; see `connect` for a namespace of None.

    Raises:
        UserError: no cluster, no such Deployment, or it fetches no release.
    """

    def __init__(self, namespace: str | None, name: str) -> None:
        self._cluster = connect("lathe-deploy", namespace)
        self.namespace, self.name = self._cluster.namespace, name
        self._apps = kubernetes.AppsV1Api(self._cluster.api)
        self._core = kubernetes.CoreV1Api(self._cluster.api)
        self._holder = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._renewed = time.monotonic()
        self._variable(self.read())

    def release(self) -> str | None:
        """Address of the release that new pods fetch; None before the first."""
        return self._variable(self.read()).value or None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Prevent other rollouts until the block ends.

        Raises:
            StageError: another rollout is in progress.
        """
        self._take_lock()
        try:
            yield
        finally:
            try:
                self._change(lambda _: {"metadata": {"annotations": {LOCK: None}}})
            except (StageError, UserError) as error:
                log.warning("%s: the lock remains until it expires: %s", self.name, error)

    def keep_lock(self) -> None:
        """Renew the lock if it is due.

        Raises:
            StageError: this process was suspended for so long that the lock expired and was taken.
        """
        if time.monotonic() - self._renewed > RENEW_SECONDS:
            self._change(lambda _: {"metadata": {"annotations": {LOCK: self._stamp()}}})
            self._renewed = time.monotonic()

    def read(self) -> Object:
        """The current V1Deployment."""
        reading = self._apps.read_namespaced_deployment
        resource = self._cluster.ask(reading, self.name, self.namespace, unless=404)
        if resource is None:
            raise UserError(
                f"there is no Deployment {self.namespace}/{self.name}",
                "apply manifests/, or set Production.namespace and Production.deployment",
                Code.NOT_FOUND,
            )
        return resource

    def set_release(self, release: str, cause: str) -> None:
        """Roll the Deployment to `release`. Call within `locked`."""

        def template(resource: Object) -> dict[str, Any]:
            self._variable(resource).value = release
            fetchers = self._apps.api_client.sanitize_for_serialization(
                resource.spec.template.spec.init_containers
            )
            pods = {
                "metadata": {"annotations": {RELEASE: release}},
                "spec": {"initContainers": fetchers},
            }
            return {"metadata": {"annotations": {CAUSE: cause}}, "spec": {"template": pods}}

        self._change(template)

    def pods(self, resource: Object, release: str) -> list[Any]:
        """The pods of one release; `resource` is the Deployment as read."""
        labels = ",".join(f"{k}={v}" for k, v in resource.spec.selector.match_labels.items())
        return [pod for pod in self._cluster.pods(labels) if _annotation(pod, RELEASE) == release]

    def tail(self, pod: str, container: str, previous: bool) -> str:
        """The last lines of a container's log, of its previous run if `previous`."""
        reading = self._core.read_namespaced_pod_log
        options: dict[str, Any] = {
            "container": container,
            "previous": previous,
            "tail_lines": LOG_LINES,
        }
        return str(self._cluster.ask(reading, pod, self.namespace, **options))

    def warnings(self, pod: str) -> list[str]:
        """Messages of a pod's Warning events, latest last."""
        listing = self._core.list_namespaced_event
        selector = f"involvedObject.kind=Pod,involvedObject.name={pod},type=Warning"
        events = self._cluster.ask(listing, self.namespace, field_selector=selector).items
        return list(dict.fromkeys(f"{event.reason}: {event.message}" for event in events))

    def _take_lock(self) -> None:
        seen, since = None, time.monotonic()
        while True:
            resource = self.read()
            lock = _annotation(resource, LOCK)
            if lock is None or (lock == seen and time.monotonic() - since > LOCK_SECONDS):
                if self._patch(resource, {"metadata": {"annotations": {LOCK: self._stamp()}}}):
                    self._renewed = time.monotonic()
                    return
            elif seen is None:
                log.info(
                    "%s is locked by %s: checking whether that process is alive", self.name, lock
                )
                seen, since = lock, time.monotonic()
            elif lock != seen:
                raise StageError(
                    f"{self.name} is being rolled out by another process, {lock}: retry when it "
                    "has finished",
                    Code.IN_USE,
                )
            time.sleep(POLL_SECONDS)

    def _stamp(self) -> str:
        return f"{self._holder} {datetime.now(UTC).isoformat(timespec='milliseconds')}"

    def _change(self, make: Callable[[Object], dict[str, Any]]) -> None:
        """Patch the locked Deployment with the result of `make` for its current state."""
        for _ in range(ATTEMPTS):
            resource = self.read()
            lock = _annotation(resource, LOCK)
            if lock is None or not lock.startswith(self._holder):
                raise StageError(
                    f"{self.name}: the lock was lost to {lock or 'no one'}", Code.IN_USE
                )
            if self._patch(resource, make(resource)):
                return
        raise StageError(f"{self.name} keeps being changed by something else", Code.CHANGED)

    def _patch(self, resource: Object, body: dict[str, Any]) -> bool:
        """Patch; returns False if the Deployment has changed since it was read."""
        body["metadata"]["resourceVersion"] = resource.metadata.resource_version
        patching = self._apps.patch_namespaced_deployment
        arguments = self.name, self.namespace, body
        return self._cluster.ask(patching, *arguments, unless=CONFLICT) is not None

    def _variable(self, resource: Object) -> Any:
        for container in resource.spec.template.spec.init_containers or []:
            for variable in container.env or []:
                if variable.name == VARIABLE:
                    return variable
        raise UserError(
            f"Deployment {self.namespace}/{self.name} has no initContainer with {VARIABLE}",
            "apply manifests/, or set Production.deployment",
            Code.WRONG_KIND,
        )


def _annotation(resource: Object, name: str) -> str | None:
    value = (resource.metadata.annotations or {}).get(name)
    return None if value is None else str(value)

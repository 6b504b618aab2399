"""Rolls the Deployment that serves to another release, and back where that fails.

An initContainer of its pods fetches the release that its environment names to where Triton looks.
Whoever rolls holds a lock in the Deployment's annotations, taken with its resource version, and
renews it; a lock that is not renewed any more is nobody's.
"""

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kubernetes import client as kubernetes  # type: ignore[import-untyped]

from lathe.errors import StageError, UserError
from lathe.launch import rollout_pods
from lathe.launch.cluster import connect

log = logging.getLogger("lathe")

VARIABLE = "LATHE_RELEASE"
RELEASE = "lathe/release"  # annotation of the pods
LOCK = "lathe/rollout-lock"
CAUSE = "kubernetes.io/change-cause"
POLL_SECONDS = 2.0
RENEW_SECONDS = 10.0
LOCK_SECONDS = 60.0
ATTEMPTS = 20  # at a change, between those of the Deployment's own controller
CONFLICT = 409
LOG_LINES = 20

Object = Any  # the client's models have no types


def has_cluster() -> bool:
    """Whether the environment says how to reach one."""
    variables = ("KUBECONFIG", "KUBERNETES_SERVICE_HOST")
    return any(v in os.environ for v in variables) or Path("~/.kube/config").expanduser().is_file()


class RolloutFailed(StageError):
    """The pods of a release do not come up: the message says why."""


class Deployment:
    """One Deployment, and which release its pods run.

    Raises:
        UserError: no cluster, no such Deployment, or it fetches no release.
    """

    def __init__(self, namespace: str, name: str) -> None:
        self._cluster = connect("lathe-deploy", namespace)
        self.namespace, self.name = namespace, name
        self._apps = kubernetes.AppsV1Api(self._cluster.api)
        self._core = kubernetes.CoreV1Api(self._cluster.api)
        self._holder = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._renewed = time.monotonic()
        self._variable(self._read())

    def release(self) -> str | None:
        """The address that its new pods fetch; None before the first."""
        return self._variable(self._read()).value or None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else rolls it until the block ends.

        Raises:
            StageError: another is rolling it.
        """
        self._take_lock()
        try:
            yield
        finally:
            try:
                self._change(lambda _: {"metadata": {"annotations": {LOCK: None}}})
            except (StageError, UserError) as error:
                log.warning("%s: the lock stays until it is stale: %s", self.name, error)

    def keep_lock(self) -> None:
        """Renew the lock.

        Raises:
            StageError: this process stood still for so long that another has taken it.
        """
        self._change(lambda _: {"metadata": {"annotations": {LOCK: self._stamp()}}})
        self._renewed = time.monotonic()

    def roll(self, release: str, back_to: str | None, seconds: float) -> None:
        """Roll to `release` and wait until only its pods serve; within `locked`.

        Args:
            release, back_to: addresses of repositories.
            seconds: that a rollout may take.

        Raises:
            StageError: it does not come up. It serves `back_to` again then, or the message says
                what became of that.
        """
        try:
            self._set(release, f"lathe deploy {release}")
            self._wait(release, seconds)
        except (StageError, UserError) as error:
            raise StageError(f"{error}\n{self._go_back(release, back_to, seconds)}") from error
        except BaseException:
            if back_to:
                self._set(back_to, f"lathe: interrupted while it rolled to {release}")
            raise

    def _go_back(self, release: str, back_to: str | None, seconds: float) -> str:
        """Do, and say how it went."""
        if back_to is None or back_to == release:
            return f"there is no release before it: {self.name} is left as it is"
        log.warning("%s: %s does not come up, going back to %s", self.name, release, back_to)
        try:
            self._set(back_to, f"lathe: back from {release}, which does not come up")
            self._wait(back_to, seconds)
        except (StageError, UserError) as error:
            return f"going back to {back_to} failed too: {error}"
        return f"went back to {back_to}, which serves"

    def _set(self, release: str, cause: str) -> None:
        def template(found: Object) -> dict[str, Any]:
            self._variable(found).value = release
            fetchers = self._apps.api_client.sanitize_for_serialization(
                found.spec.template.spec.init_containers
            )
            pods = {
                "metadata": {"annotations": {RELEASE: release}},
                "spec": {"initContainers": fetchers},
            }
            return {"metadata": {"annotations": {CAUSE: cause}}, "spec": {"template": pods}}

        self._change(template)

    def _wait(self, release: str, seconds: float) -> None:
        started, said = time.monotonic(), ""
        while waits_for := _waits_for(found := self._read()):
            if waits_for != said:
                log.info("%s: %s", self.name, waits_for)
                said = waits_for
            pods = self._pods(found, release)
            late = time.monotonic() - started > seconds or _deadline_exceeded(found)
            if trouble := rollout_pods.hopeless(pods):
                raise RolloutFailed(f"{release}: {trouble}{self._last_lines(pods)}")
            if late:
                passed = f"{time.monotonic() - started:.0f} s"
                raise RolloutFailed(
                    f"{release}: not rolled out in {passed}: {waits_for}; "
                    f"{rollout_pods.states(pods) or 'it has no pods'}{self._last_lines(pods)}"
                )
            if time.monotonic() - self._renewed > RENEW_SECONDS:
                self.keep_lock()
            time.sleep(POLL_SECONDS)
        log.info("%s: %s is rolled out", self.name, release)

    def _take_lock(self) -> None:
        seen, since = None, time.monotonic()
        while True:
            found = self._read()
            lock = _annotation(found, LOCK)
            if lock is None or (lock == seen and time.monotonic() - since > LOCK_SECONDS):
                if self._patch(found, {"metadata": {"annotations": {LOCK: self._stamp()}}}):
                    self._renewed = time.monotonic()
                    return
            elif seen is None:
                log.info("%s is locked by %s: is that alive?", self.name, lock)
                seen, since = lock, time.monotonic()
            elif lock != seen:
                raise StageError(
                    f"{self.name} is being rolled by another, {lock}: run it again when that ends"
                )
            time.sleep(POLL_SECONDS)

    def _stamp(self) -> str:
        return f"{self._holder} {datetime.now(UTC).isoformat(timespec='milliseconds')}"

    def _read(self) -> Object:
        reading = self._apps.read_namespaced_deployment
        found = self._cluster.ask(reading, self.name, self.namespace, unless=404)
        if found is None:
            raise UserError(
                f"there is no Deployment {self.namespace}/{self.name}",
                "apply manifests/, or set Production.namespace and Production.deployment",
            )
        return found

    def _change(self, make: Callable[[Object], dict[str, Any]]) -> None:
        """Patch the Deployment, which this process has locked, with what `make` makes of it."""
        for _ in range(ATTEMPTS):
            found = self._read()
            lock = _annotation(found, LOCK)
            if lock is None or not lock.startswith(self._holder):
                raise StageError(f"{self.name}: the lock was lost to {lock or 'no one'}")
            if self._patch(found, make(found)):
                return
        raise StageError(f"{self.name} is changed all the time by something else")

    def _patch(self, found: Object, body: dict[str, Any]) -> bool:
        """Whether nothing had changed the Deployment since it was read."""
        body["metadata"]["resourceVersion"] = found.metadata.resource_version
        patching = self._apps.patch_namespaced_deployment
        arguments = self.name, self.namespace, body
        return self._cluster.ask(patching, *arguments, unless=CONFLICT) is not None

    def _variable(self, found: Object) -> Any:
        for container in found.spec.template.spec.init_containers or []:
            for variable in container.env or []:
                if variable.name == VARIABLE:
                    return variable
        raise UserError(
            f"Deployment {self.namespace}/{self.name} has no initContainer with {VARIABLE}",
            "apply manifests/, or name the Deployment in Production.deployment",
        )

    def _pods(self, found: Object, release: str) -> list[Any]:
        """Those of one release."""
        labels = ",".join(f"{k}={v}" for k, v in found.spec.selector.match_labels.items())
        listed = self._cluster.ask(
            self._core.list_namespaced_pod, self.namespace, label_selector=labels
        )
        return [pod for pod in listed.items if _annotation(pod, RELEASE) == release]

    def _last_lines(self, pods: Sequence[Any]) -> str:
        """What the failing container wrote last, indented, if it can be read."""
        if (found := rollout_pods.failing(pods)) is None:
            return ""
        pod, container, previous = found
        try:
            text = self._cluster.ask(
                self._core.read_namespaced_pod_log,
                pod,
                self.namespace,
                container=container,
                previous=previous,
                tail_lines=LOG_LINES,
            )
        except (StageError, UserError) as error:
            return f"\n  (its log cannot be read: {str(error).splitlines()[0]})"
        return "".join(f"\n  {line}" for line in text.splitlines())


def _waits_for(found: Object) -> str | None:
    """What is missing until only pods of the present template serve, or None."""
    status, wanted = found.status, found.spec.replicas
    wanted = 1 if wanted is None else wanted
    if (status.observed_generation or 0) < found.metadata.generation:
        return "its controller has not seen the change"
    updated, available = status.updated_replicas or 0, status.available_replicas or 0
    if updated < wanted:
        return f"{updated} of {wanted} new pods are made"
    if (total := status.replicas or 0) > updated:
        return f"{total - updated} old pods are to end"
    if available < updated:
        return f"{available} of {updated} new pods are available"
    return None


def _deadline_exceeded(found: Object) -> bool:
    seen = (found.status.observed_generation or 0) >= found.metadata.generation
    conditions = found.status.conditions or []
    return seen and any(c.reason == "ProgressDeadlineExceeded" for c in conditions)


def _annotation(found: Object, name: str) -> str | None:
    value = (found.metadata.annotations or {}).get(name)
    return None if value is None else str(value)

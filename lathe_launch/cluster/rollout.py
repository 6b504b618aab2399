"""Roll the Deployment that serves a model to another release, and back if that fails.

An initContainer of its pods downloads the release named in its environment to where Triton looks
for models. A rollout holds a lock: an annotation, taken by compare-and-swap on the Deployment's
resource version and renewed by its holder; a lock that is no longer renewed expires.
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
EVENTS = 3  # of each pod, in the message of a failed rollout
HOPELESS = {
    "ErrImageNeverPull",
    "ImagePullBackOff",
    "InvalidImageName",
    "CreateContainerConfigError",
}
MAX_RESTARTS = 2  # after this many, a failing container is given up

Object = Any  # the client's models have no types
Pod = Any


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
        # Clocks of two machines differ: a lock is stale if it does not change while it is watched,
        # whatever time it names.
        seen, since = None, time.monotonic()
        while True:
            resource = self.read()
            lock = _annotation(resource, LOCK)
            if lock is None or (lock == seen and time.monotonic() - since > LOCK_SECONDS):
                if self._patch(resource, {"metadata": {"annotations": {LOCK: self._stamp()}}}):
                    self._renewed = time.monotonic()
                    break
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

    def _stamp(self) -> str:
        return f"{self._holder} {datetime.now(UTC).isoformat(timespec='milliseconds')}"

    def _change(self, make: Callable[[Object], dict[str, Any]]) -> None:
        """Patch the locked Deployment with the result of `make` for its current state: the
        controller changes the status, and so the resource version, at any time."""
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


class RolloutFailed(StageError):
    """The pods of a release do not become ready; the message says why."""


def roll(deployment: Deployment, release: str, back_to: str | None, seconds: float) -> None:
    """Roll to `release` and wait until only its pods serve. Call within `Deployment.locked`.

    Args:
        release, back_to: addresses of repositories.
        seconds: limit of a rollout.

    Raises:
        StageError: it does not become ready. Either `back_to` serves again, or the message says
            why the rollback failed.
    """
    try:
        deployment.set_release(release, f"lathe deploy {release}")
        _wait(deployment, release, seconds)
    except (StageError, UserError) as error:
        name = deployment.name
        if back_to is None or back_to == release:
            outcome = f"there is no earlier release: {name} is left unchanged"
        else:
            log.warning("%s: %s does not become ready, rolling back to %s", name, release, back_to)
            try:
                deployment.set_release(
                    back_to, f"lathe: rolled back from {release}, which does not become ready"
                )
                _wait(deployment, back_to, seconds)
                outcome = f"rolled back to {back_to}, which is serving"
            except (StageError, UserError) as second:
                outcome = f"rolling back to {back_to} failed too: {second}"
        raise StageError(f"{error}\n{outcome}", error.code) from error
    except BaseException:  # a signal: there is no time to wait for the rollback
        if back_to:
            deployment.set_release(back_to, f"lathe: interrupted while rolling to {release}")
        raise


def _wait(deployment: Deployment, release: str, seconds: float) -> None:
    """Wait until only the pods of `release` serve.

    Raises:
        RolloutFailed: they crash or cannot start, or it takes longer than `seconds`.
    """
    started, said = time.monotonic(), ""
    while waits_for := _waits_for(resource := deployment.read()):
        if waits_for != said:
            log.info("%s: %s", deployment.name, waits_for)
            said = waits_for
        pods = deployment.pods(resource, release)
        # Give up at once where waiting longer is pointless.
        for pod, status in _containers(pods):
            waiting, ended, trouble = status.state.waiting, _last_end(status), ""
            if waiting and waiting.reason in HOPELESS:
                trouble = f"{waiting.reason}: {waiting.message}"
            elif status.restart_count >= MAX_RESTARTS and not status.ready and ended:
                trouble = (
                    f"crashed {status.restart_count} times, the last with exit code "
                    f"{ended.exit_code} ({ended.reason})"
                )
            if trouble:
                raise RolloutFailed(
                    f"{release}: pod {pod.metadata.name}, {status.name}: {trouble}"
                    f"{_last_lines(deployment, pods)}",
                    Code.FAILED,
                )
        # The conditions may still be those of the rollout before this one.
        seen = (resource.status.observed_generation or 0) >= resource.metadata.generation
        conditions = (resource.status.conditions or []) if seen else []
        is_over = any(c.reason == "ProgressDeadlineExceeded" for c in conditions)
        if is_over or time.monotonic() - started > seconds:
            passed = f"{time.monotonic() - started:.0f} s"
            raise RolloutFailed(
                f"{release}: not rolled out in {passed}: {waits_for}; "
                f"{_states(deployment, pods)}{_last_lines(deployment, pods)}",
                Code.TIMEOUT,
            )
        deployment.keep_lock()
        time.sleep(POLL_SECONDS)
    log.info("%s: %s is rolled out", deployment.name, release)


def _waits_for(resource: Object) -> str | None:
    """The reason why the rollout is not finished (only pods of the current template serve), or
    None."""
    status, wanted = resource.status, resource.spec.replicas
    wanted = 1 if wanted is None else wanted
    if (status.observed_generation or 0) < resource.metadata.generation:
        return "its controller has not observed the change"
    updated, available = status.updated_replicas or 0, status.available_replicas or 0
    if updated < wanted:
        return f"{updated} of {wanted} new pods are created"
    if (total := status.replicas or 0) > updated:
        return f"{total - updated} old pods are terminating"
    if available < updated:
        return f"{available} of {updated} new pods are available"
    return None


def _states(deployment: Deployment, pods: Sequence[Pod]) -> str:
    """The state of each pod and, indented, the events that say what it lacks, such as a secret."""
    states = []
    for pod in pods:
        conditions = pod.status.conditions or []
        states += [
            f"pod {pod.metadata.name} is {pod.status.phase}: {c.reason}: {c.message}"
            for c in conditions
            if c.status == "False" and c.message
        ] or [f"pod {pod.metadata.name} is {pod.status.phase}"]
    said: list[str] = []
    try:
        for pod in pods:
            said += deployment.warnings(pod.metadata.name)[-EVENTS:]
    except (StageError, UserError) as error:
        said = [f"(its events cannot be read: {str(error).splitlines()[0]})"]
    events = "".join(f"\n  {text}" for text in dict.fromkeys(said))
    return ("; ".join(states) or "it has no pods") + events


def _last_lines(deployment: Deployment, pods: Sequence[Pod]) -> str:
    """The last log lines of the container with the most to say, indented, if they can be read."""
    # A restarted one, in the log of its previous run; else one that runs but is not ready.
    restarted = [(p, s) for p, s in _containers(pods) if _last_end(s) and not s.ready]
    for pod, status in restarted or _containers(pods):
        if restarted or (status.state.running and not status.ready):
            previous = bool(restarted) and not status.state.terminated
            try:
                text = deployment.tail(pod.metadata.name, status.name, previous)
            except (StageError, UserError) as error:
                return f"\n  (its log cannot be read: {str(error).splitlines()[0]})"
            return "".join(f"\n  {line}" for line in text.splitlines())
    return ""


def _containers(pods: Sequence[Pod]) -> Iterator[tuple[Pod, Any]]:
    for pod in pods:
        statuses = (pod.status.init_container_statuses, pod.status.container_statuses)
        for status in (s for part in statuses for s in part or []):
            yield pod, status


def _last_end(status: Any) -> Any:
    """The termination state of the container's current or previous run; None if neither has
    ended."""
    return status.state.terminated or (status.last_state and status.last_state.terminated)

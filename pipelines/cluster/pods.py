"""A run's steps from their pods: states, reasons for waiting, and live logs.

Pipelines' own list of tasks ends at a condition, and lacks reasons and pod names (2.17); the
Kubernetes API has all of these, if the user may read pods.
"""

import re
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import urllib3
from kubernetes import client as kubernetes  # type: ignore[import-untyped]

from lathe_base.errors import StageError, UserError
from lathe_launch.cluster.api import WORKFLOWS, Cluster
from lathe_launch.cluster.logs import LogFollower
from lathe_launch.cluster.nodes import require_room_like
from lathe_launch.cluster.reasons import OOM, QUEUE, container_state, why_queued
from lathe_launch.cluster.status import pod_usage
from lathe_launch.usage import Usage
from pipelines.cluster import server
from pipelines.local.log import StageLog

STAGE, RUN = "lathe/stage", "pipeline/runid"
CONTAINER = "main"
NODE = "workflows.argoproj.io/node-name"
TURN = re.compile(r"\((\d+):")
"""Argo's number of a loop iteration, in the path of a node; the number of an attempt has no
colon."""
GATED = "SchedulingGated"
"""Reason of a pod that its queue has not admitted."""
STATES = {"Pending": "PENDING", "Running": "RUNNING", "Succeeded": "SUCCEEDED", "Failed": "FAILED"}
FATAL = re.compile(r"^F\d{4} .*?\] (.*)", re.MULTILINE)
"""The last line of a driver of Pipelines that fails, as klog writes it."""
LOG_SECONDS = 10.0
"""Maximum time to wait for the rest of a terminated pod's log."""


@dataclass(frozen=True)
class Step:
    """A step of a run at one moment.

    Attributes:
        state: PENDING, RUNNING, SUCCEEDED, FAILED, SKIPPED or CANCELED.
        attempt: number of retries so far.
        why: reason for waiting, or how its pod ended.
    """

    name: str
    state: str
    begun: datetime | None = None
    ended: datetime | None = None
    attempt: int = 0
    why: str = ""
    pod: str = ""


@dataclass
class _Log:
    follower: LogFollower
    words: StageLog = field(default_factory=StageLog)


class Pods:
    """The pods of one run.

    Args:
        emit: gets the relevant lines of the steps' logs as they arrive; None reads logs only on
            request.
    """

    def __init__(
        self, cluster: Cluster, run_id: str, emit: Callable[[str], None] | None = None
    ) -> None:
        self._cluster, self._run_id, self._emit = cluster, run_id, emit
        self._logs: dict[str, _Log] = {}

    def steps(self) -> list[Step]:
        """The steps that have a pod, each with its last one; and of Pipelines' own pods, such as a
        step's driver, those that cannot start.

        Raises:
            UserError, StageError: the pods cannot be listed.
        """
        pods = self._cluster.pods(f"{RUN}={self._run_id}")
        pods.sort(key=lambda pod: pod.metadata.creation_timestamp)
        steps: dict[str, Step] = {}
        for pod in pods:
            if STAGE not in (pod.metadata.labels or {}):
                # One of Pipelines' own, such as a driver: of interest only if it cannot start.
                path = (pod.metadata.annotations or {}).get(NODE, pod.metadata.name)
                system = _step(re.sub(r"\(\d+\)$", "", path).rpartition(".")[2], pod, 0)
                if system.state == "PENDING" and system.why:
                    steps[system.name] = system
                continue
            # In a loop, the iteration is part of the name: `tokenize 2`.
            path = (pod.metadata.annotations or {}).get(NODE, "")
            turns = [str(int(turn) + 1) for turn in TURN.findall(path)]
            name = " ".join([pod.metadata.labels[STAGE], *turns])
            # Each attempt has a pod: sorted by their creation, the last one stays.
            attempt = steps[name].attempt + 1 if name in steps else 0
            steps[name] = _step(name, pod, attempt)
        for name, step in steps.items():
            if step.why == GATED:  # by Kueue, which knows what the pod waits for
                metadata = next(p for p in pods if p.metadata.name == step.pod).metadata
                queue = metadata.labels.get(QUEUE)
                what = f"for quota in the queue {queue or 'of its scheduling gate'}"
                # Only Kueue's own queue must have a Workload.
                age = datetime.now(UTC) - metadata.creation_timestamp
                waited = age.total_seconds() if queue else 0.0
                why = why_queued(self._cluster, "Pod", step.pod, waited)
                steps[name] = replace(step, why=f"{what}: {why}" if why else what)
        for step in steps.values():
            if step.state == "PENDING" or self._emit is None:
                continue
            log = self._logs.get(step.pod)
            if log is None and step.state == "RUNNING":
                self._read(step, self._emit)
            elif log and step.state != "RUNNING":  # its last lines before its result
                log.follower.finish(LOG_SECONDS)
        return list(steps.values())

    def error(self, step: Step) -> tuple[StageError, list[str]]:
        """A failed step's own error, and the last lines of its log: only Lathe's own if there are
        any, because Pipelines' executor and launcher write many."""
        log = self._logs.get(step.pod) or self._read(step, None)
        log.words.failed = step.name
        return log.words.error(), list(log.words.marked) or list(log.follower.tail)

    def workflow_errors(self) -> list[str]:
        """Argo's messages about the run's failure, which Pipelines does not pass on, and what its
        drivers said last; empty if there are none, or no permission."""
        try:
            workflows = self._cluster.matching(WORKFLOWS, f"{RUN}={self._run_id}")
        except (UserError, StageError):
            return []
        # The last words of Pipelines' own pods that failed, which say more than Argo does.
        said: list[str] = []
        read = kubernetes.CoreV1Api(self._cluster.api).read_namespaced_pod_log
        for pod in self._cluster.pods(f"{RUN}={self._run_id}"):
            if STAGE in pod.metadata.labels or pod.status.phase != "Failed":
                continue
            name, namespace = pod.metadata.name, self._cluster.namespace
            with suppress(UserError, StageError):
                log = self._cluster.ask(read, name, namespace, container=CONTAINER, tail_lines=200)
                said += FATAL.findall(log)
        statuses = [workflow.get("status", {}) for workflow in workflows]
        said += [status.get("message", "") for status in statuses]
        for status in statuses:
            nodes = status.get("nodes") or {}
            said += [
                f"{node.get('displayName')}: {node['message']}"
                for node in nodes.values()
                if node.get("phase") in ("Failed", "Error") and node.get("type") == "Pod"
                if node.get("message")
            ]
        return list(dict.fromkeys(" ".join(text.split()) for text in said if text))[:5]

    def figures(self, names: Collection[str]) -> dict[str, dict[str, float]]:
        """The metrics in the logs of those steps, by step.

        Raises:
            UserError, StageError: the pods cannot be listed.
        """
        metrics: dict[str, dict[str, float]] = {}
        for step in self.steps():
            if step.name in names and step.state == "SUCCEEDED":
                log = self._logs.get(step.pod) or self._read(step, None)
                metrics[step.name] = log.words.figures
        return metrics

    def out_of_memory(self) -> dict[str, Any]:
        """The steps whose last pod was killed for memory, and that V1Pod; empty without one.

        Raises:
            UserError, StageError: the pods cannot be listed.
        """
        pods = self._cluster.pods(f"{RUN}={self._run_id},{STAGE}")
        pods.sort(key=lambda pod: pod.metadata.creation_timestamp)
        killed: dict[str, Any] = {}
        # Of several attempts, the last.
        for step, pod in {pod.metadata.labels[STAGE]: pod for pod in pods}.items():
            state = container_state(pod, CONTAINER)
            if state and state.terminated and state.terminated.reason == OOM:
                killed[step] = pod
        return killed

    def require_room(self, pod: Any, memory: str) -> None:
        """Check that another pod like this one may have this much memory: `require_room_like`."""
        require_room_like(self._cluster, pod, memory)

    def _read(self, step: Step, emit: Callable[[str], None] | None) -> _Log:
        words = StageLog()

        def take(line: str) -> None:
            for shown in words.feed(line):
                if emit:
                    emit(f"{step.name}: {shown.strip()}")

        log = _Log(LogFollower(self._cluster, step.pod, CONTAINER, take), words)
        self._logs[step.pod] = log
        log.follower.start()
        if step.state != "RUNNING":
            log.follower.finish(LOG_SECONDS)
        return log


def usage_by_run(cluster: Cluster) -> dict[str, dict[str, Usage]]:
    """What the steps of all runs whose pods exist have used, as the pods' status says: run id ->
    step, in the order in which they began -> all of its attempts.

    Raises:
        UserError, StageError: the pods cannot be listed.
    """
    usage: dict[str, dict[str, Usage]] = {}
    pods = cluster.pods(f"{RUN},{STAGE}")
    for pod in sorted(pods, key=lambda pod: pod.metadata.creation_timestamp):
        labels = pod.metadata.labels
        steps = usage.setdefault(labels[RUN], {})
        before = steps.get(labels[STAGE], Usage())
        steps[labels[STAGE]] = before + pod_usage(pod, CONTAINER)
    return usage


def open_pods(run_id: str, namespace: str, emit: Callable[[str], None] | None) -> Pods | str:
    """The run's pods, or the reason why they cannot be read."""
    try:
        cluster = server.open_cluster(namespace)
        kubernetes.CoreV1Api(cluster.api).list_namespaced_pod(
            cluster.namespace,
            label_selector=f"{RUN}={run_id}",
            limit=1,
            _request_timeout=server.KUBE_TIMEOUT,
        )
    except StageError as error:
        return str(error)
    except kubernetes.ApiException as error:
        return f"the Kubernetes API does not list pods: {error.reason}"
    except urllib3.exceptions.HTTPError as error:
        return f"the Kubernetes API does not answer: {error}"
    return Pods(cluster, run_id, emit)


def _step(name: str, pod: Any, attempt: int) -> Step:
    state = container_state(pod, CONTAINER)
    running = state.running if state else None
    ended = state.terminated if state else None
    latest = ended or running
    begun = latest.started_at if latest else None
    return Step(
        name=name,
        state=STATES.get(pod.status.phase, "RUNNING"),
        begun=begun or pod.metadata.creation_timestamp,
        ended=ended.finished_at if ended else None,
        attempt=attempt,
        why=_why(pod, state),
        pod=pod.metadata.name,
    )


def _why(pod: Any, state: Any) -> str:
    if state and state.terminated and state.terminated.exit_code:
        # Error says no more than the exit code; OOMKilled does.
        reason = state.terminated.reason
        detail = f" ({reason})" if reason not in (None, "Error") else ""
        return f"exit code {state.terminated.exit_code}{detail}"
    if pod.status.phase != "Pending":
        return pod.status.message or ""
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            if condition.reason == GATED:
                return GATED
            return str(condition.message or condition.reason)
    waiting = state.waiting if state else None
    if waiting and waiting.reason not in (None, "PodInitializing", "ContainerCreating"):
        return f"{waiting.reason}: {waiting.message or ''}".rstrip(": ")
    return ""

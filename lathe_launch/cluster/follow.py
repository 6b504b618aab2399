"""Follow a TrainJob until it ends, printing its first node's log to standard output."""

import logging
import re
import sys
import threading
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from kubernetes.client import ApiException  # type: ignore[import-untyped]

from lathe_base.config.settings import LaunchSettings
from lathe_base.errors import Code, StageError
from lathe_launch.cluster import reasons
from lathe_launch.cluster.api import (
    CONTAINER,
    DEADLINE,
    TRAINJOBS,
    Cluster,
    TrainJob,
    is_transient,
)
from lathe_launch.cluster.logs import LogFollower
from lathe_launch.cluster.status import pod_usage
from lathe_launch.shape import SCHEDULING_SECONDS
from lathe_launch.usage import Usage

log = logging.getLogger("lathe")

LOG_PATIENCE = 30.0


@dataclass(frozen=True)
class Patience:
    """Limits in seconds: between two polls, to schedule all pods, and to pull their images.

    Attributes:
        silence: how long pods may be missing before events are read.
        backoff: pause before the second attempt; doubles with each further one, up to 5 minutes.
    """

    look: int = 5
    scheduling: float = SCHEDULING_SECONDS
    starting: float = 300.0
    silence: float = 30.0
    backoff: float = 5.0


class Follower:
    """Follows one TrainJob. Pods that are gone are remembered by their last known state.

    State is polled every few seconds; watching in between only shows changes sooner, so a missed
    event only costs time.
    """

    def __init__(
        self, cluster: Cluster, job: TrainJob, settings: LaunchSettings, patience: Patience
    ) -> None:
        self._cluster, self._settings, self._patience = cluster, settings, patience
        self._name = job["metadata"]["name"]
        self._image = job["spec"]["trainer"]["image"]
        self._deadline = datetime.fromisoformat(job["metadata"]["annotations"][DEADLINE])
        # Trainer gives the JobSet the TrainJob's name.
        self._selector = f"jobset.sigs.k8s.io/jobset-name={self._name}"
        self._pods: dict[str, Any] = {}
        self._logs: dict[str, LogFollower] = {}
        self._since: str | None = None  # resource version
        self._waits: dict[str, float] = {}
        self._noticed = ""
        created = job["metadata"].get("creationTimestamp")  # of one that was adopted
        self._created = datetime.fromisoformat(created) if created else datetime.now(UTC)
        self._evicted = Usage()

    def run(self) -> None:
        """Return when the TrainJob has succeeded.

        Raises:
            NodeFailed, Preempted, StageError, UserError: it failed, or cannot start.
        """
        while True:
            self._watch_pods()
            job = self._cluster.get(TRAINJOBS, self._name)
            if job is None or "deletionTimestamp" in job["metadata"]:
                raise StageError(
                    f"TrainJob {self._name} was deleted by something other than its launcher",
                    Code.NOT_RUNNING,
                )
            conditions = {c["type"]: c for c in job.get("status", {}).get("conditions", [])}
            true = {kind for kind, one in conditions.items() if one.get("status") == "True"}
            if "Complete" in true:
                self._update_pods()
                return
            if "Failed" in true:
                self._update_pods()
                # JobSet deletes the pods of a failed job: what was seen of them explains it.
                pods = sorted(self._pods.values(), key=reasons.node_rank)
                logs = self._logs.items()
                tails = {reasons.node_rank(self._pods[uid]): list(one.tail) for uid, one in logs}
                raise reasons.failure(pods, tails, self._settings, conditions["Failed"])
            if datetime.now(UTC) > self._deadline:
                deadline = {"reason": "DeadlineExceeded"}
                raise reasons.failure([], {}, self._settings, deadline)
            if job["spec"].get("suspend") or "Suspended" in true:
                # The other waits begin anew once it is admitted.
                self._waits = {"quota": self._waits.get("quota", time.monotonic())}
                waited = self._waited("quota", True)
                queue = f"waits for quota in the queue {self._settings.queue}"
                why = reasons.why_queued(self._cluster, "TrainJob", self._name, waited)
                self._notice(f"{queue}: {why}" if why else queue)
                # The queue evicted the pods to reclaim quota; others will follow, with their waits.
                if self._pods:
                    self._evicted = self.used
                    self._finish_logs()
                    self._pods, self._logs, self._since = {}, {}, None
            else:
                self._waited("quota", False)
                self._check_pending()

    @property
    def used(self) -> Usage:
        """What the pods have used so far; they wait together, from the TrainJob's creation on."""
        pods = [pod_usage(pod, CONTAINER, self._created) for pod in self._pods.values()]
        waited = [one.waited_seconds for one in pods if one.waited_seconds is not None]
        each = (replace(one, hours=None, waited_seconds=None) for one in pods)
        together = sum(each, Usage(waited_seconds=max(waited, default=None)))
        return self._evicted + together

    def _watch_pods(self) -> None:
        """Process pod events until a pod ends or the next poll is due."""
        # Once a pod has ended, the TrainJob's own end is near.
        ended = [pod for pod in self._pods.values() if reasons.has_ended(pod)]
        seconds = 1 if ended else self._patience.look
        try:
            for event in self._cluster.watch_pods(self._selector, self._since, seconds):
                pod = event["object"]
                self._since = pod.metadata.resource_version
                self._update_pod(pod)
                if event["type"] != "ADDED" and reasons.has_ended(pod):
                    return  # ADDED: existing pods, not ordered by version
        except ApiException as error:
            self._since = None  # 410: that resource version has expired
            if error.status != 410 and not is_transient(error):
                self._cluster.pods(self._selector)  # raises an error that explains
            time.sleep(min(1, seconds))
        except Exception as error:
            if not is_transient(error):
                raise
            time.sleep(min(1, seconds))

    def _update_pods(self) -> None:
        """Process pod states that the watch has not reported yet, and the rest of the logs."""
        for pod in self._cluster.pods(self._selector):
            self._update_pod(pod)
        self._finish_logs()

    def _update_pod(self, pod: Any) -> None:
        uid = pod.metadata.uid
        self._pods[uid] = pod
        if not reasons.has_started(pod) or uid in self._logs:
            return
        # All logs are kept, for the last lines of a failure; only the first node's is shown.
        emit = print_line if reasons.node_rank(pod) == 0 else None
        self._logs[uid] = LogFollower(self._cluster, pod.metadata.name, CONTAINER, emit)
        self._logs[uid].start()

    def _check_pending(self) -> None:
        """Log why pods are missing or have not started, and fail after too long."""
        # If a quota or policy rejects the pods of Job and JobSet, only their events say so.
        nodes = len({reasons.node_rank(pod) for pod in self._pods.values()})
        missing = nodes < self._settings.nodes
        seconds = self._waited("pods", missing)
        if missing and seconds >= self._patience.silence:
            why = next(reversed(self._cluster.warnings(self._name)), "no events explain why")
            lack = f"has pods for {nodes} of {self._settings.nodes} nodes after {seconds:.0f} s"
            self._notice(f"{lack}: {why}")
            if seconds > self._patience.scheduling:
                what = f"TrainJob {self._name} {lack}: {why}"
                raise reasons.refused(what, self._cluster.namespace)
        # No node has room: a pool may scale up.
        pending = [pod for pod in self._pods.values() if not reasons.has_started(pod)]
        message = next(filter(None, map(reasons.unschedulable, pending)), None)
        seconds = self._waited("place", message is not None)
        if message:
            self._notice(f"waits to be scheduled: {message}")
            if seconds > self._patience.scheduling:
                raise reasons.no_node(message, seconds, self._settings)
        # An image or a secret is missing: a registry may recover.
        errors = [reasons.not_startable(pod, self._image) for pod in pending]
        error = next(filter(None, errors), None)
        seconds = self._waited("start", error is not None)
        if error:
            self._notice(error.what)
            if seconds > self._patience.starting:
                raise error

    def _waited(self, what: str, waits: bool) -> float:
        """Seconds for which pods have waited for `what` without a break."""
        if not waits:
            self._waits.pop(what, None)
            return 0.0
        now = time.monotonic()
        return now - self._waits.setdefault(what, now)

    def _finish_logs(self) -> None:
        end = time.monotonic() + LOG_PATIENCE
        for follower in self._logs.values():
            follower.finish(max(0.1, end - time.monotonic()))

    def _notice(self, text: str) -> None:
        """Log a reason for waiting once, ignoring differences in seconds and pod names."""
        key = re.sub(r"after \d+ s|pods \"[^\"]*\"", "", text)  # a Job names each pod anew
        if key != self._noticed:
            log.info("%s %s", self._name, text)
            self._noticed = key


_OUTPUT = threading.Lock()  # each pod's log is read by a thread of its own


def print_line(line: str) -> None:
    """Print a line of a pod's log at once."""
    with _OUTPUT:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

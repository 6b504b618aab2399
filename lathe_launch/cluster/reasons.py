"""Explains why a TrainJob's pods wait, and which of them made it fail, from the pods' status and
Kueue's Workloads.

When one worker fails, the others lose their peer or are terminated; the first failure is the cause.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kubernetes import client  # type: ignore[import-untyped]
from kubernetes.client import ApiException  # type: ignore[import-untyped]
from urllib3.exceptions import HTTPError

from lathe_base.config.settings import LaunchSettings
from lathe_base.errors import Code, Preempted, StageError, UserError
from lathe_launch.cluster.api import CONTAINER, TIMEOUT, Cluster, is_transient
from lathe_launch.shape import WorkerFailed

INDEX = "batch.kubernetes.io/job-completion-index"
IMAGE_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
CONFIGURATION = ("CreateContainerConfigError", "CreateContainerError")
LOST = ("FailedJobs", "ReachedMaxRestarts")
"""JobSet's reasons when one of its pods has failed: without a failure policy, and with
`maxRestarts`."""
EVICTED, OOM = "Evicted", "OOMKilled"
EVICTION_HINT = (
    "(request more: Launch.memory_per_node, or ephemeral-storage in the training runtime)"
)
"""For a pod that the kubelet evicted because it, or its node, ran low on disk or memory."""
OTHER_TAIL = 5
KUEUE, VERSIONS, WORKLOADS = "kueue.x-k8s.io", ("v1beta2", "v1beta1"), "workloads"
QUEUE = f"{KUEUE}/queue-name"
NO_WORKLOAD = (
    "Kueue has made no Workload for it: its controller does not run, or {} is not one of "
    "integrations.frameworks in the ConfigMap kueue-manager-config"
)
NO_WORKLOAD_SECONDS = 30
FRAMEWORKS = {"TrainJob": "trainer.kubeflow.org/trainjob", "Pod": "pod"}

Pod = Any  # a V1Pod
Tails = Mapping[int, Sequence[str]]


class NodeFailed(WorkerFailed):
    """A node (a pod of the TrainJob) failed: which, why, and the last lines of all.

    Attributes:
        out_of_memory: whether the kernel killed it because it reached its memory limit.
    """

    def __init__(
        self, node: int, exit_code: int, why: str, tails: Tails, out_of_memory: bool = False
    ) -> None:
        self.out_of_memory = out_of_memory
        tail = "\n".join(tails.get(node, ())) or "(no output)"
        super().__init__(node, exit_code, tail)
        if out_of_memory:
            self.code = Code.OUT_OF_MEMORY
        others = [
            f"[node {other}] {line}"
            for other, lines in sorted(tails.items())
            if other != node
            for line in list(lines)[-OTHER_TAIL:]
        ]
        parts = [f"node {node} {why}; its last lines:", tail]
        parts += ["last lines of the others:", *others] if others else []
        self.args = ("\n".join(parts),)


def node_rank(pod: Pod) -> int:
    """The rank of the node that a pod is."""
    labels, annotations = pod.metadata.labels or {}, pod.metadata.annotations or {}
    return int(labels.get(INDEX, annotations.get(INDEX, 0)))


def has_started(pod: Pod) -> bool:
    """Whether the pod's container has started."""
    return pod.status.phase not in (None, "Pending")


def has_ended(pod: Pod) -> bool:
    """Whether the pod has succeeded or failed."""
    return pod.status.phase in ("Succeeded", "Failed")


def container_state(pod: Pod, container: str = CONTAINER) -> Any:
    """The state of one of the pod's containers; None before it has one."""
    statuses = pod.status.container_statuses or []
    return next((status.state for status in statuses if status.name == container), None)


def exit_code(pod: Pod) -> int | None:
    """The exit code of the pod's container, or None."""
    ended = _terminated(pod)
    return None if ended is None else int(ended.exit_code)


def unschedulable(pod: Pod) -> str | None:
    """The scheduler's message for a pod that it cannot place."""
    condition = _condition(pod, "PodScheduled")
    if condition is None or condition.status != "False" or condition.reason != "Unschedulable":
        return None
    return str(condition.message)


def not_startable(pod: Pod, image: str) -> UserError | None:
    """The error for a container that cannot start: its image, or a missing secret."""
    state = container_state(pod)
    waiting = state.waiting if state else None
    if waiting is None:
        return None
    detail = f"{waiting.reason}: {waiting.message or ''}".rstrip(": ")
    if waiting.reason in IMAGE_PULL:
        return UserError(
            f"the image {image} cannot be pulled ({detail})",
            "`make push` it, or set LATHE_TRAIN_IMAGE to an existing image; a private registry "
            "needs imagePullSecrets in the training runtime",
            Code.NOT_FOUND,
        )
    if waiting.reason in CONFIGURATION:
        return UserError(
            f"the container of node {node_rank(pod)} cannot be created ({detail})",
            "create the secret or the volume that it names; for the store's secret see "
            "docs/how-to/cluster-install.md#keys-of-the-object-store",
            Code.NOT_FOUND,
        )
    return None


def no_node(message: str, seconds: float, settings: LaunchSettings) -> UserError:
    """The error for pods that could not be scheduled in time."""
    pool = f"Launch.node_pool={settings.node_pool}" if settings.node_pool else "the cluster"
    if settings.chooses_nodes:
        pool = "the nodes of Launch.node_selector and Launch.affinity"
    gpus = f"{settings.gpus_per_node} GPUs ({settings.gpu_resource})"
    asked = [gpus] if settings.gpus_per_node else []
    asked += [f"{settings.cpus_per_node} CPUs", f"{settings.memory_per_node} of memory"]
    return UserError(
        f"cannot schedule {settings.nodes} nodes after {seconds:.0f} s: {message}",
        f"let {pool} have {settings.nodes} free nodes with {', '.join(asked)} each (`kubectl get "
        "nodes -L lathe/node-pool`), request less, or queue with Launch.queue",
        Code.NO_ROOM,
    )


def refused(what: str, namespace: str) -> UserError:
    """The error for a TrainJob whose pods were not all created in time."""
    return UserError(
        what,
        f"`kubectl -n {namespace} get events` has details; change the namespace's quota or policy, "
        "or request less in the recipe's Launch settings",
        Code.NO_ROOM,
    )


def failure(
    pods: Sequence[Pod], tails: Tails, settings: LaunchSettings, condition: Mapping[str, str]
) -> StageError:
    """The error for a failed TrainJob, from its pods or else its own condition.

    Preempted: a pod was evicted, or exited with saved state before any other failed.
    """
    # A user's mistake explains all else.
    for pod in pods:
        if exit_code(pod) == UserError.status:
            return NodeFailed(node_rank(pod), UserError.status, "got invalid input", tails)
    if condition.get("reason") == "DeadlineExceeded":
        return StageError(
            f"Launch.deadline_hours={settings.deadline_hours:g} have passed; the same run with a "
            "longer deadline resumes from its last checkpoint",
            Code.TIMEOUT,
        )
    # Evictions, whatever the workers made of them.
    for pod in pods:
        if pod.status.reason == EVICTED:  # it will be again: by its own use of the node
            why = f"was evicted: {pod.status.message} {EVICTION_HINT}"
            return NodeFailed(node_rank(pod), 1, why, tails)
        if disrupted := _condition(pod, "DisruptionTarget"):
            return Preempted(
                f"node {node_rank(pod)} was evicted ({disrupted.reason}: {disrupted.message})"
            )
    # The worker that failed first; one that saved its state first was preempted.
    failed = sorted((pod for pod in pods if exit_code(pod)), key=_blame)
    if failed and exit_code(failed[0]) == Preempted.status:
        saved = all(exit_code(pod) == Preempted.status for pod in pods)
        state = "; all nodes have saved their state" if saved else ""
        return Preempted(f"node {node_rank(failed[0])} was terminated{state}")
    if failed:
        first = failed[0]
        why, is_oom = _why(first, settings), _terminated(first).reason == OOM
        return NodeFailed(node_rank(first), exit_code(first) or 0, why, tails, is_oom)
    for pod in pods:
        if pod.status.phase == "Failed":  # evicted before its container exited
            why = f"was terminated: {pod.status.reason}: {pod.status.message}"
            return NodeFailed(node_rank(pod), 1, why, tails)
    why = f"{condition.get('reason')}: {condition.get('message')}"
    if condition.get("reason") in LOST:  # the pod is gone and its failure was not seen
        return NodeFailed(0, 1, f"or another was lost ({why})", tails)
    return StageError(f"the TrainJob failed ({why})", Code.FAILED)


def _blame(pod: Pod) -> tuple[float, int, int]:
    """Sort key: when a pod failed or, if it saved its state and was deleted, was asked to
    terminate.

    Within one second (the API's resolution), a pod that was terminated without being deleted comes
    before those that lost a peer, and one that was deleted after them: JobSet deletes the pods of a
    failed job at once, whereas a deleted pod saves its state before its peers can lose it.
    """
    ended, deletion = _terminated(pod), pod.metadata.deletion_timestamp
    if ended.exit_code == Preempted.status and deletion is not None:
        # Kubernetes records when the pod was deleted plus the grace period.
        grace = pod.metadata.deletion_grace_period_seconds or 0
        return float(deletion.timestamp() - grace), 2, node_rank(pod)
    # Without a time, it is blamed last.
    when = ended.finished_at.timestamp() if ended.finished_at else float("inf")
    return when, ended.exit_code != Preempted.status, node_rank(pod)


def _why(pod: Pod, settings: LaunchSettings) -> str:
    ended = _terminated(pod)
    why = f"ended with exit code {ended.exit_code}"
    if ended.reason == OOM:
        return (
            f"{why}, OOMKilled: it needs more than "
            f"Launch.memory_per_node={settings.memory_per_node}, which includes /dev/shm"
        )
    if pod.status.reason:  # Evicted: its disk was full
        return f"{why}, {pod.status.reason}: {pod.status.message}"
    known = ended.reason not in (None, "Error", "Completed")
    return f"{why}, {ended.reason}" if known else why


def _terminated(pod: Pod) -> Any:
    state = container_state(pod)
    return state.terminated if state else None


def _condition(pod: Pod, kind: str) -> Any:
    """A condition of the pod, if it is true."""
    for condition in pod.status.conditions or []:
        if condition.type == kind and (kind == "PodScheduled" or condition.status == "True"):
            return condition
    return None


def why_queued(cluster: Cluster, kind: str, name: str, waited: float = 0.0) -> str:
    """The reason in Kueue's own words, from the Workload's conditions and the newest events about
    it and its owner, or why it cannot be told; empty while there is none.

    Args:
        kind: of the object that the Workload belongs to, TrainJob or Pod.
        waited: seconds for which the object has waited.
    """
    listing = client.CustomObjectsApi(cluster.api).list_namespaced_custom_object
    try:
        for version in VERSIONS:  # newest first: older Kueues have v1beta1 only
            try:
                answer = listing(
                    KUEUE, version, cluster.namespace, WORKLOADS, _request_timeout=TIMEOUT
                )
                break
            except ApiException as error:
                if error.status != 404 or version == VERSIONS[-1]:
                    raise
    except ApiException as error:
        if is_transient(error):
            return ""
        if error.status == 403:
            return f"no permission to ask why: {cluster.role} needs list {WORKLOADS}.{KUEUE}"
        return "the cluster has no Kueue: install it, or remove Launch.queue"
    except HTTPError:
        return ""
    said, sources = "", [(kind, name)]
    for workload in answer["items"]:
        owners = workload["metadata"].get("ownerReferences", [])
        if any(owner["kind"] == kind and owner["name"] == name for owner in owners):
            said = _queue_reason(workload)
            sources.append(("Workload", workload["metadata"]["name"]))
            break
    else:  # it may take a moment to appear
        said = NO_WORKLOAD.format(FRAMEWORKS[kind]) if waited > NO_WORKLOAD_SECONDS else ""
    # Events say what has no condition, such as a Workload that cannot be made or started.
    parts = [said] if said else []
    for source in sources:
        if (event := cluster.last_event(*source)) is None:
            continue
        text = " ".join(str(event.message or "").split())
        if (event.type == "Warning" or event.reason == "Pending") and text not in said:
            parts.append(f"{event.reason}: {text}")
    return "; ".join(dict.fromkeys(parts))


def _queue_reason(workload: dict[str, Any]) -> str:
    """What the Workload's conditions say: the last eviction, and what is missing now."""
    conditions = {one["type"]: one for one in workload.get("status", {}).get("conditions", [])}
    # Conditions are kept when they are no longer true.
    true = {kind for kind, one in conditions.items() if one["status"] == "True"}
    if workload.get("spec", {}).get("active") is False:
        return _said("it was deactivated", conditions.get("Evicted"))
    if "Admitted" in true:
        return "Kueue has admitted it, but it is still suspended: look at its controller's log"
    said = []
    if "Evicted" in true:
        said.append(_said("it was evicted", conditions["Evicted"]))
    if "QuotaReserved" in true:
        checks = workload["status"].get("admissionChecks", [])
        pending = [f"{one['name']} {one.get('message', '')}" for one in checks
                   if one["state"] != "Ready"]  # fmt: skip
        said.append(f"quota is reserved; waiting for {', '.join(pending) or 'its admission'}")
    elif "QuotaReserved" in conditions:
        said.append(_said("", conditions["QuotaReserved"]))
    return "; ".join(said)


def _said(what: str, condition: dict[str, Any] | None) -> str:
    if not condition:
        return what
    text = " ".join(str(condition.get("message", "")).split())
    return f"{what} ({condition.get('reason')}): {text}".strip()

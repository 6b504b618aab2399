"""Explains why the pods of a rollout do not become ready."""

from collections.abc import Iterator, Sequence
from typing import Any

HOPELESS = {
    "ErrImageNeverPull",
    "ImagePullBackOff",
    "InvalidImageName",
    "CreateContainerConfigError",
}
RESTARTS = 2  # after this many, a failing container is given up

Pod = Any  # kubernetes.client.V1Pod, which has no types


def hopeless(pods: Sequence[Pod]) -> str | None:
    """The first reason why waiting longer is pointless, with its pod."""
    for pod, status in _containers(pods):
        waiting, ended = status.state.waiting, _last_end(status)
        if waiting and waiting.reason in HOPELESS:
            return f"pod {pod.metadata.name}, {status.name}: {waiting.reason}: {waiting.message}"
        if status.restart_count >= RESTARTS and not status.ready and ended:
            return (
                f"pod {pod.metadata.name}, {status.name}: crashed {status.restart_count} times, "
                f"the last with exit code {ended.exit_code} ({ended.reason})"
            )
    return None


def states(pods: Sequence[Pod]) -> str:
    """The state of each pod."""
    said = []
    for pod in pods:
        conditions = pod.status.conditions or []
        said += [
            f"pod {pod.metadata.name} is {pod.status.phase}: {c.reason}: {c.message}"
            for c in conditions
            if c.status == "False" and c.message
        ] or [f"pod {pod.metadata.name} is {pod.status.phase}"]
    return "; ".join(said)


def failing(pods: Sequence[Pod]) -> tuple[str, str, bool] | None:
    """The pod and container with the most informative log, and whether to read the previous
    run's."""
    restarted = [(p, s) for p, s in _containers(pods) if _last_end(s) and not s.ready]
    for pod, status in restarted or _containers(pods):
        if restarted or (status.state.running and not status.ready):
            return pod.metadata.name, status.name, bool(restarted) and not status.state.terminated
    return None


def _containers(pods: Sequence[Pod]) -> Iterator[tuple[Pod, Any]]:
    for pod in pods:
        statuses = (pod.status.init_container_statuses, pod.status.container_statuses)
        for status in (s for part in statuses for s in part or []):
            yield pod, status


def _last_end(status: Any) -> Any:
    """The termination state of the container's current or previous run; None if neither has
    ended."""
    return status.state.terminated or (status.last_state and status.last_state.terminated)

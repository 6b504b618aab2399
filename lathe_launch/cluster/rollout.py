"""Roll the serving Deployment to another release, and back if that fails."""

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

from lathe_base.errors import Code, StageError, UserError
from lathe_launch.cluster.deployment import Deployment, Object

log = logging.getLogger("lathe")

POLL_SECONDS = 2.0
EVENTS = 3  # of each pod, in the message of a failed rollout
HOPELESS = {
    "ErrImageNeverPull",
    "ImagePullBackOff",
    "InvalidImageName",
    "CreateContainerConfigError",
}
RESTARTS = 2  # after this many, a failing container is given up

Pod = Any  # kubernetes.client.V1Pod, which has no types


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
        raise StageError(
            f"{error}\n{_go_back(deployment, release, back_to, seconds)}", error.code
        ) from error
    except BaseException:
        if back_to:
            deployment.set_release(back_to, f"lathe: interrupted while rolling to {release}")
        raise


def _go_back(deployment: Deployment, release: str, back_to: str | None, seconds: float) -> str:
    """Roll back; returns a sentence about the outcome."""
    if back_to is None or back_to == release:
        return f"there is no earlier release: {deployment.name} is left unchanged"
    log.warning(
        "%s: %s does not become ready, rolling back to %s", deployment.name, release, back_to
    )
    try:
        deployment.set_release(
            back_to, f"lathe: rolled back from {release}, which does not become ready"
        )
        _wait(deployment, back_to, seconds)
    except (StageError, UserError) as error:
        return f"rolling back to {back_to} failed too: {error}"
    return f"rolled back to {back_to}, which is serving"


def _wait(deployment: Deployment, release: str, seconds: float) -> None:
    started, said = time.monotonic(), ""
    while waits_for := _waits_for(resource := deployment.read()):
        if waits_for != said:
            log.info("%s: %s", deployment.name, waits_for)
            said = waits_for
        pods = deployment.pods(resource, release)
        # The conditions may still be those of the rollout before this one.
        seen = (resource.status.observed_generation or 0) >= resource.metadata.generation
        conditions = (resource.status.conditions or []) if seen else []
        is_over = any(c.reason == "ProgressDeadlineExceeded" for c in conditions)
        late = is_over or time.monotonic() - started > seconds
        if trouble := _hopeless(pods):
            raise RolloutFailed(f"{release}: {trouble}{_last_lines(deployment, pods)}", Code.FAILED)
        if late:
            passed = f"{time.monotonic() - started:.0f} s"
            raise RolloutFailed(
                f"{release}: not rolled out in {passed}: {waits_for}; "
                f"{_states(pods) or 'it has no pods'}{_warnings(deployment, pods)}"
                f"{_last_lines(deployment, pods)}",
                Code.TIMEOUT,
            )
        deployment.keep_lock()
        time.sleep(POLL_SECONDS)
    log.info("%s: %s is rolled out", deployment.name, release)


def _warnings(deployment: Deployment, pods: Sequence[Pod]) -> str:
    """The events that say what a pod lacks, such as a secret, indented."""
    said = []
    for pod in pods:
        try:
            said += deployment.warnings(pod.metadata.name)[-EVENTS:]
        except (StageError, UserError) as error:
            return f"\n  (its events cannot be read: {str(error).splitlines()[0]})"
    return "".join(f"\n  {text}" for text in dict.fromkeys(said))


def _last_lines(deployment: Deployment, pods: Sequence[Pod]) -> str:
    """The last log lines of the failing container, indented, if they can be read."""
    if (failing := _failing(pods)) is None:
        return ""
    try:
        text = deployment.tail(*failing)
    except (StageError, UserError) as error:
        return f"\n  (its log cannot be read: {str(error).splitlines()[0]})"
    return "".join(f"\n  {line}" for line in text.splitlines())


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


def _hopeless(pods: Sequence[Pod]) -> str | None:
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


def _states(pods: Sequence[Pod]) -> str:
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


def _failing(pods: Sequence[Pod]) -> tuple[str, str, bool] | None:
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

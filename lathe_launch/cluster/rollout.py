"""Roll the serving Deployment to another release, and back if that fails."""

import logging
import time
from collections.abc import Sequence
from typing import Any

from lathe_base.errors import StageError, UserError
from lathe_launch.cluster import rollout_pods
from lathe_launch.cluster.deployment import Deployment, Object

log = logging.getLogger("lathe")

POLL_SECONDS = 2.0
EVENTS = 3  # of each pod, in the message of a failed rollout


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
        raise StageError(f"{error}\n{_go_back(deployment, release, back_to, seconds)}") from error
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
    while waits_for := _waits_for(found := deployment.read()):
        if waits_for != said:
            log.info("%s: %s", deployment.name, waits_for)
            said = waits_for
        pods = deployment.pods(found, release)
        late = time.monotonic() - started > seconds or _deadline_exceeded(found)
        if trouble := rollout_pods.hopeless(pods):
            raise RolloutFailed(f"{release}: {trouble}{_last_lines(deployment, pods)}")
        if late:
            passed = f"{time.monotonic() - started:.0f} s"
            raise RolloutFailed(
                f"{release}: not rolled out in {passed}: {waits_for}; "
                f"{rollout_pods.states(pods) or 'it has no pods'}{_warnings(deployment, pods)}"
                f"{_last_lines(deployment, pods)}"
            )
        deployment.keep_lock()
        time.sleep(POLL_SECONDS)
    log.info("%s: %s is rolled out", deployment.name, release)


def _warnings(deployment: Deployment, pods: Sequence[Any]) -> str:
    """The events that say what a pod lacks, such as a secret, indented."""
    said = []
    for pod in pods:
        try:
            said += deployment.warnings(pod.metadata.name)[-EVENTS:]
        except (StageError, UserError) as error:
            return f"\n  (its events cannot be read: {str(error).splitlines()[0]})"
    return "".join(f"\n  {text}" for text in dict.fromkeys(said))


def _last_lines(deployment: Deployment, pods: Sequence[Any]) -> str:
    """The last log lines of the failing container, indented, if they can be read."""
    if (found := rollout_pods.failing(pods)) is None:
        return ""
    try:
        text = deployment.tail(*found)
    except (StageError, UserError) as error:
        return f"\n  (its log cannot be read: {str(error).splitlines()[0]})"
    return "".join(f"\n  {line}" for line in text.splitlines())


def _waits_for(found: Object) -> str | None:
    """The reason why the rollout is not finished (only pods of the current template serve), or
    None."""
    status, wanted = found.status, found.spec.replicas
    wanted = 1 if wanted is None else wanted
    if (status.observed_generation or 0) < found.metadata.generation:
        return "its controller has not observed the change"
    updated, available = status.updated_replicas or 0, status.available_replicas or 0
    if updated < wanted:
        return f"{updated} of {wanted} new pods are created"
    if (total := status.replicas or 0) > updated:
        return f"{total - updated} old pods are terminating"
    if available < updated:
        return f"{available} of {updated} new pods are available"
    return None


def _deadline_exceeded(found: Object) -> bool:
    seen = (found.status.observed_generation or 0) >= found.metadata.generation
    conditions = found.status.conditions or []
    return seen and any(c.reason == "ProgressDeadlineExceeded" for c in conditions)

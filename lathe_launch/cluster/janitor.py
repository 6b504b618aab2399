"""Delete TrainJobs orphaned by a killed launcher: `python -m lathe_launch.cluster.janitor`.

A TrainJob is deleted when the pod that owns it is gone, or has ended without another pod adopting
the TrainJob (a step's retry does so within moments), or when its deadline has passed. The janitor
keeps no state of its own, so it can run anywhere, at any time, any number of times.
"""

import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from lathe_base.errors import StageError, UserError, coded
from lathe_launch.cluster.api import DEADLINE, Cluster, TrainJob, connect

GRACE = timedelta(minutes=10)


def leftovers(cluster: Cluster, grace: timedelta = GRACE) -> Iterator[tuple[str, str | None]]:
    """Every TrainJob created by Lathe with the reason to delete it, or None."""
    jobs = cluster.trainjobs()  # listed before the pods: a launcher exists before its TrainJob
    pods = {pod.metadata.uid: pod for pod in cluster.pods()}
    for job in jobs:
        yield job["metadata"]["name"], _reason(job, pods, datetime.now(UTC) - grace)


def _reason(job: TrainJob, pods: Mapping[str, Any], before: datetime) -> str | None:
    """The reason to delete a TrainJob; a launcher that ended after `before` may still clean up
    itself."""
    metadata = job["metadata"]
    deadline = metadata.get("annotations", {}).get(DEADLINE)
    if deadline and datetime.fromisoformat(deadline) < before:
        return f"its deadline, {deadline}, has passed"
    owners = metadata.get("ownerReferences", [])
    living = [owner for owner in owners if owner["uid"] in pods]
    if not living:
        names = ", ".join(owner["name"] for owner in owners) or "that never existed"
        return f"the pod {names} no longer exists"
    if all(_ended_before(pods[owner["uid"]], before) for owner in living):
        return f"the pod {living[0]['name']} has ended"
    return None


def _ended_before(pod: Any, before: datetime) -> bool:
    if pod.status.phase not in ("Succeeded", "Failed"):
        return False
    states = [status.state for status in pod.status.container_statuses or []]
    ends = [state.terminated.finished_at for state in states if state and state.terminated]
    # Of an evicted pod no container's end may be known: it counts as long ago.
    known = [end for end in ends if end]
    return not known or max(known) < before


def main(
    namespace: Annotated[
        str | None, typer.Option(help="Default: POD_NAMESPACE, or this pod's own.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list TrainJobs that would be deleted.")
    ] = False,
    grace_minutes: Annotated[
        float, typer.Option(min=0, help="Minutes to wait after a launcher has exited.")
    ] = GRACE.total_seconds() / 60,
) -> None:
    """Delete TrainJobs whose launcher no longer exists or has ended, or whose deadline has
    passed."""
    try:
        cluster = connect("lathe-janitor", namespace)
        for name, reason in leftovers(cluster, timedelta(minutes=grace_minutes)):
            if reason is None:
                print(f"kept {name}")
                continue
            if not dry_run:
                cluster.delete(name)
            print(f"{'would delete' if dry_run else 'deleted'} {name}: {reason}", flush=True)
    except (UserError, StageError) as error:
        print(coded(error), file=sys.stderr)
        raise typer.Exit(error.status) from None


if __name__ == "__main__":
    typer.run(main)

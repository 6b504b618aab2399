"""Finding the pod that caused a TrainJob to fail from its pods alone."""

from datetime import UTC, datetime, timedelta

import pytest
from kubernetes import client

from lathe_base.config.settings import LaunchSettings
from lathe_base.errors import Preempted, StageError
from lathe_launch.cluster.api import CONTAINER
from lathe_launch.cluster.reasons import INDEX, NodeFailed, failure

GRACE = 300
FAILED = {"reason": "FailedJobs", "message": "jobset failed due to one or more job failures"}


def pod(node: int, code: int, ended: int, deleted: int | None = None) -> client.V1Pod:
    """A pod that exited with `code` at second `ended`, and was deleted at second `deleted`."""
    start = datetime(2026, 1, 5, tzinfo=UTC)
    metadata = client.V1ObjectMeta(labels={INDEX: str(node)})
    if deleted is not None:
        metadata.deletion_timestamp = start + timedelta(seconds=deleted + GRACE)
        metadata.deletion_grace_period_seconds = GRACE
    terminated = client.V1ContainerStateTerminated(
        exit_code=code, reason="Error", finished_at=start + timedelta(seconds=ended)
    )
    status = client.V1ContainerStatus(
        name=CONTAINER, image="i", image_id="i", ready=False, restart_count=0,
        state=client.V1ContainerState(terminated=terminated),
    )  # fmt: skip
    return client.V1Pod(
        metadata=metadata, status=client.V1PodStatus(phase="Failed", container_statuses=[status])
    )


def blamed(*pods: client.V1Pod) -> StageError:
    return failure(pods, {}, LaunchSettings(nodes=2), FAILED)


@pytest.mark.parametrize("saved", [5, 6])
def test_a_crash_is_no_preemption_of_the_peers_that_jobset_deletes_after_it(saved):
    found = blamed(pod(0, 1, ended=5), pod(1, Preempted.status, ended=saved, deleted=5))
    assert isinstance(found, NodeFailed) and found.rank == 0


def test_a_deleted_pod_is_a_preemption_though_its_peer_crashes_before_it_has_ended():
    found = blamed(pod(0, 1, ended=9), pod(1, Preempted.status, ended=10, deleted=5))
    assert isinstance(found, Preempted)


def test_a_pod_that_was_terminated_and_not_deleted_comes_before_a_crash_in_its_second():
    found = blamed(pod(0, 1, ended=5), pod(1, Preempted.status, ended=5))
    assert isinstance(found, Preempted)

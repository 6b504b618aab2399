"""Reads the status of a run's steps from Kubernetes: what a pod has used (how long it waited and
ran, with which GPUs), and the final state of a task."""

import base64
import gzip
import json
import logging
import os
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from lathe_base.errors import StageError, UserError
from lathe_launch.cluster.api import WORKFLOWS, connect
from lathe_launch.cluster.reasons import container_state
from lathe_launch.usage import Usage, left_usage, measure

log = logging.getLogger("lathe")

USAGE_SECONDS, STATE_SECONDS = 10.0, 30.0
"""Seconds to retry before a step ends without its usage, or a notice without the run's result."""
STEP = "main"
"""Argo's name of a step's container."""
PIPELINES = {"COMPLETE": "succeeded", "FAILED": "failed", "CANCELED": "cancelled"}
ARGO = {"Succeeded": "succeeded", "Failed": "failed", "Error": "failed"}
UNKNOWN = "ended"


def pod_usage(
    pod: Any, container: str, since: datetime | None = None, now: datetime | None = None
) -> Usage:
    """The usage of a V1Pod so far.

    Args:
        container: the one that computes.
        since: start of the wait for a node; default: the pod's creation.
        now: end of a container that has not ended; default: the present.
    """
    state = container_state(pod, container)
    ended = state.terminated if state else None
    latest = ended or (state.running if state else None)
    began = latest.started_at if latest else None
    end = (ended and ended.finished_at) or now or datetime.now(UTC)
    hours = max(0.0, (end - began).total_seconds()) / 3600 if began else None
    limits = next(
        ((c.resources and c.resources.limits) or {} for c in pod.spec.containers
         if c.name == container), {}
    )  # fmt: skip
    # All extended resources that Lathe requests are GPUs.
    gpus = sum(int(amount) for name, amount in limits.items() if "/" in name)
    scheduled = next(
        (c.last_transition_time for c in pod.status.conditions or []
         if c.type == "PodScheduled" and c.status == "True"), None
    )  # fmt: skip
    since = since or pod.metadata.creation_timestamp
    waited = max(0.0, (scheduled - since).total_seconds()) if scheduled and since else None
    gpu_hours = gpus * hours if hours is not None else None
    left = left_usage(ended.message) if ended else Usage()
    return Usage(hours=hours, waited_seconds=waited, gpu_hours=gpu_hours) + left


def step_usage() -> Usage:
    """The usage of this step so far: measured here and, in a pod, as its status says."""
    used = measure()
    name = os.environ.get("POD_NAME")
    if name and "KUBERNETES_SERVICE_HOST" in os.environ:
        try:
            pod = replace(connect(), patience=USAGE_SECONDS).pod(name)
        except (UserError, StageError, OSError) as error:
            log.warning("neither hours nor waiting time of this step are recorded: %s", error)
        else:
            used += pod_usage(pod, STEP) if pod else Usage()
    return used


def final_state(state: str, workflow: str, task: str) -> str:
    """`succeeded`, `failed` or `cancelled`; `ended` if it cannot be determined.

    Pipelines reports a task that has lost a pod as RUNNING forever, even if another attempt has
    succeeded; the state then comes from Argo, which starts the attempts.

    Args:
        state: the task's state according to Pipelines.
        workflow, task: names of Argo's workflow and of the task in it.
    """
    if state in PIPELINES:
        return PIPELINES[state]
    try:
        cluster = replace(connect(), patience=STATE_SECONDS)
        resource = cluster.get(WORKFLOWS, workflow) or {}
    except (UserError, StageError) as error:
        log.warning("cannot determine the run's result: %s", error)
        return UNKNOWN
    status = resource.get("status", {})
    nodes = status.get("nodes") or {}
    if compressed := status.get("compressedNodes"):
        # Argo compresses the nodes of large workflows, which exceed etcd's limit.
        nodes = json.loads(gzip.decompress(base64.b64decode(compressed)))
    phases = [node.get("phase") for node in nodes.values() if node.get("displayName") == task]
    return next((ARGO[phase] for phase in phases if phase in ARGO), UNKNOWN)

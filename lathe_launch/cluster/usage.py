"""What a pod has used, as its status says: how long it waited and ran, with which GPUs."""

import logging
import os
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from lathe_base.errors import StageError, UserError
from lathe_launch.cluster.api import connect
from lathe_launch.usage import Usage, left_usage, measure

log = logging.getLogger("lathe")

PATIENCE_SECONDS = 10.0
STEP = "main"
"""Argo's name of a step's container."""


def pod_usage(
    pod: Any, container: str, since: datetime | None = None, now: datetime | None = None
) -> Usage:
    """The usage of a V1Pod so far.

    Args:
        container: the one that computes.
        since: start of the wait for a node; default: the pod's creation.
        now: end of a container that has not ended; default: the present.
    """
    status = next((s for s in pod.status.container_statuses or [] if s.name == container), None)
    state = status.state if status else None
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
            pod = replace(connect(), patience=PATIENCE_SECONDS).pod(name)
        except (UserError, StageError, OSError) as error:
            log.warning("neither hours nor waiting time of this step are recorded: %s", error)
        else:
            used += pod_usage(pod, STEP) if pod else Usage()
    return used

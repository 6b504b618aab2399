"""The final state of a task in a pipeline run."""

import base64
import gzip
import json
import logging
from dataclasses import replace

from lathe_base.errors import StageError, UserError
from lathe_launch.cluster.api import connect

log = logging.getLogger("lathe")

PATIENCE_SECONDS = 30.0
PIPELINES = {"COMPLETE": "succeeded", "FAILED": "failed", "CANCELED": "cancelled"}
ARGO = {"Succeeded": "succeeded", "Failed": "failed", "Error": "failed"}
UNKNOWN = "ended"


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
        resource = replace(connect(), patience=PATIENCE_SECONDS).workflow(workflow) or {}
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

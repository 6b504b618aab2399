"""Why Kueue does not admit a TrainJob or a pod, from its Workload."""

from typing import Any

from kubernetes import client  # type: ignore[import-untyped]
from kubernetes.client import ApiException  # type: ignore[import-untyped]
from urllib3.exceptions import HTTPError

from lathe_launch.cluster.api import TIMEOUT, Cluster, is_transient

KUEUE, VERSIONS, WORKLOADS = "kueue.x-k8s.io", ("v1beta2", "v1beta1"), "workloads"
QUEUE = f"{KUEUE}/queue-name"
NONE = (
    "Kueue has made no Workload for it: its controller does not run, or {} is not one of "
    "integrations.frameworks in the ConfigMap kueue-manager-config"
)
FRAMEWORKS = {"TrainJob": "trainer.kubeflow.org/trainjob", "Pod": "pod"}


def why_queued(cluster: Cluster, kind: str, name: str, waited: float = 0.0) -> str:
    """The reason in Kueue's own words, or why it cannot be told; empty while there is none.

    Args:
        kind: of the object that the Workload belongs to, TrainJob or Pod.
        waited: seconds for which the object has waited.
    """
    try:
        workloads = _workloads(cluster)
    except ApiException as error:
        if is_transient(error):
            return ""
        if error.status == 403:
            return f"no permission to ask why: {cluster.role} needs list {WORKLOADS}.{KUEUE}"
        return "the cluster has no Kueue: install it, or remove Launch.queue"
    except HTTPError:
        return ""
    for workload in workloads:
        owners = workload["metadata"].get("ownerReferences", [])
        if any(owner["kind"] == kind and owner["name"] == name for owner in owners):
            return _reason(workload)
    return NONE.format(FRAMEWORKS[kind]) if waited > 30 else ""


def _workloads(cluster: Cluster) -> list[dict[str, Any]]:
    listing = client.CustomObjectsApi(cluster.api).list_namespaced_custom_object
    for version in VERSIONS:
        try:
            answer = listing(KUEUE, version, cluster.namespace, WORKLOADS, _request_timeout=TIMEOUT)
            return list(answer["items"])
        except ApiException as error:
            if error.status != 404 or version == VERSIONS[-1]:
                raise
    raise AssertionError


def _reason(workload: dict[str, Any]) -> str:
    """What the Workload's conditions say: the last eviction, and what is missing now."""
    conditions = {one["type"]: one for one in workload.get("status", {}).get("conditions", [])}
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

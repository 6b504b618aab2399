"""A queue that does not admit a TrainJob is heard: its Workload's conditions, or why there is
none."""

from dataclasses import replace
from typing import Any

import pytest

from lathe_launch.cluster.api import connect
from lathe_launch.cluster.reasons import NO_WORKLOAD, why_queued
from tests.support.fake_kubernetes import FakeKubernetes

MESSAGE = "couldn't assign flavors to pod set node: insufficient unused quota for nvidia.com/gpu"


def condition(kind: str, status: str, reason: str = "", message: str = "") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


PENDING = condition("QuotaReserved", "False", "Pending", MESSAGE)
CASES: dict[str, tuple[list[dict[str, str]], dict[str, Any], str]] = {
    "no quota": ([PENDING], {}, f"(Pending): {MESSAGE}"),
    "preempted": (
        [PENDING, condition("Evicted", "True", "Preempted", "Preempted to accommodate a workload")],
        {},
        f"it was evicted (Preempted): Preempted to accommodate a workload; (Pending): {MESSAGE}",
    ),
    "no queue": (
        [condition("QuotaReserved", "False", "Inadmissible", "LocalQueue lathe doesn't exist")],
        {},
        "(Inadmissible): LocalQueue lathe doesn't exist",
    ),
    "deactivated": (
        [condition("Evicted", "True", "Deactivated", "The workload is deactivated")],
        {"active": False},
        "it was deactivated (Deactivated): The workload is deactivated",
    ),
    "never resumed": (
        [condition("QuotaReserved", "True"), condition("Admitted", "True")],
        {},
        "Kueue has admitted it, but it is still suspended: look at its controller's log",
    ),
    "nothing yet": ([], {}, ""),
}


@pytest.mark.parametrize("name", CASES)
def test_the_words_of_the_workload(in_pod: FakeKubernetes, name: str) -> None:
    conditions, spec, said = CASES[name]
    for job in ("another", "pretrain-1"):
        made = in_pod.create("configmaps", {"metadata": {"name": job}})  # any object that exists
        owner = {"kind": "TrainJob", "name": job, "uid": made["metadata"]["uid"]}
        body = {
            "metadata": {"name": f"trainjob-{job}", "ownerReferences": [owner]},
            "spec": spec if job == "pretrain-1" else {},
            "status": {"conditions": conditions if job == "pretrain-1" else []},
        }
        in_pod.create("workloads.kueue.x-k8s.io", body)
    assert why_queued(connect(), "TrainJob", "pretrain-1") == said


def test_a_queue_that_cannot_be_asked(in_pod: FakeKubernetes) -> None:
    cluster = replace(connect(), patience=1.0)
    assert why_queued(cluster, "TrainJob", "pretrain-1") == ""
    none = NO_WORKLOAD.format("trainer.kubeflow.org/trainjob")
    assert why_queued(cluster, "TrainJob", "pretrain-1", waited=31) == none
    in_pod.denied.add(("list", "workloads"))
    asked = why_queued(cluster, "TrainJob", "pretrain-1")
    assert asked.endswith("lathe-pipeline needs list workloads.kueue.x-k8s.io")
    in_pod.denied.clear()
    in_pod.absent.add("kueue.x-k8s.io")
    assert why_queued(cluster, "TrainJob", "pretrain-1").startswith("the cluster has no Kueue")

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
NO_FLAVOR = "couldn't assign flavors to pod set node: flavor h100 not found"
ADMITTED = [condition("QuotaReserved", "True"), condition("Admitted", "True")]
STUCK = "Kueue has admitted it, but it is still suspended: look at its controller's log"
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
        ADMITTED,
        {},
        STUCK,
    ),
    "nothing yet": ([], {}, ""),
}


Event = tuple[str, str, str, str]
"""Kind of the object, type, reason, message."""
EVENTS: dict[str, tuple[list[dict[str, str]], list[Event], str]] = {
    "no condition yet": (
        [],
        [("Workload", "Normal", "Pending", NO_FLAVOR)],
        f"Pending: {NO_FLAVOR}",
    ),
    "less than the event": (
        [condition("QuotaReserved", "False", "Pending", "inadmissible")],
        [("Workload", "Warning", "Pending", NO_FLAVOR)],
        f"(Pending): inadmissible; Pending: {NO_FLAVOR}",
    ),
    "the same as the event": (
        [PENDING],
        [("Workload", "Warning", "Pending", MESSAGE)],
        f"(Pending): {MESSAGE}",
    ),
    "never resumed": (
        ADMITTED,
        [
            ("Workload", "Warning", "Pending", MESSAGE),
            ("Workload", "Normal", "Admitted", "Admitted by ClusterQueue lathe"),
            ("TrainJob", "Warning", "InvalidPodSetInfo", "conflicting nodeSelector"),
        ],
        f"{STUCK}; InvalidPodSetInfo: conflicting nodeSelector",
    ),
    "made": ([], [("TrainJob", "Normal", "CreatedWorkload", "Created Workload: it")], ""),
}


def event(server: FakeKubernetes, kind: str, of: str, second: int, words: Event) -> None:
    body = {
        "metadata": {"name": f"{of}.{second}", "namespace": "lathe"},
        "involvedObject": {"kind": kind, "name": of},
        **{"type": words[1], "reason": words[2], "message": words[3]},
        "lastTimestamp": f"2026-01-05T03:00:0{second}Z",
    }
    server.create("events", body)


@pytest.mark.parametrize("name", CASES)
def test_the_words_of_the_workload(in_pod: FakeKubernetes, name: str) -> None:
    conditions, spec, said = CASES[name]
    create_workloads(in_pod, conditions, spec)
    assert why_queued(connect(), "TrainJob", "pretrain-1") == said


@pytest.mark.parametrize("name", EVENTS)
def test_events_say_what_the_conditions_do_not(in_pod: FakeKubernetes, name: str) -> None:
    conditions, events, said = EVENTS[name]
    create_workloads(in_pod, conditions, {})
    names = {"TrainJob": "pretrain-1", "Workload": "trainjob-pretrain-1"}
    for second, words in enumerate(events):
        event(in_pod, words[0], names[words[0]], second, words)
    event(in_pod, "Workload", "trainjob-pretrain-11", 9, ("", "Warning", "Pending", "another's"))
    assert why_queued(connect(), "TrainJob", "pretrain-1") == said
    in_pod.denied.add(("list", "events"))
    less = why_queued(connect(), "TrainJob", "pretrain-1")
    assert said.startswith(less) and bool(less) == bool(conditions)


def create_workloads(
    in_pod: FakeKubernetes, conditions: list[dict[str, str]], spec: dict[str, Any]
) -> None:
    for job in ("another", "pretrain-1"):
        made = in_pod.create("configmaps", {"metadata": {"name": job}})  # any object that exists
        owner = {"kind": "TrainJob", "name": job, "uid": made["metadata"]["uid"]}
        body = {
            "metadata": {"name": f"trainjob-{job}", "ownerReferences": [owner]},
            "spec": spec if job == "pretrain-1" else {},
            "status": {"conditions": conditions if job == "pretrain-1" else []},
        }
        in_pod.create("workloads.kueue.x-k8s.io", body)


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

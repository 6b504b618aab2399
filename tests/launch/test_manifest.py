"""The TrainJob that the launcher creates: its contents, what it must not contain, its name."""

import json
import re

import pytest

from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.fake_trainer import TRAINJOBS
from tests.support.launchers import (
    COMMAND,
    eventually,
    launch,
    play,
    succeed,
)

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_the_manifest(in_pod: FakeKubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store:9000")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-access-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-for-the-manifest")
    monkeypatch.setenv("LATHE_S3_SECRET_DIR", "/secrets")
    monkeypatch.setenv("UNRELATED", "value")
    monkeypatch.setenv("LATHE_SERVE_PORT", "tcp://10.96.0.7:8001")  # set by Kubernetes
    monkeypatch.setenv("LATHE_NETWORK_TIMEOUT", "60")
    monkeypatch.setenv("LATHE_PIPELINE", "full@sha256:12")
    settings = {"gpus_per_node": 2, "node_pool": "a100", "queue": "training", "priority": "high"}
    trainer = play(in_pod, succeed)
    devices = {"rdma/hca": 8, "hugepages-2Mi": "5Gi"}
    launch(nodes=2, processes=2, shared_memory="4Gi", extra_resources=devices, **settings)
    (job,) = trainer.created
    said = json.dumps(job)
    assert "an-access-key" not in said and "not-for-the-manifest" not in said
    assert "UNRELATED" not in said and "LATHE_S3_SECRET_DIR" not in said
    assert "LATHE_SERVE_PORT" not in said and "LATHE_NETWORK_TIMEOUT" in said
    assert re.fullmatch("pretrain-[0-9a-f]{6}-1", job["metadata"]["name"])
    labels = job["metadata"]["labels"]
    assert re.fullmatch("[0-9a-f]{10}", labels.pop("lathe/work"))
    assert labels == {
        "app.kubernetes.io/name": "lathe",
        "app.kubernetes.io/part-of": "lathe",
        "lathe/run-id": "5f0c31b2-run",
        "lathe/stage": "pretrain",
        "kueue.x-k8s.io/queue-name": "training",
        "kueue.x-k8s.io/priority-class": "high",
    }
    assert job["metadata"]["ownerReferences"][0]["name"] == "step-1"
    assert job["spec"]["activeDeadlineSeconds"] in range(240 * 3600 - 60, 240 * 3600 + 1)
    assert job["spec"]["runtimeRef"] == {
        **{"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime"},
        "name": "lathe-torch",
    }
    work = job["spec"]["trainer"]
    assert work["image"] == "lathe-train:1"
    assert "command" not in work and work["args"] == COMMAND
    assert work["numNodes"] == 2 and work["numProcPerNode"] == 2
    amounts = {"cpu": "4", "memory": "32Gi", "nvidia.com/gpu": "2"}
    amounts |= {"rdma/hca": "8", "hugepages-2Mi": "5Gi"}
    assert work["resourcesPerNode"] == {"limits": amounts, "requests": amounts}
    env = {variable["name"]: variable for variable in work["env"]}
    assert env["AWS_ENDPOINT_URL"]["value"] == "http://store:9000"
    assert env["LATHE_PIPELINE"]["value"] == "full@sha256:12"
    assert env["LATHE_IMAGE"]["value"] == "lathe-train:1"
    reference = env["AWS_SECRET_ACCESS_KEY"]["valueFrom"]["secretKeyRef"]
    assert reference == {"name": "lathe-s3", "key": "secretkey", "optional": True}
    patched = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    pod = patched["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"lathe/node-pool": "a100"}
    assert [taint["key"] for taint in pod["tolerations"]] == ["lathe/node-pool", "nvidia.com/gpu"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
    container = pod["containers"][0]["securityContext"]
    assert container["allowPrivilegeEscalation"] is False
    assert container["capabilities"] == {"drop": ["ALL"]}
    shared_memory = {"medium": "Memory", "sizeLimit": "4Gi"}
    key = {"secretName": "lathe-signing", "optional": True}
    assert pod["volumes"][2] == {"name": "signing-key", "secret": key}
    mounts = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts["signing-key"]["mountPath"] == "/var/run/lathe/signing"
    assert pod["volumes"][0] == {"name": "shared-memory", "emptyDir": shared_memory}


def test_a_priority_without_a_queue(in_pod: FakeKubernetes) -> None:
    with raises(Code.MISSING_OPTION, "Launch.priority=high"):
        launch(priority="high")


def test_the_label_is_of_the_run_and_the_work(in_pod: FakeKubernetes) -> None:
    trainer = play(in_pod, succeed)
    for settings in ({}, {}, {"cpus_per_node": 8}):
        launch(**settings)
        eventually(lambda: not in_pod.list(TRAINJOBS))
    names = [job["metadata"]["labels"]["lathe/work"] for job in trainer.created]
    assert names[0] == names[1] != names[2]

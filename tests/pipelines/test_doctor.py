"""`make doctor` with its pod run as a local process, a real store and a fake cluster."""

import base64
import os
import re
import signal
import subprocess
from dataclasses import replace
from decimal import Decimal

import kubernetes_validate
import pytest
import yaml
from kubernetes.client import ApiClient, V1ObjectMeta, V1ResourceQuota, V1ResourceQuotaStatus
from typer.testing import CliRunner

from components.machines import Pool
from components.plan import plan
from lathe_base.checks import Finding
from lathe_base.config.settings import LaunchSettings
from lathe_base.storage import list_objects, write_text
from lathe_launch.cluster.all_reduce import two_nodes
from lathe_launch.cluster.doctor import RIGHTS, pipeline_root
from pipelines.cluster.capacity import (
    GIB,
    TRAINJOB,
    Need,
    _counts,
    _free,
    _refused,
    with_sidecars,
)
from pipelines.cluster.doctor import app, step_pod
from pipelines.cluster.results import ResultsReader
from pipelines.cluster.server import connect, open_cluster
from tests.support import warm
from tests.support.compiled import pods, tolerations
from tests.support.fake_kubelet import RUNTIMES, Kubelet, trainer_webhook
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.fake_trainer import TRAINJOBS, Pod, Trainer, run_command
from tests.support.launchers import eventually
from tests.support.rendered import ROOT
from tests.support.s3 import ACCESS_KEY, SECRET_KEY

GIB64 = {"cpu": "64", "memory": "64Gi", "nvidia.com/gpu": "2", "pods": "110"}
KUBERNETES = "1.32"


@pytest.fixture
def cluster(kfp, s3, monkeypatch, tmp_path):
    """A complete Kubeflow cluster with the manifests applied, and a store."""
    with FakeKubernetes() as server:
        path = str(server.kubeconfig(tmp_path))
        monkeypatch.setenv("KUBECONFIG", str(path))
        monkeypatch.setenv("LATHE_KFP_NAMESPACE", "lathe")
        keys = {"accesskey": ACCESS_KEY, "secretkey": SECRET_KEY}
        encoded = {name: base64.b64encode(key.encode()).decode() for name, key in keys.items()}
        server.create("secrets", {"metadata": {"name": "lathe-s3"}, "data": encoded})
        host, _, port = kfp.url.removeprefix("http://").partition(":")
        maps = {
            "lathe-store": {"endpoint": os.environ["AWS_ENDPOINT_URL"], "region": "us-east-1"},
            "kfp-launcher": {"defaultPipelineRoot": f"{s3}/runs"},
            "metadata-grpc-configmap": {
                "METADATA_GRPC_SERVICE_HOST": host,
                "METADATA_GRPC_SERVICE_PORT": port,
            },
        }
        for name, data in maps.items():
            server.create("configmaps", {"metadata": {"name": name}, "data": data})
        for runtime in ("torch", "paddle"):
            made = (ROOT / "manifests" / "base" / "runtimes" / f"{runtime}.yaml").read_text()
            server.create(RUNTIMES, yaml.safe_load(made))
        labels = {"lathe/node-pool": "gpu"}
        node = {"metadata": {"name": "node-1", "labels": labels}, "spec": {}}
        server.create("nodes", node | {"status": {"allocatable": GIB64}}, "")
        quota = {"metadata": {"name": "lathe"}, "status": {"hard": {"requests.cpu": "128"}}}
        server.create("resourcequotas", quota)
        server.create("serviceaccounts", {"metadata": {"name": "default-editor"}})
        trainer_webhook(server)
        monkeypatch.setattr("pipelines.cluster.doctor.POLL_SECONDS", 0.05)
        yield server


def play(server: FakeKubernetes, script=run_command) -> Kubelet:
    kubelet = Kubelet(server, script)
    kubelet.start()
    return kubelet


def quick(pod: Pod) -> None:
    pod.start()
    pod.say(Finding("a check", "ok").line())
    pod.end()


def doctor(kfp, *arguments: str):
    return CliRunner().invoke(app, ["--inside", kfp.url, *arguments])


def findings(output: str) -> dict[str, tuple[str, str]]:
    """Parse the table: check -> state, and text with hints."""
    rows: dict[str, tuple[str, str]] = {}
    last = ""
    for line in output.splitlines():
        if not line.startswith("│"):
            continue
        check, state, found = (cell.strip() for cell in line.split("│")[1:-1])
        last = check or last
        before = rows.get(last, ("", ""))
        rows[last] = (state or before[0], f"{before[1]} {found}".strip())
    return rows


def test_a_cluster_in_order(kfp, cluster, s3):
    write_text(f"{s3}/runs/mine", "stays")
    play(cluster)
    result = doctor(kfp, "--gpus", "0", "--nodes", "2")
    assert result.exit_code == 0, result.output
    found = findings(result.output)
    states = {check: state for check, (state, _) in found.items()}
    states.pop("Triton, here")
    # The tests' S3 server ignores conditions of a PUT.
    assert states.pop("object store: conditional put") == "warning"
    assert set(states.values()) == {"ok"}, found
    stores = ("put", "get", "list", "multipart upload", "delete")
    assert set(states) >= {f"object store: {name}" for name in stores}
    assert set(states) >= {"Kubernetes API", "Trainer", "JobSet", "names", "quota"}
    assert "a TrainJob of runtime lathe-torch is accepted (dry run)" in found["Trainer"][1]
    assert not cluster.list("pods") and not cluster.list("trainjobs.trainer.kubeflow.org")
    assert [uri.rpartition("/")[2] for uri in list_objects(f"{s3}/runs/")] == ["mine"]


def measures(pod: Pod) -> None:
    """The doctor's first pod finds something, and its second measures an all-reduce."""
    (run_command if "lathe_launch.cluster.all_reduce" in pod.container["command"] else quick)(pod)


def test_an_all_reduce_between_two_nodes(kfp, cluster, monkeypatch):
    monkeypatch.setattr("pipelines.cluster.doctor.ALL_REDUCE_SECONDS", 0.05)
    monkeypatch.setenv(warm.CHILDREN, "yes")
    kubelet = play(cluster, measures)
    trainer = Trainer(cluster, run_command)
    trainer.start()
    result = doctor(kfp, "--gpus", "0", "--all-reduce", "-o", "Launch.node_selector={disk: ssd}")
    state, said = findings(result.output)["all-reduce"]
    assert state == "ok", result.output
    assert "GB/s bus bandwidth between 2 processes on 2 nodes (CPU)" in said
    # The TrainJob was a training's, on two nodes, and belonged to the doctor's pod.
    (job,) = trainer.created
    assert job["spec"]["trainer"]["numNodes"] == 2
    assert job["metadata"]["ownerReferences"][0]["uid"] in kubelet.pods
    (patch,) = job["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    template = replicated["template"]["spec"]["template"]
    assert template["spec"]["nodeSelector"] == {"disk": "ssd"}
    (apart,) = template["spec"]["affinity"]["podAntiAffinity"].popitem()[1]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert apart["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    eventually(lambda: not cluster.list("pods") and not cluster.list(TRAINJOBS))


def test_an_all_reduce_stays_in_the_pool():
    settings = two_nodes(LaunchSettings(gpus_per_node=8, node_pool="gpu", nodes=4))
    assert (settings.nodes, settings.gpus_per_node) == (2, 8)
    assert settings.selector(settings.node_pool) == {"lathe/node-pool": "gpu"}
    assert settings.tolerated(settings.node_pool, True)[0]["key"] == "lathe/node-pool"


def test_an_all_reduce_that_fails(kfp, cluster):
    def fail(pod: Pod) -> None:
        pod.start()
        pod.say("error[no-gpu]: torch finds 0 GPUs")
        pod.end(2)

    play(cluster, measures)
    Trainer(cluster, fail).start()
    result = doctor(kfp, "--gpus", "0", "--all-reduce")
    state, said = findings(result.output)["all-reduce"]
    assert (result.exit_code, state) == (1, "broken") and "torch finds 0 GPUs" in said
    eventually(lambda: not cluster.list("pods") and not cluster.list(TRAINJOBS))


def test_a_triton_with_known_vulnerabilities_is_reported(triton, kfp, cluster):
    play(cluster, quick)
    state, said = findings(doctor(kfp, "--gpus", "0").output)["Triton, here"]
    assert state == "warning" and "2.51.0" in said and "docs/security.md" in said


def test_problems_are_reported_with_their_fixes(kfp, cluster):
    play(cluster)
    cluster.denied |= {("create", "workflowtaskresults"), ("patch", "trainjobs")}
    cluster.patch("configmaps", "metadata-grpc-configmap", {"data": {
        "METADATA_GRPC_SERVICE_PORT": "9"}})  # fmt: skip
    wrong = base64.b64encode(b"wrong").decode()
    cluster.patch("secrets", "lathe-s3", {"data": {"secretkey": wrong}})
    result = doctor(kfp, "--gpus", "0")
    assert result.exit_code == 1
    found = findings(result.output)
    broken = {check for check, (state, _) in found.items() if state == "broken"}
    assert broken == {"Kubernetes API", "Pipelines' metadata store", "object store: put"}
    missing = "patch trainjobs.trainer.kubeflow.org, create workflowtaskresults.argoproj.io"
    assert missing in found["Kubernetes API"][1]
    assert "apply the manifests again" in found["Kubernetes API"][1]
    assert "AWS_SECRET_ACCESS_KEY" in found["object store: put"][1]
    assert not cluster.list("pods")


def test_an_account_of_the_ui_that_may_not_do_what_steps_do(kfp, cluster):
    play(cluster, quick)
    cluster.accounts["default-editor"] = {("create", "trainjobs"), ("list", "events")}
    state, said = findings(doctor(kfp, "--gpus", "0").output)["runs made in the UI"]
    lacks = "default-editor lacks permission to create trainjobs.trainer.kubeflow.org, list events"
    assert state == "warning" and lacks in said
    assert "default-account" in said


def test_an_account_of_the_ui_that_does_not_exist(kfp, cluster):
    """A RoleBinding may name it all the same, so that its permissions are no evidence."""
    play(cluster, quick)
    cluster.delete("serviceaccounts", "default-editor")
    state, said = findings(doctor(kfp, "--gpus", "0").output)["runs made in the UI"]
    assert state == "warning" and "lathe has no service account default-editor" in said
    assert "default-account" in said


@pytest.mark.slow
def test_a_pipelines_without_a_metadata_store(kfp, cluster):
    """As after 2.17."""
    cluster.delete("configmaps", "metadata-grpc-configmap")
    play(cluster)
    result = doctor(kfp, "--gpus", "0")
    assert result.exit_code == 0, result.output
    found = findings(result.output)
    assert found["Pipelines' API"][0] == "ok" and "Pipelines' metadata store" not in found


@pytest.mark.slow
def test_operators_that_are_not_installed(kfp, cluster):
    play(cluster)
    cluster.absent |= {"trainer.kubeflow.org", "jobset.x-k8s.io"}
    result = doctor(kfp, "--gpus", "0")
    assert result.exit_code == 0  # training on one node runs in the step's own pod
    found = findings(result.output)
    assert found["Trainer"][0] == found["JobSet"][0] == "warning"
    assert "the cluster has no trainjobs.trainer.kubeflow.org" in found["Trainer"][1]
    assert "install Kubeflow Trainer" in found["JobSet"][1]


@pytest.mark.slow
def test_a_runtime_that_was_not_applied(kfp, cluster):
    play(cluster)
    cluster.delete(RUNTIMES, "lathe-paddle")
    result = doctor(kfp, "--gpus", "0", "--nodes", "2", "--engine", "paddle")
    assert result.exit_code == 1
    assert '"lathe-paddle" not found' in findings(result.output)["Trainer"][1]


def test_an_image_that_cannot_be_pulled(kfp, cluster):
    play(cluster, lambda pod: pod.wait("ErrImagePull", "not found"))
    result = doctor(kfp, "--gpus", "0", "--engine", "paddle")
    assert result.exit_code == 1
    found = findings(result.output)
    assert any(check.startswith("image ") and found[check][0] == "broken" for check in found)
    assert "make push" in result.output and not cluster.list("pods")


def test_a_pod_that_the_cluster_refuses(kfp, cluster):
    cluster.denied.add(("create", "pods"))
    result = doctor(kfp, "--gpus", "0")
    assert result.exit_code == 1
    assert "cannot create pods in namespace lathe" in findings(result.output)["the doctor's pod"][1]
    assert "Role lathe-doctor" in result.output


def test_an_image_that_is_older_than_the_doctor(kfp, cluster):
    def old(pod: Pod) -> None:
        pod.start()
        pod.say("No module named lathe_launch.cluster.doctor")
        pod.end(1)

    play(cluster, old)
    result = doctor(kfp, "--gpus", "0")
    assert result.exit_code == 1
    assert (
        "No module named lathe_launch.cluster.doctor"
        in findings(result.output)["the doctor's pod"][1]
    )


@pytest.mark.slow
def test_gpus_that_no_node_has_leave_the_other_checks(kfp, cluster, monkeypatch):
    monkeypatch.setattr("pipelines.cluster.doctor.SCHEDULING_SECONDS", 0.2)

    def schedule(pod: Pod) -> None:
        if "nvidia.com/gpu" in pod.container["resources"]["requests"]:
            pod.unschedulable("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
        else:
            run_command(pod)

    kubelet = play(cluster, schedule)
    result = doctor(kfp, "--gpus", "4")
    found = findings(result.output)
    assert found["a node with 4 GPUs"][0] == "warning" and "Insufficient" in result.output
    assert found["object store: delete"][0] == "ok" and "GPUs" not in found
    assert found["room on nodes"][0] == "warning" and "4 GPUs" in found["room on nodes"][1]
    assert len(kubelet.pods) == 2 and not cluster.list("pods")


@pytest.mark.slow  # torch takes seconds to import
def test_gpus_that_torch_does_not_see(kfp, cluster):
    play(cluster)
    result = doctor(kfp, "--gpus", "2")
    assert result.exit_code == 1
    assert "torch finds 0 of 2 GPUs" in findings(result.output)["GPUs"][1]


def test_quota_and_nodes_that_are_too_small(kfp, cluster):
    play(cluster, quick)
    hard = {"requests.cpu": "128", "requests.memory": "64Gi"}
    used = {"requests.memory": "60Gi"}
    cluster.patch("resourcequotas", "lathe", {"status": {"hard": hard, "used": used}})
    limits = {"requests": {"cpu": "63900m"}}
    neighbour = {"nodeName": "node-1", "containers": [{"name": "a", "resources": limits}]}
    body = {"metadata": {"name": "neighbour"}, "spec": neighbour, "status": {"phase": "Running"}}
    cluster.create("pods", body, "elsewhere")
    found = findings(doctor(kfp, "--gpus", "0", "--nodes", "2").output)
    assert found["quota"][0] == "warning" and "64Gi requests.memory, 60Gi used" in found["quota"][1]
    assert found["room on nodes"][0] == "warning"
    assert "the TrainJob: 2 pods with 1 CPUs" in found["room on nodes"][1]
    cluster.patch("resourcequotas", "lathe", {"status": {"hard": {"requests.memory": "1Gi"}}})
    assert findings(doctor(kfp, "--gpus", "0").output)["quota"][0] == "broken"


def test_slices_are_not_several_gpus(kfp, cluster):
    play(cluster, quick)
    assert findings(doctor(kfp, "--gpus", "2").output)["whole GPUs"] == ("ok", "nvidia.com/gpu")
    labels = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb"}
    cluster.patch("nodes", "node-1", {"metadata": {"labels": labels}}, "")
    result = doctor(kfp, "--gpus", "2")
    state, said = findings(result.output)["whole GPUs"]
    assert (result.exit_code, state) == (1, "broken") and "GPUS=1" in said
    assert findings(doctor(kfp, "--gpus", "1").output)["whole GPUs"][0] == "ok"
    cluster.denied.add(("list", "nodes"))
    shared = ("-o", "Launch.gpu_resource=nvidia.com/gpu.shared")
    assert findings(doctor(kfp, "--gpus", "2", *shared).output)["whole GPUs"][0] == "broken"


QUOTAS = {
    "limits.memory": ({"limits.memory": "1Gi"}, "broken", "1Gi limits.memory, 0 used"),
    "limits.cpu": ({"limits.cpu": "64"}, "warning", "has no cpu limit"),
    "pods": ({"pods": "3"}, "warning", "3 pods, 2 used"),
    "count/pods": ({"count/pods": "1"}, "broken", "1 count/pods"),
    "trainjobs": ({"count/trainjobs.trainer.kubeflow.org": "0"}, "broken", "0 count/trainjobs"),
    "jobsets": ({"count/jobsets.jobset.x-k8s.io": "2"}, "warning", "2 count/jobsets"),
    "jobs": ({"count/jobs.batch": "2"}, "warning", "2 count/jobs.batch, 2 used, and the TrainJob"),
    "workflows": ({"count/workflows.argoproj.io": "2"}, "warning", "2 used, and a run is one"),
    "no workflow": ({"count/workflows.argoproj.io": "0"}, "broken", "0 count/workflows"),
    "configmaps": ({"count/configmaps": "2"}, "warning", "2 used, and a run may need one more"),
    "unknown": ({"count/widgets.example.com": "0"}, "warning", "0 count/widgets.example.com"),
    "none of them used": ({"count/widgets.example.com": "3", "count/jobs.batch": "3"}, "ok", ""),
    "disk": ({"requests.ephemeral-storage": "1Ti"}, "warning", "no ephemeral-storage request"),
    "enough": ({"limits.memory": "999Ti", "pods": "99"}, "ok", "lathe"),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_every_key_of_a_quota(name):
    hard, state, said = QUOTAS[name]
    used = {key: "2" for key in hard if key.startswith("count/") and hard[key] != "0"}
    status = V1ResourceQuotaStatus(hard=hard, used=used | {"pods": "2"})
    quota = V1ResourceQuota(metadata=V1ObjectMeta(name="lathe"), status=status)
    memory = {"memory": Decimal(8 * GIB)}
    needs = [Need("export", 1, memory | {"cpu": Decimal(1)}, memory)]
    needs += [Need(TRAINJOB, 2, memory, memory | {"cpu": Decimal(2)})]
    refused = [found for need in needs for found in _refused(quota, need)]
    refused += _counts(quota, needs)
    worst = min(refused, key=lambda one: one.state, default=Finding("quota", "ok", "lathe"))
    assert worst.state == state and said in worst.said


def test_a_steps_pod_has_what_argo_and_a_mesh_add():
    def container(name, cpu, memory, **more):
        amounts = {"cpu": cpu, "memory": memory}
        return {"name": name, "resources": {"requests": amounts, "limits": amounts}} | more

    spec = {
        "containers": [container("main", "9", "9Gi"), container("wait", "10m", "1Gi")],
        "initContainers": [
            container("istio-proxy", "100m", "1Gi", restartPolicy="Always"),
            container("init", "500m", "5Gi"),
        ],
    }
    made = {"name": "p", "creationTimestamp": "2026-01-05T03:00:00Z"}
    read = ApiClient()._ApiClient__deserialize
    pod = read({"metadata": made, "spec": spec}, "V1Pod")
    memory = Decimal(GIB)
    small = Need("export", 1, {"cpu": Decimal(1), "memory": memory}, {"memory": memory})
    large = replace(small, limits={"memory": 8 * memory})
    job = Need(TRAINJOB, 2, small.amounts, small.limits)
    more = {"cpu": Decimal("1.11"), "memory": 5 * memory}
    assert with_sidecars([small, large, job], [pod]) == [
        replace(small, amounts=more, limits={"memory": 5 * memory}),
        replace(large, amounts=more, limits={"memory": 10 * memory}),
        job,
    ]
    spec["containers"].pop()  # not Argo's: the doctor's own
    assert with_sidecars([small], [read({"metadata": made, "spec": spec}, "V1Pod")]) == [small]


def test_the_quota_counts_what_argo_adds(kfp, cluster):
    play(cluster, quick)
    hard, used = {"requests.cpu": "3"}, {"requests.cpu": "1"}
    cluster.patch("resourcequotas", "lathe", {"status": {"hard": hard, "used": used}})
    first = findings(doctor(kfp, "--gpus", "0", "--cpus", "2").output)["quota"]
    assert first[0] == "ok", first
    wait = {"name": "wait", "image": "i", "resources": {"requests": {"cpu": "10m"}}}
    labels = {"workflows.argoproj.io/workflow": "another-run"}
    cluster.create(
        "pods",
        {
            "metadata": {"name": "a-step", "labels": labels},
            "spec": {"containers": [{"name": "main", "image": "i"}, wait]},
            "status": {"phase": "Succeeded"},
        },
    )
    state, said = findings(doctor(kfp, "--gpus", "0", "--cpus", "2").output)["quota"]
    assert state == "warning" and "3 requests.cpu, 1 used" in said and "2.01 CPUs" in said


def test_a_node_has_room_for_its_number_of_pods_and_beside_sidecars():
    node = {"metadata": {"name": "n"}, "status": {"allocatable": {"cpu": "8", "pods": "3"}}}
    one = {"name": "a", "resources": {"requests": {"cpu": "1"}}}
    sidecar = one | {"name": "proxy", "restartPolicy": "Always"}
    spec = {"nodeName": "n", "containers": [one], "initContainers": [sidecar, one]}
    pod = {"metadata": {"name": "p"}, "spec": spec | {"overhead": {"cpu": "500m"}}}
    read = ApiClient()._ApiClient__deserialize
    free = _free(read(node, "V1Node"), [read(pod | {"status": {"phase": "Running"}}, "V1Pod")])
    assert free == {"cpu": Decimal("5.5"), "pods": 2}


def test_a_placement_that_no_node_has_is_doubted(kfp, cluster):
    play(cluster, quick)
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    cluster.patch("nodes", "node-1", {"spec": {"taints": [taint]}}, "")
    launch = {
        "gpu_resource": "nvidia.com/mig-3g.40gb",
        "node_selector": "{lathe/node-pool: gup}",
        "tolerations": "[{key: nvidia.com/gup, operator: Exists}]",
        "steps.export.node_selector": "{disk: ssd}",
        "steps.evaluate.gpu_resource": "amd.com/gpu",
    }
    options = [part for key, value in launch.items() for part in ("-o", f"Launch.{key}={value}")]
    state, said = findings(doctor(kfp, "--gpus", "1", *options).output)["room on nodes"]
    assert state == "warning" and "room for 0 on 0 nodes" in said
    output = re.sub(r"[│\s]+", " ", doctor(kfp, "--gpus", "1", *options).output)
    for words in (
        "no node has nvidia.com/mig-3g.40gb: nvidia.com/gpu",
        "Launch.node_selector: lathe/node-pool=gup: no node has this label: lathe/node-pool is gpu",
        "nvidia.com/gup: no node has this taint: nvidia.com/gpu=present:NoSchedule",
        "Launch.steps.export.node_selector: disk=ssd: no node has this label: no node has disk",
        "Launch.steps.evaluate.gpu_resource: no node has amd.com/gpu: nvidia.com/gpu",
    ):
        assert words in output


def test_missing_permissions_are_a_warning(kfp, cluster):
    play(cluster, quick)
    cluster.denied |= {("list", "resourcequotas"), ("list", "nodes")}
    found = findings(doctor(kfp, "--gpus", "0").output)
    assert found["quota"][0] == found["nodes"][0] == "warning"
    assert "Role lathe-doctor" in found["quota"][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_the_pod_goes_when_the_doctor_is_interrupted(kfp, cluster, monkeypatch, tmp_path, number):
    kubelet = play(cluster, lambda pod: (pod.start(), pod.terminated.wait()))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig.yaml"))
    doctor = [*warm.python(), "-m", "pipelines.cluster.doctor"]
    process = subprocess.Popen(
        [*doctor, "--gpus", "0", "--inside", kfp.url],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )

    def is_running() -> bool:
        """Whether a pod is running; new pods have no status."""
        return any(p.get("status", {}).get("phase") == "Running" for p in cluster.list("pods"))

    eventually(is_running)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number, err.decode()
    assert not cluster.list("pods") and len(kubelet.pods) == 1
    assert b"Traceback" not in err


def test_the_pod_is_like_that_of_a_step():
    _, step = pods("qat", plan("tiny-qat", [], pool=Pool(gpus=1)))["analyze"]
    pod = step_pod(["lathe-train"], ["python"], Pool(gpus=1))
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    (main,) = pod["spec"]["containers"]
    env = {v["name"]: v["valueFrom"] for v in main["env"]}
    for kind, key in (("secret", "secretKey"), ("configMap", "configMapKey")):
        read = [s for s in step[f"{kind}AsEnv"] if s[f"{kind}Name"] != "lathe-tracking"]
        assert read
        for source, wanted in ((s, w) for s in read for w in s["keyToEnv"]):
            reference = {"name": source[f"{kind}Name"], "key": wanted[key]}
            reference |= {"optional": True} if source["optional"] else {}
            assert env[wanted["envVar"]] == {f"{kind}KeyRef": reference}
    for field in step["fieldPathAsEnv"]:
        assert env[field["name"]] == {"fieldRef": {"fieldPath": field["fieldPath"]}}
    assert str(pod["spec"]["securityContext"]["runAsUser"]) == step["securityContext"]["runAsUser"]
    assert pod["spec"]["nodeSelector"] == step["nodeSelector"]["labels"]
    assert pod["spec"]["tolerations"] == tolerations(step)
    labels = step["podMetadata"]["labels"] | {"lathe/stage": "doctor"}
    assert pod["metadata"]["labels"].items() >= labels.items()
    policy = (ROOT / "manifests" / "base" / "network" / "pipeline.yaml").read_text()
    (selector,) = re.findall(r"key: (\S+), operator: Exists", policy)
    assert selector in pod["metadata"]["labels"]
    assert main["resources"]["limits"] == {"nvidia.com/gpu": "1"}


def test_the_rights_asked_about_are_those_of_a_step():
    access = ROOT / "manifests" / "base" / "access"
    files = [access / "pipeline.yaml", access / "nodes.yaml"]
    objects = [thing for file in files for thing in yaml.safe_load_all(file.read_text())]
    given = {
        (group, resource, name, verb)
        for role in objects
        for rule in role.get("rules", [])
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
        for verb in rule["verbs"]
    }
    asked = {(*what, verb) for what, verbs in RIGHTS.items() for verb in verbs}
    assert given - asked == {("", "secrets", "mlpipeline-minio-artifact", "get")}
    assert asked <= given


def test_without_a_cluster(kfp):
    result = doctor(kfp)
    assert result.exit_code == 1 and "error[unauthorized]: no kube context" in result.output


def test_submit_names_the_doctor_where_it_cannot_look(kfp):
    from pipelines.cluster.submit import app as submit

    arguments = ["pretrain", "--corpus", "s3://texts/new/"]
    assert "make doctor" in CliRunner().invoke(submit, arguments).output


def test_a_namespace_that_names_no_root_has_pipelines_own(kfp, cluster, monkeypatch):
    """In single-user mode, the root in the ConfigMap is empty."""
    monkeypatch.delenv("LATHE_PIPELINE_ROOT", raising=False)
    cluster.patch("configmaps", "kfp-launcher", {"data": {"defaultPipelineRoot": ""}})
    assert pipeline_root(open_cluster("lathe")) == "minio://mlpipeline/v2/artifacts"
    assert ResultsReader(connect()).default_root == "minio://mlpipeline/v2/artifacts"

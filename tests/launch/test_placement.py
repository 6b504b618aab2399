"""Settings of the group Launch applied to pods: TrainJobs, manifests, and matching nodes."""

import io
import logging
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes.client import V1Node, V1NodeSpec, V1NodeStatus, V1ObjectMeta, V1Taint

from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import LaunchSettings
from lathe_base.errors import Code, UserError
from lathe_launch.cluster import placement
from lathe_launch.cluster.nodes import doubts, takes
from lathe_launch.cluster.placement import place
from tests.support.crds import CRDS, validator
from tests.support.errors import raises
from tests.support.fake_kubelet import RUNTIMES
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.launchers import launch, play, succeed
from tests.support.rendered import MANIFESTS, Object, named, pods, variant

KUBERNETES = "1.32"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
ZONE = "topology.kubernetes.io/zone"
ON_A = {"matchExpressions": [{"key": ZONE, "operator": "In", "values": ["a"]}]}
PLACED: dict[str, Any] = {
    "node_selector": {"cloud.example.com/pool": "amd"},
    "tolerations": [{"key": "team", "operator": "Equal", "value": "nlp", "effect": "NoExecute"}],
    "affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [ON_A]}}},
    "gpu_resource": "amd.com/gpu",
    "run_as_user": 1000650000,
    "labels": {"cost-center": "42", "lathe/stage": "mine"},
    "annotations": {"sidecar.istio.io/inject": "false"},
    "env": {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": ".svc"},
    "image_pull_secrets": ["registry"],
    "volumes": [
        {"claim": "artifacts", "mount_path": "/pvc"},
        {"config_map": "ca", "mount_path": "/etc/ca"},
        {"secret": "token", "mount_path": "/etc/token", "optional": True},
    ],
    "service_account": "trainer",
}


def patched(job: Object) -> Object:
    """Pod template of a TrainJob."""
    template: Object = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]
    (replicated,) = template["spec"]["replicatedJobs"]
    found: Object = replicated["template"]["spec"]["template"]
    return found


def runtime(server: FakeKubernetes, **pod: Any) -> None:
    made = yaml.safe_load((MANIFESTS / "base" / "runtimes" / "torch.yaml").read_text())
    (job,) = made["spec"]["template"]["spec"]["replicatedJobs"]
    job["template"]["spec"]["template"]["spec"] |= pod
    server.create(RUNTIMES, made)


@pytest.mark.usefixtures("nothing_left")
def test_a_trainjob_has_all_of_it(in_pod: FakeKubernetes) -> None:
    own = {"key": "dedicated", "operator": "Exists"}
    runtime(in_pod, tolerations=[own])
    trainer = play(in_pod, succeed)
    launch(nodes=2, gpus_per_node=4, node_pool="ignored", **PLACED)
    (job,) = trainer.created
    amounts = {"cpu": "4", "memory": "32Gi", "amd.com/gpu": "4"}
    assert job["spec"]["trainer"]["resourcesPerNode"]["limits"] == amounts
    env = {one["name"]: one.get("value") for one in job["spec"]["trainer"]["env"]}
    assert env["HTTPS_PROXY"] == "http://proxy:3128"
    template = patched(job)
    spec = template["spec"]
    assert spec["nodeSelector"] == PLACED["node_selector"]
    assert [one["key"] for one in spec["tolerations"]] == [
        *("dedicated", "lathe/node-pool", "amd.com/gpu", "team"),
    ]
    assert spec["affinity"] == PLACED["affinity"]
    context = spec["securityContext"]
    assert {context[key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {1000650000}
    assert context["runAsNonRoot"] is True
    assert spec["serviceAccountName"] == "trainer"
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    names = [volume["name"] for volume in spec["volumes"]]
    assert names[:3] == ["shared-memory", "scratch", "signing-key"] and len(names) == 6
    assert spec["volumes"][3]["persistentVolumeClaim"] == {"claimName": "artifacts"}
    (container,) = spec["containers"]
    assert "env" not in container  # Trainer rejects env here
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    assert mounts["/pvc"] == names[3] and "/dev/shm" in mounts
    assert template["metadata"]["labels"]["cost-center"] == "42"
    assert template["metadata"]["labels"]["lathe/stage"] == "pretrain"
    assert template["metadata"]["annotations"] == PLACED["annotations"]
    if (schema := validator("trainer.kubeflow.org", "trainjobs", "v1alpha1")) is None:
        pytest.skip(f"no CRDs in {CRDS}")
    assert [error.message for error in schema.iter_errors(job)] == []


@pytest.mark.usefixtures("nothing_left")
def test_a_user_that_the_cluster_chooses(in_pod: FakeKubernetes) -> None:
    trainer = play(in_pod, succeed)
    launch(run_as_user=None)
    (job,) = trainer.created
    context = patched(job)["spec"]["securityContext"]
    assert context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


@pytest.mark.usefixtures("nothing_left")
def test_a_priority_class_is_the_runtimes(
    in_pod: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    runtime(in_pod, priorityClassName="batch")
    play(in_pod, succeed)
    with caplog.at_level(logging.WARNING):
        launch(priority_class="batch")
        assert "priority_class" not in caplog.text
        launch(priority_class="urgent")
    assert "Launch.priority_class=urgent is ignored by TrainJobs" in caplog.text


@pytest.mark.usefixtures("nothing_left")
def test_a_reserved_node_label_is_reported(
    in_pod: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    runtime(in_pod, nodeSelector={"lathe/node-pool": "gpu", "tier": "prep"})
    play(in_pod, succeed)
    with caplog.at_level(logging.WARNING):
        launch(node_pool="gpu")
        assert "also requires" not in caplog.text
        launch(node_selector={"tier": "train"})
    assert "runtime lathe-torch also requires the node label lathe/node-pool: " in caplog.text


@pytest.mark.usefixtures("nothing_left")
def test_a_runtime_that_may_not_be_read(
    in_pod: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    in_pod.denied.add(("get", "trainingruntimes"))
    trainer = play(in_pod, succeed)
    launch()
    assert len(trainer.created) == 1
    assert "tolerations of the training runtime are replaced" in caplog.text


def test_steps_have_their_own() -> None:
    overrides = [
        "Launch.steps.evaluate.cpus=2",
        "Launch.steps.evaluate.memory=6Gi",
        "Launch.steps.evaluate.gpu_resource=nvidia.com/mig-3g.40gb",
        "Launch.steps.pretrain.tolerations=[]",
        "Launch.tolerations=[{operator: Exists}]",
        f"Launch.node_selector={{{ZONE}: a}}",
    ]
    found = load_recipe("tiny", overrides).Launch
    own = found.of_step("evaluate")
    assert (own.cpus_per_node, own.memory_per_node) == (2, "6Gi")
    assert own.gpu_resource == "nvidia.com/mig-3g.40gb" and own.gpu_taint == "nvidia.com/gpu"
    assert own.shared_memory_limit == str(6 * 2**30 // 4)
    assert own.node_selector == {ZONE: "a"} and len(own.tolerations) == 1
    assert found.of_step("pretrain").tolerations == []
    assert found.of_step("gate").cpus_per_node == 4
    assert found.shared_memory_limit == "8Gi"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("steps.evaluate.cpu=2", "unknown key Launch.steps.evaluate.cpu"),
        ("tolerations=[{ky: x}]", "unknown key Launch.tolerations.0.ky"),
        ("tolerations=[{key: x, operator: Exists, value: y}]", "Exists has no value"),
        ("tolerations=[{value: y}]", "needs the operator Exists"),
        ("tolerations=[{key: x, tolerationSeconds: 5}]", "needs the effect NoExecute"),
        ("env={AWS_REGION: x}", "comes from the ConfigMap lathe-store"),
        ("env={https_proxy: 'http://proxy:3128'}", "a proxy also needs NO_PROXY"),
        ("env={a-b: x}", "'a-b' is not the name of a variable"),
        ("volumes=[{claim: a, secret: b, mount_path: /x}]", "one of claim, config_map and secret"),
        ("volumes=[{claim: a, mount_path: x}]", "must be an absolute path"),
        ("volumes=[{claim: a, mount_path: /tmp/x}]", "pods already mount"),
        ("volumes=[{secret: lathe-signing, mount_path: /x}]", "lathe-signing is always mounted"),
        (
            "volumes=[{claim: a, mount_path: /x}, {claim: b, mount_path: /x/}]",
            "the same mount path",
        ),
        ("shared_memory=32Gi", "counts as memory, but memory_per_node is only 32Gi"),
        ("affinity={podAffinity: {}}", "only nodeAffinity"),
        (
            "affinity={nodeAffinity: {required: {}}}",
            "nodeAffinity only has the keys requiredDuring",
        ),
        ("volumes=[{claim: a, mount_path: /x}, {secret: a, mount_path: /y}]", "the same name"),
        ("gpu_resource=gpu", "'gpu' is not a resource"),
        ("labels={'a b': x}", "'a b' is not the key of a label"),
        ("run_as_user=0", "greater than 0"),
    ],
)
def test_a_mistake_is_reported(override: str, said: str) -> None:
    code = Code.UNKNOWN_KEY if said.startswith("unknown key") else Code.INVALID_VALUE
    with raises(code, said):
        load_recipe("tiny", [f"Launch.{override}"])


def rewritten(
    objects: list[Object], monkeypatch: pytest.MonkeyPatch, **launch: Any
) -> list[Object]:
    """Run the program on manifests; returns its output."""
    output = io.StringIO()
    monkeypatch.setattr("sys.stdin", io.StringIO(yaml.safe_dump_all(objects)))
    monkeypatch.setattr("sys.stdout", output)
    placement.main("tiny", [f"Launch.{key}={to_yaml(value)}" for key, value in launch.items()])
    return list(yaml.safe_load_all(output.getvalue()))


def to_yaml(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n")


@pytest.mark.parametrize("overlay", ["production", "kind+kserve+signed-releases"])
def test_manifests(
    overlay: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = variant(overlay, tmp_path_factory)
    mine = PLACED | {"priority_class": "low", "steps": {"janitor": {"node_selector": {"a": "b"}}}}
    after = rewritten(before, monkeypatch, **mine)
    assert [(one["kind"], one["metadata"]["name"]) for one in after] == [
        (one["kind"], one["metadata"]["name"]) for one in before
    ]
    for old, new in zip(pods(before), pods(after), strict=True):
        spec = new.spec
        own = {"a": "b"} if "janitor" in new.owner else PLACED["node_selector"]
        assert spec["nodeSelector"] == own  # replaces lathe/node-pool
        assert spec["tolerations"][: len(old.spec.get("tolerations", []))] == old.spec.get(
            "tolerations", []
        )
        assert spec["tolerations"][-1] == PLACED["tolerations"][0]
        assert spec["priorityClassName"] == "low"
        assert spec["securityContext"]["runAsUser"] == 1000650000
        assert spec.get("serviceAccountName") == old.spec.get("serviceAccountName")
        kept = {volume["name"] for volume in old.spec["volumes"]}
        assert kept < {volume["name"] for volume in spec["volumes"]}
        for container in new.containers:
            assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in container["env"]
            assert "/etc/ca" in {mount["mountPath"] for mount in container["volumeMounts"]}
        assert new.labels["cost-center"] == "42"
        assert old.labels.items() <= new.labels.items()
    for thing in after:
        if thing["kind"] in ("Deployment", "CronJob"):
            kubernetes_validate.validate(thing, KUBERNETES, strict=True)
    if overlay == "production":
        selector = named(after, "Deployment", "lathe-serve")["spec"]["selector"]["matchLabels"]
        assert "cost-center" not in selector


def test_manifests_without_settings_stay_as_they_are(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = variant("production", tmp_path_factory)
    assert rewritten(before, monkeypatch) == before


def test_manifests_that_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a: ["))
    with pytest.raises(SystemExit) as caught:
        placement.main("tiny", None)
    assert caught.value.code == UserError.status


def test_placing_twice_changes_nothing_more() -> None:
    settings = LaunchSettings(**PLACED)
    template: Object = {"spec": {"containers": [{"name": "a"}]}}
    place(template, settings, has_gpus=True)
    once = yaml.safe_dump(template)
    place(template, settings, has_gpus=True)
    assert yaml.safe_dump(template) == once


def node(name: str, labels: Object, taints: list[V1Taint] | None = None, **amounts: str) -> V1Node:
    resources = {name.replace("__", "/").replace("_", "."): n for name, n in amounts.items()}
    return V1Node(
        metadata=V1ObjectMeta(name=name, labels=labels),
        spec=V1NodeSpec(taints=taints),
        status=V1NodeStatus(allocatable={"cpu": "8"} | resources),
    )


GPU_TAINT = V1Taint(key="nvidia.com/gpu", value="present", effect="NoSchedule")
TEAM = V1Taint(key="team", value="nlp", effect="NoExecute")
NODES = [
    node("cpu", {ZONE: "a"}),
    node("gpu", {ZONE: "b", "lathe/node-pool": "gpu"}, [GPU_TAINT], nvidia_com__gpu="2"),
    node("nlp", {ZONE: "a", "cores": "64"}, [TEAM, GPU_TAINT], amd_com__gpu="8"),
]


def fitting(settings: LaunchSettings, pool: str | None = None, has_gpus: bool = False) -> list[str]:
    return [one.metadata.name for one in NODES if takes(one, settings, pool, has_gpus)]


def test_nodes_that_take_a_pod() -> None:
    assert fitting(LaunchSettings()) == ["cpu"]
    assert fitting(LaunchSettings(), "gpu", has_gpus=True) == ["gpu"]
    everywhere = LaunchSettings(tolerations=[{"operator": "Exists"}])
    assert fitting(everywhere) == ["cpu", "gpu", "nlp"]
    of_team = [{"key": "team", "value": "nlp"}, {"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert fitting(LaunchSettings(tolerations=of_team)) == ["cpu", "gpu", "nlp"]
    assert fitting(LaunchSettings(tolerations=of_team, node_selector={ZONE: "a"}), "gpu") == [
        *("cpu", "nlp"),
    ]
    terms: list[tuple[Object, list[str]]] = [
        (ON_A, ["cpu", "nlp"]),
        ({"matchExpressions": [{"key": "cores", "operator": "Gt", "values": ["32"]}]}, ["nlp"]),
        ({"matchExpressions": [{"key": "cores", "operator": "Lt", "values": ["64"]}]}, []),
        ({"matchExpressions": [{"key": "cores", "operator": "DoesNotExist"}]}, ["cpu", "gpu"]),
        ({"matchExpressions": [{"key": ZONE, "operator": "NotIn", "values": ["a"]}]}, ["gpu"]),
        ({"matchExpressions": [{"key": "cores", "operator": "Exists"}]}, ["nlp"]),
        ({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["gpu"]}]}, ["gpu"]),
        ({}, []),
    ]
    for term, names in terms:
        affinity = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [term]}}}
        settings = LaunchSettings(tolerations=[{"operator": "Exists"}], affinity=affinity)
        assert fitting(settings) == names, term


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"node_selector": {ZONE: "c"}}, f"{ZONE}=c: no node has this label: {ZONE} is a, b"),
        ({"node_selector": {"zone": "c"}}, "zone=c: no node has this label: no node has zone"),
        (
            {"tolerations": [{"key": "teem", "operator": "Exists"}]},
            "teem: no node has this taint: nvidia.com/gpu=present:NoSchedule, team=nlp:NoExecute",
        ),
        (
            {"gpu_resource": "nvidia.com/mig-3g.40gb"},
            "no node has nvidia.com/mig-3g.40gb: amd.com/gpu, nvidia.com/gpu",
        ),
        (
            {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{}]}}}},
            "none of cpu, gpu, nlp matches it",
        ),
        (
            {"node_selector": {"cores": "64"}},
            "not tolerated on the chosen nodes, nlp: team=nlp:NoExecute",
        ),
    ],
)
def test_labels_without_a_node_cause_a_warning(settings: Object, said: str) -> None:
    (found,) = doubts(NODES, LaunchSettings(**settings), has_gpus=True)
    assert found.state == "warning" and said in found.said


def test_nothing_to_doubt() -> None:
    settings = LaunchSettings(
        node_selector={ZONE: "a"}, tolerations=[{"key": "team", "operator": "Exists"}]
    )
    assert doubts(NODES, settings, has_gpus=True) == []


def documented(heading: str) -> list[Any]:
    """The YAML examples of a section of the how-to."""
    page = (Path(__file__).parents[2] / "docs/how-to/cluster-nodes.md").read_text(encoding="utf-8")
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [yaml.safe_load(part.partition("\n```")[0]) for part in section.split("```yaml\n")[1:]]


@pytest.mark.usefixtures("nothing_left")
def test_annotations_of_a_topology_reach_the_pods_of_a_trainjob(in_pod: FakeKubernetes) -> None:
    recipe, _ = documented("Nodes that are close to each other")
    settings = LaunchSettings.model_validate(recipe["Launch"]).of_step("pretrain")
    trainer = play(in_pod, succeed)
    launch(queue=settings.queue, annotations=settings.annotations)
    (job,) = trainer.created
    assert patched(job)["metadata"]["annotations"] == {
        "kueue.x-k8s.io/podset-required-topology": "nvidia.com/gpu.clique"
    }
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "lathe"


@pytest.mark.usefixtures("nothing_left")
def test_a_runtime_may_keep_pods_in_one_domain(in_pod: FakeKubernetes) -> None:
    """JobSet labels all pods with its name; the TrainJob's patch, which Trainer merges by key, does
    not touch what the runtime says of pods."""
    _, spec = documented("Nodes that are close to each other")
    runtime(in_pod, **spec)
    trainer = play(in_pod, succeed)
    launch(nodes=2, affinity=PLACED["affinity"])
    (job,) = trainer.created
    assert set(patched(job)["spec"]["affinity"]) == {"nodeAffinity"}
    (term,) = spec["affinity"]["podAffinity"][REQUIRED]
    labels = patched(job)["metadata"]["labels"]
    assert term["labelSelector"]["matchLabels"].items() <= labels.items()
    (made,) = in_pod.list(RUNTIMES)
    (replicated,) = made["spec"]["template"]["spec"]["replicatedJobs"]
    template = replicated["template"]["spec"]["template"]
    containers = [{**template["spec"]["containers"][0], "image": "lathe-train"}]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "node"}}
    kubernetes_validate.validate(
        pod | {"spec": {**template["spec"], "containers": containers}}, KUBERNETES, strict=True
    )

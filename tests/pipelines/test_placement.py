"""The settings in Launch applied to steps' pods: compiled pipeline, run and the doctor's pod."""

from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from components.machines import Pool
from components.plan import plan
from lathe_base.config.recipe import load_recipe, recipe_text
from pipelines.cluster.capacity import resource_needs
from pipelines.cluster.doctor import launch_settings, step_pod
from pipelines.cluster.submit import app as submit
from pipelines.cluster.submit import choose_variant
from pipelines.compiler.compile import build
from tests.support.compiled import pods, tolerations

KUBERNETES = "1.32"
LAUNCH = """
  gpus_per_node: 1
  node_selector: {cloud.example.com/pool: mig}
  tolerations:
  - {key: team, operator: Equal, value: nlp, effect: NoExecute, tolerationSeconds: 60}
  affinity:
    nodeAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 10
        preference:
          matchExpressions: [{key: topology.kubernetes.io/zone, operator: In, values: [a]}]
  gpu_resource: nvidia.com/mig-3g.40gb
  run_as_user: null
  labels: {cost-center: "42"}
  annotations: {example.com/owner: nlp}
  env: {HTTPS_PROXY: "http://proxy:3128", NO_PROXY: .svc}
  image_pull_secrets: [registry]
  service_account: trainer
  priority_class: low
  volumes:
  - {claim: artifacts, mount_path: /pvc}
  - {config_map: ca, mount_path: /etc/ca, optional: true}
  - {secret: token, mount_path: /etc/token}
  shared_memory: 1Gi
  steps:
    evaluate: {cpus: 2, memory: 6Gi, gpu_resource: nvidia.com/gpu, labels: {cost-center: "7"}}
    export: {cpus: 3, node_selector: {disk: ssd}}
    gate: {tolerations: []}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "placed.yaml"
    path.write_text(f"_base_: tiny\nLaunch:{LAUNCH}")
    return path


@pytest.fixture(scope="module")
def variant(recipe):
    return choose_variant("qat", {"recipe": str(recipe), "overrides": []})


@pytest.fixture(scope="module")
def planned(recipe):
    """What the first step of the run finds."""
    return plan(recipe_text(recipe), [], pool=Pool())


@pytest.fixture(scope="module")
def compiled(variant, planned):
    return pods("qat", planned, variant)


def test_every_step_has_the_placement(compiled):
    assert len(compiled) >= 10
    for name, (container, settings) in compiled.items():
        own = {"disk": "ssd"} if name.startswith("export") else {"cloud.example.com/pool": "mig"}
        assert settings["nodeSelector"]["labels"] == own
        keys = [one["key"] for one in tolerations(settings)]
        gpus = "accelerator" in container["resources"]
        reserved = ["lathe/node-pool", "nvidia.com/gpu"] if gpus else []
        assert sorted(keys) == reserved + ["team"] * (name != "gate")
        if name != "gate":
            (own,) = (one for one in tolerations(settings) if one["key"] == "team")
            assert int(own["tolerationSeconds"]) == 60
        (affinity,) = settings["nodeAffinity"]
        weighed = affinity["nodeAffinityJson"]["runtimeValue"]["constant"]
        assert "preferredDuringSchedulingIgnoredDuringExecution" in weighed
        assert settings["securityContext"] == {"runAsNonRoot": True}
        metadata = settings["podMetadata"]
        assert metadata["labels"]["cost-center"] == ("7" if name.startswith("eval") else "42")
        assert name.startswith(metadata["labels"]["lathe/stage"])
        assert metadata["annotations"] == {"example.com/owner": "nlp"}
        assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in container["env"]
        (secret,) = settings["imagePullSecret"]
        assert secret["secretName"] == "registry"
        (claim,) = settings["pvcMount"]
        assert (claim["constant"], claim["mountPath"]) == ("artifacts", "/pvc")
        config_maps = {one["configMapName"]: one for one in settings["configMapAsVolume"]}
        assert config_maps["ca"]["mountPath"] == "/etc/ca" and config_maps["ca"]["optional"]
        secrets = {one["secretName"]: one["mountPath"] for one in settings["secretAsVolume"]}
        assert secrets["token"] == "/etc/token" and "lathe-signing" in secrets


def test_steps_have_their_own_amounts(compiled):
    resources = {name: container["resources"] for name, (container, _) in compiled.items()}
    evaluate = resources["evaluate-int8"]
    assert evaluate["resourceCpuRequest"] == "2"
    assert evaluate["resourceMemoryRequest"] == evaluate["resourceMemoryLimit"] == "6Gi"
    assert evaluate["accelerator"]["resourceType"] == "nvidia.com/gpu"
    assert resources["quantize"]["accelerator"]["resourceType"] == "nvidia.com/mig-3g.40gb"
    assert resources["quantize"]["resourceCpuRequest"] != "2"
    assert resources["export-int8"]["resourceCpuRequest"] == "3"
    shared = {
        name: settings["emptyDirMounts"][0]["sizeLimit"] for name, (_, settings) in compiled.items()
    }
    assert shared["quantize"] == shared["evaluate-int8"] == "1Gi" and shared["gate"] == "2Gi"


def test_the_other_recipes_of_a_run_get_it_too(planned):
    for step in ("pretrain", "prune", "quantize"):
        found = load_recipe(planned[step]).Launch
        assert found.node_selector == {"cloud.example.com/pool": "mig"}
        assert found.run_as_user is None and found.service_account == "trainer"
        assert found.of_step("evaluate").cpus_per_node == 2
        assert found.tolerations[0].tolerationSeconds == 60


def test_the_run_has_the_service_account(kfp, recipe):
    result = CliRunner().invoke(submit, ["pretrain", "--recipe", str(recipe), "--gpus", "0"])
    assert result.exit_code == 0, result.output
    (run,) = kfp.runs.values()
    assert run["service_account"] == "trainer"


def test_the_doctors_pod_has_it(variant):
    pod: Any = step_pod(["lathe-train"], ["python"], Pool(gpus=1), variant.placement)
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    spec = pod["spec"]
    assert spec["nodeSelector"] == {"cloud.example.com/pool": "mig"}
    assert [one["key"] for one in spec["tolerations"]] == [
        *("lathe/node-pool", "nvidia.com/gpu", "team"),
    ]
    assert "runAsUser" not in spec["securityContext"] and spec["securityContext"]["runAsNonRoot"]
    assert (spec["serviceAccountName"], spec["priorityClassName"]) == ("trainer", "low")
    (main,) = spec["containers"]
    assert main["resources"]["limits"] == {"nvidia.com/mig-3g.40gb": "1"}
    assert {one["mountPath"] for one in main["volumeMounts"]} > {"/pvc", "/etc/ca", "/etc/token"}
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in main["env"]
    assert pod["metadata"]["labels"]["cost-center"] == "42"


def test_needs_are_counted_by_the_resource(variant, recipe):
    devices = "Launch.extra_resources={rdma/hca: 2, hugepages-2Mi: 1Gi}"
    arguments = {"recipe": str(recipe), "overrides": [devices], "nodes": 2}
    launch, requests = launch_settings("qat", arguments)
    needs = {need.name: need for need in resource_needs(build("qat", variant), launch, requests)}
    assert (
        needs["the TrainJob"].amounts["nvidia.com/mig-3g.40gb"] == needs["the TrainJob"].gpus == 1
    )
    assert needs["the TrainJob"].amounts["rdma/hca"] == 2
    assert needs["the TrainJob"].amounts["hugepages-2Mi"] == 2**30
    assert "2 rdma/hca" in str(needs["the TrainJob"])
    assert not any("rdma/hca" in need.amounts for name, need in needs.items() if "Job" not in name)


VOLUME = "Launch.volumes=[{claim: artifacts, mount_path: /pvc}]"


def test_a_run_without_an_object_store(kfp):
    arguments = ["pretrain", "--gpus", "0", "-o", VOLUME, "--corpus", "file:///pvc/corpora/new/"]
    result = CliRunner().invoke(submit, [*arguments, "--root", "file:///pvc/runs"])
    assert result.exit_code == 0, result.output
    (run,) = kfp.runs.values()
    config = run["runtime_config"]
    assert not config.get("pipeline_root")  # Pipelines uses its own default
    assert config["parameters"]["corpus"] == "file:///pvc/corpora/new/"
    sent = load_recipe("tiny", config["parameters"]["overrides"]).Launch
    assert sent.store == "file:///pvc/runs" and sent.volumes[0].claim == "artifacts"
    (version,) = kfp.versions.values()
    spec, platform = yaml.safe_load_all(kfp.uploads[version["pipeline_version_id"]])
    settings = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    for label, executor in spec["deploymentSpec"]["executors"].items():
        if "container" in executor:
            variable = {"name": "LATHE_STORE", "value": "file:///pvc/runs"}
            assert variable in executor["container"]["env"]
            assert settings[label]["pvcMount"][0]["mountPath"] == "/pvc"
            assert all(source["optional"] for source in settings[label]["secretAsEnv"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "store is file:///pvc/runs, but no claim in volumes is mounted there"),
        (["-o", VOLUME.replace("/pvc", "/pv")], "no claim in volumes is mounted there"),
        (
            ["-o", VOLUME, "-o", "Launch.steps.evaluate.volumes=[]"],
            "no claim in steps.evaluate.volumes is mounted there",
        ),
    ],
)
def test_a_root_that_no_pod_mounts(kfp, options, said):
    arguments = ["pretrain", "--gpus", "0", *options, "--corpus", "s3://texts/new/"]
    result = CliRunner().invoke(submit, [*arguments, "--root", "file:///pvc/runs"])
    assert result.exit_code != 0 and said in result.output
    assert not kfp.runs


def test_a_folder_that_no_pod_mounts_is_a_path_of_this_machine(kfp):
    arguments = ["pretrain", "--gpus", "0", "-o", VOLUME, "--corpus", "file:///pvc2/new/"]
    result = CliRunner().invoke(submit, arguments)
    assert "error[bad-path]: corpus file:///pvc2/new/: " in result.output


def test_a_model_on_a_volume_cannot_be_imported(kfp):
    arguments = ["qat", "--gpus", "0", "-o", VOLUME, "--model", "file:///pvc/gpt"]
    result = CliRunner().invoke(submit, [*arguments, "--corpus", "file:///pvc/text.txt"])
    assert "error[unsupported]: model file:///pvc/gpt: " in result.output


def test_a_trainjob_on_a_volume(variant):
    overrides = [VOLUME, "Launch.store=file:///pvc", "Launch.nodes=2"]
    found = load_recipe("tiny", overrides).Launch.of_step("pretrain")
    assert found.store == "file:///pvc" and found.volumes[0].mount_path == "/pvc"

"""The settings in Launch applied to steps' pods: compiled pipeline, run and the doctor's pod."""

from typing import Any

import kubernetes_validate
import pytest
import yaml
from google.protobuf import json_format
from kfp import compiler
from typer.testing import CliRunner

from components.machines import Pool
from lathe_base.config.recipe import load_recipe
from pipelines.cluster.capacity import resource_needs
from pipelines.cluster.doctor_pod import step_pod
from pipelines.cluster.submit import app as submit
from pipelines.commands.variants import choose_variant
from pipelines.compiler.compile import build

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
def compiled(variant, tmp_path_factory):
    path = tmp_path_factory.mktemp("build") / "qat.yaml"
    compiler.Compiler().compile(build("qat", variant), str(path))
    spec, platform = yaml.safe_load_all(path.read_text())
    executors = spec["deploymentSpec"]["executors"]
    settings = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    return {
        label.removeprefix("exec-"): (executor["container"], settings[label])
        for label, executor in executors.items()
        if "container" in executor
    }


def test_every_step_has_the_placement(compiled):
    assert len(compiled) >= 10
    for name, (container, settings) in compiled.items():
        own = {"disk": "ssd"} if name.startswith("export") else {"cloud.example.com/pool": "mig"}
        assert settings["nodeSelector"]["labels"] == own
        keys = [one["key"] for one in settings.get("tolerations", [])]
        gpus = "accelerator" in container["resources"]
        reserved = ["lathe/node-pool", "nvidia.com/gpu"] if gpus else []
        assert keys == reserved + ["team"] * (name != "gate")
        if name != "gate":
            assert settings["tolerations"][-1]["tolerationSeconds"] == "60"
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


def test_shared_memory_is_no_more_than_a_quarter_of_the_memory_and_counts_to_the_limit():
    arguments = {"overrides": ["Launch.gpus_per_node=0"]}
    pipeline = build("qat", choose_variant("qat", arguments))
    small = build("qat", choose_variant("qat", {"overrides": ["Launch.memory_per_node=4Gi"]}))

    def amounts(pipeline):
        spec = pipeline.component_spec.implementation.graph.deployment_spec
        return spec["executors"]["exec-quantize"]["container"]["resources"]

    def shared(pipeline):
        platform = json_format.MessageToDict(pipeline.platform_spec.platforms["kubernetes"])
        settings = platform["deploymentSpec"]["executors"]
        return settings["exec-quantize"]["emptyDirMounts"][0]["sizeLimit"]

    asked = amounts(pipeline)
    request, limit = (
        int(asked[f"resourceMemory{kind}"].removesuffix("Mi")) for kind in ("Request", "Limit")
    )
    assert shared(pipeline) == "2Gi" and limit >= request + 2048
    assert amounts(small)["resourceMemoryLimit"] == "4Gi" and shared(small) == str(2**30)


def test_the_other_recipes_of_a_run_get_it_too(variant):
    found = load_recipe("tiny-prune", variant.overrides).Launch
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
    launch = load_recipe(str(recipe), ["Launch.nodes=2"]).Launch
    needs = {need.name: need for need in resource_needs(build("qat", variant), launch)}
    assert (
        needs["the TrainJob"].amounts["nvidia.com/mig-3g.40gb"] == needs["the TrainJob"].gpus == 1
    )


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
    assert "a local path, which the cluster cannot access" in result.output


def test_a_model_on_a_volume_cannot_be_imported(kfp):
    arguments = ["qat", "--gpus", "0", "-o", VOLUME, "--model", "file:///pvc/gpt"]
    result = CliRunner().invoke(submit, [*arguments, "--corpus", "file:///pvc/text.txt"])
    assert "Pipelines cannot import a model from a volume" in result.output


def test_a_trainjob_on_a_volume(variant):
    overrides = [VOLUME, "Launch.store=file:///pvc", "Launch.nodes=2"]
    found = load_recipe("tiny", overrides).Launch.of_step("pretrain")
    assert found.store == "file:///pvc" and found.volumes[0].mount_path == "/pvc"

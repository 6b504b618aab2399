"""Resource requests of the compiled tasks in several pools, read from the YAML."""

import functools

import pytest
import yaml
from google.protobuf import json_format
from kfp import compiler
from kfp.kubernetes import kubernetes_executor_config_pb2
from kfp.pipeline_spec import pipeline_spec_pb2

from components.images import PADDLE, TRAIN
from pipelines.compiler.compile import FUNCTIONS, build
from pipelines.steps.resources import Pool, Variant
from components.stages import NAMES, component

ONE = Pool()
MANY = Pool(nodes=2, gpus=8, node_pool="a100", queue="research")
NODE = Pool(gpus=8, node_pool="a100", queue="research")
NONE = Pool(gpus=0)
BY_PADDLE = Pool(nodes=2, gpus=8, engine="paddle")
POOLS = {"default": ONE, "two-nodes": MANY, "one-node": NODE, "no-gpu": NONE, "paddle": BY_PADDLE}
DECLARED = {component(name).step.name or name: component(name).step for name in NAMES}
"""Declaration of each step in its component."""


# `full` has tasks of nearly all components.
PIPELINES = [
    name if name == "full" else pytest.param(name, marks=pytest.mark.slow) for name in FUNCTIONS
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Function that compiles a pipeline for a pool; returns (spec, platform) of the YAML."""
    folder = tmp_path_factory.mktemp("build")

    @functools.cache
    def load(name: str, pool: str):
        path = folder / f"{name}-{pool}.yaml"
        compiler.Compiler().compile(build(name, Variant(POOLS[pool])), str(path))
        return list(yaml.load_all(path.read_text(), yaml.CSafeLoader))

    return load


def executors(spec, platform):
    """Yield (stage, label, container, Kubernetes settings) of every task with a container."""
    settings = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    for label, executor in spec["deploymentSpec"]["executors"].items():
        if "container" in executor:
            name = label.removeprefix("exec-")
            yield name.split("-")[0], name, executor["container"], settings[label]


def stage_gpus(stage: str, pool: Pool) -> int:
    match DECLARED[stage].machine:
        case "training node":
            return pool.gpus
        case "training":
            return pool.gpus if pool.nodes == 1 else 0
        case "gpu":
            return min(1, pool.gpus)
    return 0


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", PIPELINES)
def test_gpus_and_where_they_are(compiled, name, pool):
    for stage, _, container, settings in executors(*compiled(name, pool)):
        gpus, machines = stage_gpus(stage, POOLS[pool]), POOLS[pool]
        resources, labels = container["resources"], settings["podMetadata"]["labels"]
        if not gpus:
            machine = DECLARED[stage].machine
            waits = machine == "waiting" or (machine == "training" and machines.nodes > 1)
            asked = ("100m", "512Mi") if waits else ("4", "8Gi")
            assert (resources["resourceCpuRequest"], resources["resourceMemoryRequest"]) == asked
            assert "accelerator" not in resources
            assert "nodeSelector" not in settings and "tolerations" not in settings
            assert "kueue.x-k8s.io/queue-name" not in labels
            continue
        accelerator = resources["accelerator"]
        assert accelerator["resourceType"] == accelerator["type"] == "nvidia.com/gpu"
        assert accelerator["resourceCount"] == accelerator["count"] == str(gpus)
        assert resources["resourceCpuRequest"] == str(4 * gpus)
        assert resources["resourceMemoryRequest"] == f"{32 * gpus}Gi"
        assert settings["nodeSelector"] == {"labels": {"lathe/node-pool": machines.node_pool}}
        assert settings["tolerations"] == [
            {"key": key, "operator": "Exists", "effect": "NoSchedule"}
            for key in ("lathe/node-pool", "nvidia.com/gpu")
        ]
        assert labels.get("kueue.x-k8s.io/queue-name") == machines.queue


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", PIPELINES)
def test_settings_of_every_task(compiled, name, pool):
    spec, platform = compiled(name, pool)
    stages, deadlines = set(), {}
    for stage, label, container, settings in executors(spec, platform):
        stages.add(stage)
        deadlines[f"exec-{label}"] = int(settings["activeDeadlineSeconds"])
        is_paddles = POOLS[pool].engine == "paddle" and DECLARED[stage].by_engine
        assert container["image"] == (PADDLE if is_paddles else TRAIN)
        assert settings["activeDeadlineSeconds"] == str(int(DECLARED[stage].hours * 3600))
        gib = 8 * stage_gpus(stage, POOLS[pool]) or 2
        assert settings["emptyDirMounts"] == [
            {"volumeName": "shm", "mountPath": "/dev/shm", "medium": "Memory",
             "sizeLimit": f"{gib}Gi"}
        ]  # fmt: skip
        (secret,), (store, tracking) = settings["secretAsEnv"], settings["configMapAsEnv"]
        assert secret["secretName"] == "lathe-s3" and secret["optional"]
        assert store["configMapName"] == "lathe-store"
        assert {k["secretKey"]: k["envVar"] for k in secret["keyToEnv"]} == {
            "accesskey": "AWS_ACCESS_KEY_ID",
            "secretkey": "AWS_SECRET_ACCESS_KEY",
            "sessiontoken": "AWS_SESSION_TOKEN",
        }
        assert {k["configMapKey"]: k["envVar"] for k in store["keyToEnv"]} == {
            "endpoint": "AWS_ENDPOINT_URL",
            "region": "AWS_REGION",
        }
        (signing,) = settings["secretAsVolume"]
        assert signing["secretName"] == "lathe-signing" and signing["optional"]
        assert signing["mountPath"] == "/var/run/lathe/signing"
        assert {"name": "LATHE_IMAGE", "value": container["image"]} in container["env"]
        trusted = settings.get("configMapAsVolume", [])
        assert [part["configMapName"] for part in trusted] == (
            ["lathe-verification-keys"] if stage in ("release", "report") else []
        )
        assert all(part["optional"] for part in trusted)
        assert tracking["configMapName"] == "lathe-tracking" and tracking["optional"]
        assert {k["configMapKey"]: k["envVar"] for k in tracking["keyToEnv"]} == {
            "mlflow": "MLFLOW_TRACKING_URI",
            "model-registry": "LATHE_MODEL_REGISTRY",
        }
        assert {f["name"]: f["fieldPath"] for f in settings["fieldPathAsEnv"]} == {
            "POD_NAME": "metadata.name",
            "POD_UID": "metadata.uid",
            "POD_NAMESPACE": "metadata.namespace",
            "KFP_RUN_ID": "metadata.labels['pipeline/runid']",
        }
        assert settings["securityContext"] == {"runAsUser": "10001", "runAsNonRoot": True}
        labels = settings["podMetadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == labels["app.kubernetes.io/part-of"] == "lathe"
        assert label.startswith(labels["lathe/stage"])
    assert {"prepare", "evaluate"} < stages
    for dag in [spec["root"], *spec["components"].values()]:
        for task in dag.get("dag", {}).get("tasks", {}).values():
            component = spec["components"][task["componentRef"]["name"]]
            if (
                component.get("executorLabel") == "exec-release"
            ):  # a rejected release is not retried
                assert not task.get("retryPolicy", {}).get("maxRetryCount")
            elif component.get("executorLabel", "exec-importer") != "exec-importer":
                assert task["retryPolicy"] == {
                    "maxRetryCount": 2,
                    "backoffDuration": "30s",
                    "backoffFactor": 2.0,
                    # total over all attempts, which Argo enforces
                    "backoffMaxDuration": f"{3 * deadlines[component['executorLabel']]}s",
                }


@pytest.mark.parametrize(
    ("pool", "launch"),
    [
        ("default", ["nodes=1", "gpus_per_node=1", "node_pool=gpu"]),
        ("two-nodes", ["nodes=2", "gpus_per_node=8", "queue=research", "node_pool=a100"]),
        ("no-gpu", ["nodes=1", "gpus_per_node=0"]),
    ],
)
def test_a_run_without_overrides_trains_on_the_pools_machines(compiled, pool, launch):
    spec, _ = compiled("full", pool)
    parameter = spec["root"]["inputDefinitions"]["parameters"]["overrides"]
    assert parameter["defaultValue"] == [f"Launch.{setting}" for setting in launch]


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("prune", "recipe"), ("compress", None), ("full", "prune_recipe"), ("qat", None)],
)
def test_a_run_without_arguments_of_a_paddle_version_is_paddles(compiled, name, recipe):
    spec, _ = compiled(name, "paddle")
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert parameters["overrides"]["defaultValue"][0] == "Compress.engine=paddle"
    told = {key for key, p in parameters.items() if p.get("defaultValue") == "tiny-prune-paddle"}
    assert told == ({recipe} if recipe else set())


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", PIPELINES)
def test_nothing_is_lost_in_kfps_own_messages(compiled, name, pool):
    spec, platform = compiled(name, pool)
    message = json_format.ParseDict(spec, pipeline_spec_pb2.PipelineSpec())
    assert json_format.MessageToDict(message) == spec
    message = json_format.ParseDict(platform, pipeline_spec_pb2.PlatformSpec())
    assert json_format.MessageToDict(message) == platform
    for _, _, _, settings in executors(spec, platform):
        config = kubernetes_executor_config_pb2.KubernetesExecutorConfig()
        message = json_format.ParseDict(settings, config)
        written = json_format.MessageToDict(message)
        # Fields that are false are omitted here, but not in the YAML.
        for part in ("secretAsEnv", "configMapAsEnv"):
            for source in written[part]:
                source.setdefault("optional", False)
        assert written == settings


@pytest.mark.parametrize("name", PIPELINES)
def test_exit_handlers_are_notified_of_failures_too(tmp_path, name):
    path = tmp_path / f"{name}.yaml"
    compiler.Compiler().compile(build(name, Variant(notify=True)), str(path))
    spec, platform = yaml.load_all(path.read_text(), yaml.CSafeLoader)
    handled, notify = sorted(spec["root"]["dag"]["tasks"].items())
    assert (handled[0], notify[0]) == ("exit-handler-1", "notify")
    assert notify[1]["triggerPolicy"] == {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
    assert notify[1]["dependentTasks"] == ["exit-handler-1"]
    inside = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    usual = build(name).pipeline_spec.root.dag.tasks
    assert {task["taskInfo"]["name"] for task in inside.values()} == {
        task.task_info.name for task in usual.values()
    }
    settings = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    secrets = {part["secretName"]: part for part in settings["exec-notify"]["secretAsEnv"]}
    assert secrets["lathe-webhook"]["optional"]
    assert [part["secretKey"] for part in secrets["lathe-webhook"]["keyToEnv"]] == ["url", "ui"]
    assert not any(
        "lathe-webhook" in str(given) for label, given in settings.items() if label != "exec-notify"
    )


def test_every_run_looks_up_its_inputs_judges_and_reports(tmp_path):
    path = tmp_path / "full.yaml"
    compiler.Compiler().compile(build("full", Variant()), str(path))
    spec = next(yaml.load_all(path.read_text(), yaml.CSafeLoader))
    dags = [spec["root"], *spec["components"].values()]
    steps = {
        name: task.get("cachingOptions", {}).get("enableCache", False)
        for dag in dags
        for name, task in dag.get("dag", {}).get("tasks", {}).items()
        if "dag" not in spec["components"][task["componentRef"]["name"]]
    }
    not_cached = [name for name, is_cached in sorted(steps.items()) if not is_cached]
    assert not_cached == ["gate", "inputs", "release", "report"]

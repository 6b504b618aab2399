"""Resource requests of the tasks of one compiled pipeline, for runs on several machines."""

import functools

import pytest
import yaml
from google.protobuf import json_format
from kfp.kubernetes import kubernetes_executor_config_pb2
from kfp.pipeline_spec import pipeline_spec_pb2
from typer.testing import CliRunner

from components.images import PADDLE, TRAIN
from components.machines import Pool, gpu_cores
from components.plan import plan
from components.step import NAMES, component
from pipelines.commands.compile import app
from pipelines.compiler import compile as compile_module
from pipelines.compiler import objects
from pipelines.compiler.compile import FUNCTIONS, MACHINES, defaults
from pipelines.steps.resources import Variant
from tests.support.compiled import all_tasks, compiled, pods, tolerations

POOLS = {
    "default": Pool(),
    "two-nodes": Pool(nodes=2, gpus=8, node_pool="a100"),
    "one-node": Pool(gpus=8, node_pool="a100"),
    "queue": Pool(gpus=8, node_pool="a100", queue="research"),
    "no-gpu": Pool(gpus=0),
    "two-nodes-without-gpus": Pool(nodes=2, gpus=0),
}
DECLARED = {component(name).step.name or name: component(name).step for name in NAMES}
"""Declaration of each step in its component."""

# `full` has tasks of nearly all components.
PIPELINES = [
    name if name == "full" else pytest.param(name, marks=pytest.mark.slow) for name in FUNCTIONS
]
VARIANTS = {"torch": Variant(), "paddle": Variant(engine="paddle")}
load = functools.cache(lambda name, engine: compiled(name, VARIANTS[engine]))


@functools.cache
def planned(pool: str) -> dict:
    return plan("tiny", [], pool=POOLS[pool])


def stage_gpus(stage: str, pool: Pool) -> int:
    starts = pool.nodes > 1 or bool(pool.queue)
    by_machine = {"node": pool.gpus, "training": 0 if starts else pool.gpus}
    return by_machine.get(DECLARED[stage].machine, min(1, pool.gpus) * (
        DECLARED[stage].machine == "gpu"
    ))  # fmt: skip


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", PIPELINES)
def test_one_file_runs_on_all_machines(name, pool):
    machines = POOLS[pool]
    for label, (container, settings) in pods(name, planned(pool)).items():
        stage = label.partition("-")[0]
        machine, gpus = DECLARED[stage].machine, stage_gpus(stage, machines)
        resources = container["resources"]
        if machine == "waiting":
            assert (resources["resourceCpuRequest"], resources["resourceMemoryRequest"]) == (
                *("100m", "512Mi"),
            )
            assert "accelerator" not in resources and "nodeSelector" not in settings
            continue
        starts = machine == "training" and (machines.nodes > 1 or machines.queue)
        if starts:
            assert resources["resourceCpuRequest"] == "100m"
        elif gpus:
            assert resources["resourceCpuRequest"] == str(gpu_cores(gpus))
        else:
            assert resources["resourceCpuRequest"] == "500m"
        assert resources["resourceMemoryRequest"].endswith("Mi")
        asked = resources.get("accelerator", {"resourceCount": "0", "resourceType": None})
        assert asked["resourceCount"] == str(gpus)
        assert asked["resourceType"] == (None if machine in ("cpu", "text") else "nvidia.com/gpu")
        selector = {"lathe/node-pool": machines.node_pool} if gpus else {}
        assert settings.get("nodeSelector", {"labels": {}}) == {"labels": selector}
        assert tolerations(settings) == [
            {"key": key, "operator": "Exists", "effect": "NoSchedule"}
            for key in ("lathe/node-pool", "nvidia.com/gpu")
            if gpus
        ]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_run_has_the_machines_as_described_parameters(name):
    parameters = load(name, "torch")[0]["root"]["inputDefinitions"]["parameters"]
    assert all(parameter["description"] for parameter in parameters.values())
    found = {key: parameters[key]["defaultValue"] for key in MACHINES}
    assert found == {
        **{"gpus": 1, "nodes": 1, "cpus": 0, "memory": "", "node_pool": "gpu", "queue": ""},
        "notify": False,
    }
    assert load(name, "torch")[0]["pipelineInfo"]["description"]


@pytest.mark.parametrize("kind", ["yaml", "objects"])
def test_a_compiled_file_may_have_other_machines_as_defaults(kind, tmp_path, monkeypatch):
    """As `make compile` and `make manifests` pass them on."""
    monkeypatch.setattr(compile_module, "FUNCTIONS", {"prune": FUNCTIONS["prune"]})
    monkeypatch.setattr(objects, "FUNCTIONS", {"prune": FUNCTIONS["prune"]})
    target = tmp_path if kind == "yaml" else tmp_path / "pipelines.yaml"
    options = ["--gpus", "0", "--nodes", "2", "--node-pool", "a100", "--queue", "research"]
    done = CliRunner().invoke(app, [kind, str(target), *options, "--notify"])
    assert done.exit_code == 0, done.output
    if kind == "yaml":
        spec = next(yaml.safe_load_all((tmp_path / "prune.yaml").read_text()))
    else:
        things = list(yaml.safe_load_all(target.read_text()))
        (spec,) = (o["spec"]["pipelineSpec"] for o in things if o["kind"] == "PipelineVersion")
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert {key: parameters[key]["defaultValue"] for key in MACHINES} == {
        **{"gpus": 0, "nodes": 2, "cpus": 0, "memory": "", "node_pool": "a100"},
        **{"queue": "research", "notify": True},
    }


@pytest.mark.parametrize("kind", ["yaml", "objects"])
@pytest.mark.parametrize("option", [("--gpus", "-1"), ("--nodes", "0"), ("--memory", "lots")])
def test_invalid_defaults_are_refused_before_anything_is_written(kind, option, tmp_path):
    done = CliRunner().invoke(app, [kind, str(tmp_path / "new"), *option])
    assert done.exit_code == 2 and "error[invalid-value]" in done.output
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("engine", VARIANTS)
@pytest.mark.parametrize("name", PIPELINES)
def test_settings_of_every_task(name, engine):
    spec, platform = load(name, engine)
    stages, deadlines = set(), {}
    for label, executor in spec["deploymentSpec"]["executors"].items():
        if "container" not in executor:
            continue
        stage, container = label.removeprefix("exec-").partition("-")[0], executor["container"]
        settings, step = platform[label], DECLARED[stage]
        stages.add(stage)
        deadlines[label] = int(settings["activeDeadlineSeconds"])
        is_paddles = engine == "paddle" and step.by_engine
        assert container["image"] == (PADDLE if is_paddles else TRAIN)
        assert settings["activeDeadlineSeconds"] == str(int(step.hours * 3600))
        gib = {"training": 64, "node": 64, "gpu": 8}.get(step.machine, 2)
        assert settings["emptyDirMounts"] == [
            {"volumeName": "shm", "mountPath": "/dev/shm", "medium": "Memory",
             "sizeLimit": f"{gib}Gi"}
        ]  # fmt: skip
        *webhook, secret = settings["secretAsEnv"]
        assert [s["secretName"] for s in webhook] == ["lathe-webhook"] * (stage == "notify")
        store, tracking = settings["configMapAsEnv"]
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
            "gpu-hour-price": "LATHE_GPU_HOUR_PRICE",
            "cpu-hour-price": "LATHE_CPU_HOUR_PRICE",
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
        assert label.startswith(f"exec-{labels['lathe/stage']}")
    assert {"prepare", "evaluate", "notify"} < stages
    for _, task in all_tasks(spec):
        label = spec["components"][task["componentRef"]["name"]].get("executorLabel")
        if label == "exec-release":  # a rejected release is not retried
            assert not task.get("retryPolicy", {}).get("maxRetryCount")
        elif label in deadlines:
            assert task["retryPolicy"] == {
                "maxRetryCount": 2,
                "backoffDuration": "30s",
                "backoffFactor": 2.0,
                # total over all attempts, which Argo enforces
                "backoffMaxDuration": f"{3 * deadlines[label]}s",
            }


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("prune", "recipe"), ("compress", None), ("full", "prune_recipe"), ("qat", None)],
)
def test_a_run_without_arguments_of_a_paddle_version_is_paddles(name, recipe):
    spec, _ = load(name, "paddle")
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert parameters["overrides"]["defaultValue"] == ["Compress.engine=paddle"]
    told = {key for key, p in parameters.items() if p.get("defaultValue") == "tiny-prune-paddle"}
    assert told == ({recipe} if recipe else set())


def test_the_last_of_several_engines_chooses_the_pruning_recipe():
    torch, paddle = (f"Compress.engine={engine}" for engine in ("torch", "paddle"))
    assert defaults("prune", [torch, paddle]) == {"recipe": "tiny-prune-paddle"}
    assert defaults("prune", [paddle, torch]) == {}


@pytest.mark.parametrize("name", PIPELINES)
def test_nothing_is_lost_in_kfps_own_messages(name):
    spec, platform = load(name, "torch")
    message = json_format.ParseDict(spec, pipeline_spec_pb2.PipelineSpec())
    assert json_format.MessageToDict(message) == spec
    for settings in platform.values():
        config = kubernetes_executor_config_pb2.KubernetesExecutorConfig()
        message = json_format.ParseDict(settings, config)
        written = json_format.MessageToDict(message)
        # Fields that are false are omitted here, but not in the YAML.
        for part in ("secretAsEnv", "configMapAsEnv"):
            for source in written[part]:
                source.setdefault("optional", False)
        assert written == settings


@pytest.mark.parametrize("name", PIPELINES)
def test_exit_handlers_are_notified_of_failures_too(name):
    spec, platform = load(name, "torch")
    handled, notify = sorted(spec["root"]["dag"]["tasks"].items())
    assert (handled[0], notify[0]) == ("exit-handler-1", "notify")
    assert handled[1]["taskInfo"]["name"] == "steps"
    assert notify[1]["triggerPolicy"] == {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
    assert notify[1]["dependentTasks"] == ["exit-handler-1"]
    given = notify[1]["inputs"]["parameters"]["is_wanted"]
    assert given == {"componentInputParameter": "notify"}
    secrets = {part["secretName"]: part for part in platform["exec-notify"]["secretAsEnv"]}
    assert secrets["lathe-webhook"]["optional"]
    assert [part["secretKey"] for part in secrets["lathe-webhook"]["keyToEnv"]] == ["url", "ui"]
    others = {label: given for label, given in platform.items() if label != "exec-notify"}
    assert "lathe-webhook" not in str(others)


def test_every_run_looks_up_its_inputs_judges_and_reports():
    spec, _ = load("full", "torch")
    not_cached = [
        name
        for name, task in sorted(all_tasks(spec))
        if "dag" not in spec["components"][task["componentRef"]["name"]]
        if not task.get("cachingOptions", {}).get("enableCache", False)
    ]
    assert not_cached == ["gate", "inputs", "notify", "release", "report"]

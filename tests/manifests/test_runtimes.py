"""The training runtimes: no retries, the store's keys, and GPUs by a single patch."""

import json

import pytest
import yaml

from tests.support.rendered import Object, find_namespace, named, of_kind, variant


def job(runtime: Object) -> Object:
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"
    template: Object = replicated["template"]
    return template


def test_one_failure_ends_the_trainjob(objects: list[Object]) -> None:
    runtimes = of_kind(objects, "TrainingRuntime")
    assert {o["metadata"]["name"] for o in runtimes} == {"lathe-torch", "lathe-paddle"}
    for runtime in runtimes:
        assert runtime["metadata"]["namespace"] == find_namespace(objects)
        assert runtime["spec"]["mlPolicy"] == {"numNodes": 1, "torch": {}}
        assert runtime["spec"]["template"]["spec"]["failurePolicy"] == {"maxRestarts": 0}
        template = job(runtime)
        step = template["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"]
        assert step == "trainer"
        assert template["spec"]["backoffLimit"] == 0
        pod = template["spec"]["template"]["spec"]
        assert pod["restartPolicy"] == "Never"
        assert [c["name"] for c in pod["containers"]] == ["node"]


def test_both_runtimes_have_the_same_pods(production: list[Object]) -> None:
    torch, paddle = (
        job(named(production, "TrainingRuntime", name)) for name in ("lathe-torch", "lathe-paddle")
    )
    theirs = json.loads(json.dumps(paddle))
    container = theirs["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["/opt/paddle/python", "-m", "lathe_paddle"]
    container["command"] = ["lathe"]
    container["image"] = container["image"].replace("paddle", "train")
    assert theirs == torch


def test_the_store_reaches_the_workers(production: list[Object]) -> None:
    """The variables are named as in `lathe_base.storage`."""
    runtime = named(production, "TrainingRuntime", "lathe-torch")
    (container,) = job(runtime)["spec"]["template"]["spec"]["containers"]
    given = [variable for variable in container["env"] if "valueFrom" in variable]
    references = {v["name"]: next(iter(v["valueFrom"].values())) for v in given}
    assert references == {
        "AWS_ENDPOINT_URL": {"name": "lathe-store", "key": "endpoint"},
        "AWS_REGION": {"name": "lathe-store", "key": "region"},
        "AWS_ACCESS_KEY_ID": {"name": "lathe-s3", "key": "accesskey", "optional": True},
        "AWS_SECRET_ACCESS_KEY": {"name": "lathe-s3", "key": "secretkey", "optional": True},
        "AWS_SESSION_TOKEN": {"name": "lathe-s3", "key": "sessiontoken", "optional": True},
    }
    store = named(production, "ConfigMap", "lathe-store")
    assert set(store["data"]) == {"endpoint", "region", "bucket"}


def test_runs_keep_their_artifacts_in_the_same_store(production: list[Object]) -> None:
    store = named(production, "ConfigMap", "lathe-store")["data"]
    launcher = named(production, "ConfigMap", "kfp-launcher")["data"]
    provider = yaml.safe_load(launcher["providers"])["s3"]["default"]
    assert launcher["defaultPipelineRoot"].startswith(f"s3://{store['bucket']}/")
    assert store["endpoint"] == f"https://{provider['endpoint']}"
    assert store["region"] == provider["region"]
    assert provider["credentials"]["secretRef"]["secretName"] == "lathe-s3"


def test_gpu_pool_is_one_patch(
    production: list[Object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    pool = {"lathe/node-pool": "gpu"}
    tolerations = [
        {"key": key, "operator": "Exists", "effect": "NoSchedule"}
        for key in ("lathe/node-pool", "nvidia.com/gpu")
    ]
    for runtime in of_kind(production, "TrainingRuntime"):
        pod = job(runtime)["spec"]["template"]["spec"]
        assert (pod["nodeSelector"], pod["tolerations"]) == (pool, tolerations)
    for runtime in of_kind(variant("kind", tmp_path_factory), "TrainingRuntime"):
        assert not {"nodeSelector", "tolerations"} & set(job(runtime)["spec"]["template"]["spec"])


def test_gang_scheduling_is_an_option(
    production: list[Object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    together = of_kind(variant("production+gang-scheduling", tmp_path_factory), "TrainingRuntime")
    for runtime in together:
        assert "coscheduling" in runtime["spec"]["podGroupPolicy"]
        scheduler = job(runtime)["spec"]["template"]["spec"]["schedulerName"]
        assert scheduler == "scheduler-plugins-scheduler"
    for runtime in of_kind(production, "TrainingRuntime"):
        assert "podGroupPolicy" not in runtime["spec"]

"""The server's pods: resources, graceful shutdown, and fields that `apply` must not reset."""

import json
import re

import pytest

from lathe_serving import wait_closed
from tests.support.rendered import Object, named, of_kind, variant


def test_time_to_drain(objects: list[Object]) -> None:
    """The grace period covers the time that the gateway, and then Triton, need to drain."""
    for deployment in of_kind(objects, "Deployment"):
        spec = deployment["spec"]["template"]["spec"]
        triton, gateway = spec["containers"]
        seconds = gateway["lifecycle"]["preStop"]["sleep"]["seconds"]
        *_, port = (
            str(port["containerPort"]) for port in gateway["ports"]
        )  # all close at the same time
        waits = [f"--first={seconds}", port]
        command = ["python", "-m", wait_closed.__name__, *waits]
        assert triton["lifecycle"]["preStop"]["exec"]["command"] == command
        for container, option in ((triton, "exit-timeout-secs"), (gateway, "drain-seconds")):
            (drain,) = re.findall(rf"--{option}=(\d+)", " ".join(container["args"]))
            seconds += int(drain)
        assert spec["terminationGracePeriodSeconds"] > seconds


def test_kserve_runs_the_same_pods(
    tmp_path_factory: pytest.TempPathFactory, production: list[Object]
) -> None:
    kserve = variant("production+kserve", tmp_path_factory)
    assert of_kind(kserve, "Deployment") == []
    predictor = of_kind(kserve, "InferenceService")[0]["spec"]["predictor"]
    expected = named(production, "Deployment", "lathe-serve")["spec"]["template"]["spec"]
    assert predictor["containers"][0].pop("name") == "kserve-container"
    expected = json.loads(json.dumps(expected))
    expected["containers"][0].pop("name")
    (release,) = (v for v in predictor["initContainers"][0]["env"] if v["name"] == "LATHE_RELEASE")
    path = release.pop("valueFrom")["fieldRef"]["fieldPath"]
    assert path == "metadata.annotations['lathe/release']"
    assert {key: predictor[key] for key in expected} == expected
    (scaler,) = of_kind(kserve, "HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"]["name"] == "lathe-serve-predictor"


def test_a_release_survives_another_apply(objects: list[Object]) -> None:
    """The manifests omit the fields that `lathe deploy` and the autoscaler set."""
    for deployment in of_kind(objects, "Deployment"):
        assert "replicas" not in deployment["spec"]
        template = deployment["spec"]["template"]
        assert "lathe/release" not in template["metadata"]["annotations"]
        (fetch,) = template["spec"]["initContainers"]
        assert {"name": "LATHE_RELEASE"} in fetch["env"]
        target = fetch["command"][-1]
        triton, gateway = template["spec"]["containers"]
        assert f"--model-repository={target}" in triton["args"] and target in gateway["args"]


def test_the_stores_keys_are_not_the_servers(objects: list[Object]) -> None:
    for deployment in of_kind(objects, "Deployment"):
        for container in deployment["spec"]["template"]["spec"]["containers"]:
            assert "lathe-s3" not in json.dumps(container)
            mounts = {m["name"]: m for m in container["volumeMounts"]}
            assert mounts["models"]["readOnly"] is True and "store" not in mounts
            assert ("keys" in mounts) is (container["name"] == "gateway")

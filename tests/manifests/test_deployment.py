"""The server's pods: what they may hold, how they end, and what another apply leaves alone."""

import json
import re

import pytest

from lathe.serve import wait_closed
from tests.support.rendered import Object, named, of_kind, variant


def test_time_to_drain(objects: list[Object]) -> None:
    """Kubernetes kills no server that the gateway, and Triton after it, still let finish."""
    for deployment in of_kind(objects, "Deployment"):
        spec = deployment["spec"]["template"]["spec"]
        triton, gateway = spec["containers"]
        seconds = gateway["lifecycle"]["preStop"]["sleep"]["seconds"]
        *_, port = (str(port["containerPort"]) for port in gateway["ports"])  # all close together
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
    """What `lathe deploy` and the autoscaler write is in no manifest, so applying leaves it."""
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

"""The component gpu-serving: Triton's container gets a GPU, and the time and memory for vLLM."""

import json

import pytest

from tests.support.rendered import Object, named, of_kind, variant


@pytest.mark.parametrize("kserve", ["", "+kserve"])
def test_tritons_container_alone_has_the_gpu(
    kserve: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    objects = variant(f"production+gpu-serving{kserve}", tmp_path_factory)
    if kserve:
        spec = named(objects, "InferenceService", "lathe-serve")["spec"]["predictor"]
    else:
        deployment = named(objects, "Deployment", "lathe-serve")["spec"]
        spec = deployment["template"]["spec"]
    triton, *others = (*spec["containers"], *spec["initContainers"])
    assert triton["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "/lathe-serve-vllm@" in triton["image"]
    for container in others:
        assert "nvidia.com/gpu" not in json.dumps(container["resources"])
        assert "/lathe-serve@" in container["image"]
    assert spec["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    ]
    sizes = {
        volume["name"]: volume["emptyDir"].get("sizeLimit")
        for volume in spec["volumes"]
        if "emptyDir" in volume
    }
    assert (sizes["models"], sizes["shm"]) == ("200Gi", "16Gi")
    assert "/dev/shm" in {mount["mountPath"] for mount in triton["volumeMounts"]}
    probe = triton["startupProbe"]
    loading = probe["periodSeconds"] * probe["failureThreshold"]
    assert loading >= 1800
    assert kserve or deployment["progressDeadlineSeconds"] > loading


def test_nothing_changes_for_servers_without_gpus(production: list[Object]) -> None:
    assert "vllm" not in json.dumps(of_kind(production, "Deployment"))
    (scaler,) = of_kind(production, "HorizontalPodAutoscaler")
    assert [metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]] == [
        "lathe_running",
        "lathe_waiting",
        "lathe_kv_cache_usage",
    ]

"""The component workload-identity: service accounts with an IAM role instead of a Secret."""

import pytest
import yaml

from tests.support.rendered import OVERLAYS, Object, named, of_kind, pods, variant

ROLE = "eks.amazonaws.com/role-arn"


@pytest.fixture(params=OVERLAYS)
def identified(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Object]:
    return variant(f"{request.param}+workload-identity", tmp_path_factory)


def test_pods_that_use_the_store_have_the_role(identified: list[Object]) -> None:
    accounts = {one["metadata"]["name"]: one for one in of_kind(identified, "ServiceAccount")}
    with_role = {
        name for name, one in accounts.items() if ROLE in one["metadata"].get("annotations", {})
    }
    assert with_role == {"lathe-pipeline", "lathe-train", "lathe-serve"}
    owners = {pod.owner: pod.spec.get("serviceAccountName") for pod in pods(identified)}
    assert owners["Deployment/lathe-serve"] == "lathe-serve"
    assert owners["TrainingRuntime/lathe-torch"] == "lathe-train"
    assert owners["TrainingRuntime/lathe-paddle"] == "lathe-train"
    assert accounts["lathe-train"]["automountServiceAccountToken"] is False


def test_runs_of_the_ui_have_the_role_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Their account is `default-editor`, where the component `default-account` binds it."""
    objects = variant("kind+default-account+workload-identity", tmp_path_factory)
    steps, editor = (
        named(objects, "ServiceAccount", name)["metadata"]["annotations"][ROLE]
        for name in ("lathe-pipeline", "default-editor")
    )
    assert editor == steps
    with pytest.raises(AssertionError, match="list default-account before workload-identity"):
        variant("kind+workload-identity+default-account", tmp_path_factory)


def test_no_pod_needs_the_keys(production: list[Object]) -> None:
    for pod in pods(production):
        for volume in pod.spec["volumes"]:
            if volume.get("secret", {}).get("secretName") == "lathe-s3":
                assert volume["secret"]["optional"] is True
        for container in pod.containers:
            for variable in container.get("env", []):
                reference = variable.get("valueFrom", {}).get("secretKeyRef", {})
                assert reference.get("name") != "lathe-s3" or reference["optional"] is True


def test_pipelines_launcher_takes_the_identity(tmp_path_factory: pytest.TempPathFactory) -> None:
    objects = variant("production+workload-identity", tmp_path_factory)
    launcher = named(objects, "ConfigMap", "kfp-launcher")["data"]
    found = yaml.safe_load(launcher["providers"])
    assert found == {"s3": {"default": {"credentials": {"fromEnv": True}}}}
    assert launcher["defaultPipelineRoot"].startswith("s3://")

"""Every object is valid, without unknown fields: built-in kinds by Kubernetes' schemas, custom
resources by the operators' CRDs."""

import copy
import json
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from google.protobuf import json_format

from components.machines import requests
from lathe_base.config.settings import LaunchSettings
from pipelines.compiler import objects as pipeline_objects
from pipelines.compiler.compile import FUNCTIONS, built
from pipelines.steps.resources import Variant
from tests.support import quick_kfp  # noqa: F401
from tests.support.crds import CRDS, validator
from tests.support.rendered import MANIFESTS, Object, named, of_kind, pods, variant

KUBERNETES = "1.32"
CUSTOM = ("trainer.kubeflow.org", "serving.kserve.io", "pipelines.kubeflow.org")
# Kinds without a schema in `shared/crds`.
NO_SCHEMA = {"PodMonitor", "ClusterQueue", "LocalQueue", "ResourceFlavor", "Route"}
NO_SCHEMA |= {"CiliumNetworkPolicy"}


def problems(thing: Object) -> list[str]:
    return _problems(json.dumps(thing))


@cache  # most objects are equal in all variants
def _problems(written: str) -> list[str]:
    thing = json.loads(written)
    group, _, version = thing["apiVersion"].rpartition("/")
    if group in CUSTOM:
        schema = validator(group, f"{thing['kind'].lower()}s", version)
        if schema is None:
            pytest.skip(f"no CRDs in {CRDS}")
        found = schema.iter_errors(thing)
        return ["/".join(map(str, e.path)) + f": {e.message[:200]}" for e in found]
    try:
        kubernetes_validate.validate(thing, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [error.message]
    return []


def test_built_in_kinds(objects: list[Object]) -> None:
    for thing in objects:
        if thing["kind"] not in NO_SCHEMA and not thing["apiVersion"].startswith(CUSTOM):
            assert problems(thing) == [], thing["metadata"]["name"]


@pytest.mark.shared
def test_operators_kinds(objects: list[Object]) -> None:
    checked = [thing for thing in objects if thing["apiVersion"].startswith(CUSTOM)]
    assert len(checked) >= 2
    for thing in checked:
        assert problems(thing) == [], thing["metadata"]["name"]


@pytest.mark.shared
@pytest.mark.slow
def test_the_pipelines_as_objects(tmp_path: Path) -> None:
    pipeline_objects.write(tmp_path / "pipelines.yaml", "1a2b3c4", Variant())
    written = list(
        yaml.load_all((tmp_path / "pipelines.yaml").read_text(), Loader=yaml.CSafeLoader)
    )
    names = {f"lathe-{name}" for name in FUNCTIONS}
    assert {o["metadata"]["name"] for o in written if o["kind"] == "Pipeline"} == names
    versions = [o for o in written if o["kind"] == "PipelineVersion"]
    assert {o["spec"]["pipelineName"] for o in versions} == names
    assert {o["metadata"]["name"] for o in versions} == {f"{name}-1a2b3c4" for name in names}
    for thing in written:
        assert problems(thing) == []
        assert thing["metadata"]["namespace"] == "lathe"
        assert thing["metadata"]["labels"]["app.kubernetes.io/part-of"] == "lathe"
    for thing in versions:
        spec = thing["spec"]
        assert f"lathe-{spec['pipelineSpec']['pipelineInfo']['name']}" == spec["pipelineName"]
        assert spec["platformSpec"]["platforms"]["kubernetes"]


def test_objects_that_steps_refer_to_are_applied(production: list[Object]) -> None:
    """ConfigMaps, Secrets and node pools that the pipelines refer to exist."""
    shapes = list(yaml.safe_load_all((MANIFESTS / "secrets.example.yaml").read_text()))
    keys = {o["metadata"]["name"]: set(o["stringData"]) for o in shapes}
    maps = {o["metadata"]["name"]: set(o["data"]) for o in of_kind(production, "ConfigMap")}
    pod = next(p.spec for p in pods(production) if p.owner == "TrainingRuntime/lathe-torch")
    for pipeline in map(built, FUNCTIONS):
        platforms = pipeline.platform_spec.platforms["kubernetes"]
        executors = json_format.MessageToDict(platforms)["deploymentSpec"]["executors"]
        for executor in executors.values():
            for source in executor.get("configMapAsEnv", []):
                used = {item["configMapKey"] for item in source["keyToEnv"]}
                assert source.get("optional") or used <= maps[source["configMapName"]]
            for source in executor.get("secretAsEnv", []):
                used = {item["secretKey"] for item in source["keyToEnv"]}
                assert used <= keys[source["secretName"]]
    on_gpus = requests(LaunchSettings(gpus_per_node=1, node_pool="gpu"), None)
    assert on_gpus["node_node_selector"] == pod["nodeSelector"]
    assert on_gpus["node_tolerations"] == pod["tolerations"]


@pytest.mark.shared
@pytest.mark.parametrize(
    "kind, name", [("TrainingRuntime", "lathe-torch"), ("Service", "lathe-serve")]
)
def test_unknown_fields_are_refused(
    kind: str, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    thing = copy.deepcopy(named(variant("kind", tmp_path_factory), kind, name))
    assert problems(thing) == []
    thing["spec"]["tempalte"] = {}
    assert any("tempalte" in problem for problem in problems(thing))

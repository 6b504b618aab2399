"""Every object is valid, unknown fields included: built-in kinds by Kubernetes' own schemas, the
operators' kinds by theirs."""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from pipelines import objects as pipeline_objects
from tests.manifests.rendered import CRDS, Object, named, variant

KUBERNETES = "1.32"
CUSTOM = ("trainer.kubeflow.org", "serving.kserve.io", "pipelines.kubeflow.org")
NO_SCHEMA = {"PodMonitor", "ClusterQueue", "LocalQueue", "ResourceFlavor"}  # kinds nobody gave us


def closed(schema: Any) -> Any:
    """A structural schema that refuses what it does not name, as the API server would prune it."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    result = {k: closed(v) for k, v in schema.items() if k != "properties"}
    if "properties" in schema:
        result["properties"] = {k: closed(v) for k, v in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            result.setdefault("additionalProperties", False)
    return result


@cache
def validator(kind: str, group: str, version: str) -> jsonschema.Draft202012Validator:
    path = CRDS / f"{group}_{kind.lower()}s.yaml"
    if not path.is_file():
        pytest.skip(f"development data absent: {path}")
    crd = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)
    (found,) = (v for v in crd["spec"]["versions"] if v["name"] == version)
    schema = closed(found["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


def problems(thing: Object) -> list[str]:
    return _problems(json.dumps(thing))


@cache  # most objects are the same in every variant
def _problems(written: str) -> list[str]:
    thing = json.loads(written)
    group, _, version = thing["apiVersion"].rpartition("/")
    if group in CUSTOM:
        found = validator(thing["kind"], group, version).iter_errors(thing)
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
def test_the_pipelines_as_objects(tmp_path: Path) -> None:
    pipeline_objects.write(tmp_path / "pipelines.yaml", "1a2b3c4")
    written = list(
        yaml.load_all((tmp_path / "pipelines.yaml").read_text(), Loader=yaml.CSafeLoader)
    )
    names = set(pipeline_objects.PIPELINES)
    assert {o["metadata"]["name"] for o in written if o["kind"] == "Pipeline"} == names
    versions = [o for o in written if o["kind"] == "PipelineVersion"]
    assert {o["spec"]["pipelineName"] for o in versions} == names
    assert {o["metadata"]["name"] for o in versions} == {f"{name}-1a2b3c4" for name in names}
    for thing in written:
        assert problems(thing) == []
        assert thing["metadata"]["namespace"] == "lathe"
        assert thing["metadata"]["labels"]["app.kubernetes.io/part-of"] == "lathe"
    for thing in versions:
        assert (
            thing["spec"]["pipelineSpec"]["pipelineInfo"]["name"] == thing["spec"]["pipelineName"]
        )
        assert thing["spec"]["platformSpec"]["platforms"]["kubernetes"]


@pytest.mark.shared
@pytest.mark.parametrize(
    "kind, name", [("ClusterTrainingRuntime", "lathe-torch"), ("Service", "lathe-serve")]
)
def test_unknown_fields_are_refused(kind: str, name: str, tmp_path: Path) -> None:
    thing = copy.deepcopy(named(variant("kind", tmp_path), kind, name))
    assert problems(thing) == []
    thing["spec"]["tempalte"] = {}
    assert any("tempalte" in problem for problem in problems(thing))

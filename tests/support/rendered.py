"""The manifests as kustomize renders them, and queries on their objects."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.support.once import once

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "manifests"
OVERLAYS = ("kind", "production", "standalone")
COMPONENTS = sorted(
    path.parent.name
    for path in (MANIFESTS / "components").glob("*/kustomization.yaml")
    if path.parent.name != "in-namespace"  # which every overlay has
)
OVERLAYS_OWN = ("production+autoscaling",)
COMBINED = [f"{overlay}+{name}" for overlay in OVERLAYS for name in COMPONENTS]
ALL = [f"{overlay}+{'+'.join(COMPONENTS)}" for overlay in ("kind", "standalone")]
VARIANTS = [*OVERLAYS, *(name for name in COMBINED if name not in OVERLAYS_OWN), *ALL]

Object = dict[str, Any]


class Pod(NamedTuple):
    owner: str
    labels: dict[str, str]
    spec: Object

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


@cache
def text(folder: Path) -> str:
    """Output of `kubectl kustomize` for a folder; skips if kubectl is not installed."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl on this machine")
    command = ["kubectl", "kustomize", str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert made.stderr == "", made.stderr  # deprecated fields
    return made.stdout


def variant(name: str, factory: pytest.TempPathFactory) -> list[Object]:
    """Objects of an overlay, alone or with components: `overlay+component`."""

    def write(path: Path) -> None:
        path.write_text(_rendered(name, factory.mktemp("variant")))

    path = once(factory, f"{name}.yaml", write)
    return list(yaml.load_all(path.read_text(), Loader=yaml.CSafeLoader))


def _rendered(name: str, folder: Path) -> str:
    """Render an overlay; with components, render a copy of it in the empty `folder`."""
    overlay, *components = name.split("+")
    source = MANIFESTS / "overlays" / overlay
    if components:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        source = folder
        kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
        above = Path(os.path.relpath(MANIFESTS, folder))
        names = kustomization.get("components", [])
        names += [f"../../components/{component}" for component in components]
        last = ["namespace", "../../components/in-namespace", "priority"]
        names.sort(key=lambda name: last.index(name) if name in last else -1)
        kustomization |= {
            "resources": [_below(above, path) for path in kustomization["resources"]],
            "components": [_below(above, path) for path in names],
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return text(source)


def _below(above: Path, path: str) -> str:
    """Adapt a relative path of an overlay to its copy, from which the manifests are at `above`."""
    return str(above / path.removeprefix("../../")) if path.startswith("../../") else path


def find_namespace(objects: list[Object]) -> str:
    """Namespace of the rendered objects."""
    return str(named(objects, "CronJob", "lathe-janitor")["metadata"]["namespace"])


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [o for o in objects if o["kind"] in kinds]


def named(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = (o for o in of_kind(objects, kind) if o["metadata"]["name"] == name)
    return found


def pods(objects: list[Object]) -> list[Pod]:
    """All pod templates in the objects, at any depth."""
    return [pod for o in objects for pod in _pods(o, f"{o['kind']}/{o['metadata']['name']}")]


def _pods(value: Any, owner: str) -> Iterator[Pod]:
    if isinstance(value, list):
        for item in value:
            yield from _pods(item, owner)
    elif isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield Pod(owner, value.get("metadata", {}).get("labels", {}), value["spec"])
        elif "containers" in value:  # KServe's predictor has the pod spec's fields itself
            yield Pod(owner, value.get("labels", {}), value)
        else:
            for item in value.values():
                yield from _pods(item, owner)


def matches(selector: Object | None, labels: dict[str, str]) -> bool:
    """Whether a label selector matches these labels; None matches nothing."""
    if selector is None:
        return False
    if any(labels.get(k) != v for k, v in selector.get("matchLabels", {}).items()):
        return False
    for term in selector.get("matchExpressions", []):
        value = labels.get(term["key"])
        holds = {
            "In": value in term.get("values", []),
            "NotIn": value not in term.get("values", []),
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }[term["operator"]]
        if not holds:
            return False
    return True

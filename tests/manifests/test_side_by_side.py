"""Beside others: a second installation, and the policies of Kubeflow's community distribution."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from tests.manifests.test_network import TRAIN, TRAINER
from tests.support.rendered import (
    COMPONENTS,
    MANIFESTS,
    OVERLAYS,
    Object,
    matches,
    named,
    of_kind,
    pods,
    text,
    variant,
)


def identity(thing: Object) -> tuple[str, str, str]:
    metadata = thing["metadata"]
    return thing["kind"], metadata.get("namespace", ""), metadata["name"]


def installation(folder: Path, overlay: str, namespace: str, *components: str) -> list[Object]:
    """Objects of an overlay in another namespace, set as the documentation says."""
    shutil.copytree(MANIFESTS, folder / namespace)
    place = folder / namespace / "overlays" / overlay
    file = place / "namespace" / "kustomization.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"namespace": namespace}))
    file = place / "kustomization.yaml"
    kustomization = yaml.safe_load(file.read_text())
    known = kustomization["components"]
    added = [f"../../components/{name}" for name in components]
    last = known.index("namespace")
    known[last:last] = [path for path in added if path not in known]
    file.write_text(yaml.safe_dump(kustomization))
    return list(yaml.safe_load_all(text(place)))


@pytest.mark.parametrize(
    "overlays",
    [
        ("production", "production"),
        ("standalone", "standalone"),
        pytest.param(("kind", "kind"), marks=pytest.mark.slow),
        pytest.param(("production", "kind"), marks=pytest.mark.slow),
    ],
    ids="+".join,
)
@pytest.mark.parametrize(
    "components",
    [pytest.param(("kueue",), marks=pytest.mark.slow), COMPONENTS],
    ids=["kueue", "all"],
)
def test_two_installations_share_no_object(
    overlays: tuple[str, str], components: Sequence[str], tmp_path: Path
) -> None:
    rendered = []
    for overlay, namespace in zip(overlays, ("team-a", "team-b"), strict=True):
        objects = installation(tmp_path, overlay, namespace, *components)
        rendered.append({identity(thing) for thing in objects})
        assert {place for _, place, _ in rendered[-1]} <= {"", namespace, TRAINER.namespace}
        for thing in objects:
            metadata = thing["metadata"]
            if metadata.get("namespace", "") != namespace and thing["kind"] != "Namespace":
                assert metadata["name"].endswith(f"-{namespace}"), identity(thing)
        queue = named(objects, "ClusterQueue", f"lathe-{namespace}")
        labels = queue["spec"]["namespaceSelector"]["matchLabels"]
        assert labels == {"kubernetes.io/metadata.name": namespace}
        assert named(objects, "LocalQueue", "lathe")["spec"]["clusterQueue"] == f"lathe-{namespace}"
        (group,) = queue["spec"]["resourceGroups"]
        flavors = {one["metadata"]["name"] for one in of_kind(objects, "ResourceFlavor")}
        assert {flavor["name"] for flavor in group["flavors"]} == flavors
        for binding in of_kind(objects, "RoleBinding", "ClusterRoleBinding"):
            assert {subject["namespace"] for subject in binding["subjects"]} == {namespace}
        classes = {one["metadata"]["name"] for one in of_kind(objects, "PriorityClass")}
        used = {pod.spec.get("priorityClassName") for pod in pods(objects)} - {None}
        assert used == classes and bool(classes) == (overlay == "production")
    first, second = rendered
    assert first & second == set()


@pytest.mark.parametrize("overlay", ["kind", "production"])
def test_the_distributions_policies_let_the_namespace_in(
    overlay: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its policies of Pipelines, the metadata store and the object store, as of its commit in the
    documentation."""
    objects = variant(overlay, tmp_path_factory)
    labels = named(objects, "Namespace", "lathe")["metadata"]["labels"]
    profiles = {"key": "app.kubernetes.io/part-of", "operator": "In"}
    assert matches({"matchExpressions": [profiles | {"values": ["kubeflow-profile"]}]}, labels)


@pytest.mark.parametrize("overlay", ["kind", "production"])
def test_workers_reach_trainers_status_server(
    overlay: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The distribution's own policy opens its port 9443 only."""
    objects = variant(f"{overlay}+community-distribution", tmp_path_factory)
    policy = named(objects, "NetworkPolicy", "lathe-trainer-status-lathe")
    assert policy["metadata"]["namespace"] == TRAINER.namespace
    assert matches(policy["spec"]["podSelector"], TRAINER.labels)
    (rule,) = policy["spec"]["ingress"]
    (peer,) = rule["from"]
    space = {"kubernetes.io/metadata.name": "lathe"}
    assert matches(peer["namespaceSelector"], space) and matches(peer["podSelector"], TRAIN.labels)
    assert rule["ports"] == [{"port": 10443}]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ciliums_policies_select_the_same_pods(
    overlay: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    objects = variant(f"{overlay}+cilium", tmp_path_factory)
    plain = named(objects, "NetworkPolicy", "lathe-kubernetes-api")["spec"]
    cilium = named(objects, "CiliumNetworkPolicy", "lathe-kubernetes-api")["spec"]
    assert cilium["endpointSelector"] == plain["podSelector"]
    (rule,) = cilium["egress"]
    assert rule["toEntities"] == ["kube-apiserver"]
    ports = {int(one["port"]) for group in rule["toPorts"] for one in group["ports"]}
    assert ports == {one["port"] for one in plain["egress"][0]["ports"]}

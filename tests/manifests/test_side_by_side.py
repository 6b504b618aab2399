"""Beside others: a second installation, and the policies of Kubeflow's community distribution."""

import shutil
from pathlib import Path

import pytest
import yaml

from tests.manifests.test_network import TRAIN, TRAINER
from tests.support.rendered import (
    MANIFESTS,
    OVERLAYS,
    Object,
    matches,
    named,
    of_kind,
    text,
    variant,
)

SHARED = {"ClusterRole", "ClusterTrainingRuntime", "PriorityClass", "ResourceFlavor"}
"""Kinds without a namespace that are the same in every installation."""


def identity(thing: Object) -> tuple[str, str, str]:
    metadata = thing["metadata"]
    return thing["kind"], metadata.get("namespace", ""), metadata["name"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_two_installations_share_nothing_that_differs(overlay: str, tmp_path: Path) -> None:
    rendered = []
    for namespace in ("team-a", "team-b"):
        shutil.copytree(MANIFESTS, tmp_path / namespace)
        folder = tmp_path / namespace / "overlays" / overlay
        place = folder / "namespace" / "kustomization.yaml"
        place.write_text(
            yaml.safe_dump(yaml.safe_load(place.read_text()) | {"namespace": namespace})
        )
        file = folder / "kustomization.yaml"
        kustomization = yaml.safe_load(file.read_text())
        kustomization["components"].insert(0, "../../components/kueue")
        file.write_text(yaml.safe_dump(kustomization))
        objects = list(yaml.safe_load_all(text(folder)))
        rendered.append({identity(thing): thing for thing in objects})
        queue = named(objects, "ClusterQueue", f"lathe-{namespace}")
        labels = queue["spec"]["namespaceSelector"]["matchLabels"]
        assert labels == {"kubernetes.io/metadata.name": namespace}
        assert named(objects, "LocalQueue", "lathe")["spec"]["clusterQueue"] == f"lathe-{namespace}"
        for binding in of_kind(objects, "RoleBinding", "ClusterRoleBinding"):
            assert {subject["namespace"] for subject in binding["subjects"]} == {namespace}
        spaces = {place for _, place, _ in rendered[-1]}
        assert spaces <= {"", namespace}
    first, second = rendered
    both = set(first) & set(second)
    assert {kind for kind, _, _ in both} <= SHARED
    assert all(first[key] == second[key] for key in both)


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
    policy = named(objects, "NetworkPolicy", "lathe-trainer-status")
    assert policy["metadata"]["namespace"] == TRAINER.namespace
    assert matches(policy["spec"]["podSelector"], TRAINER.labels)
    (rule,) = policy["spec"]["ingress"]
    (peer,) = rule["from"]
    space = named(objects, "Namespace", "lathe")["metadata"]["labels"]
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

"""Connections that the network policies allow, evaluated as by a cluster."""

import os
from dataclasses import dataclass, field, replace
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.rendered import (
    ALL,
    MANIFESTS,
    OVERLAYS,
    ROOT,
    Object,
    find_namespace,
    matches,
    of_kind,
    pods,
    text,
    variant,
)


@dataclass(frozen=True)
class Peer:
    namespace: str
    labels: dict[str, str] = field(default_factory=dict)
    namespace_labels: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    address: str = "10.1.2.3"


OWN = {"app.kubernetes.io/part-of": "lathe"}
TRAIN = Peer("lathe", {**OWN, "app.kubernetes.io/component": "train"})
JANITOR = Peer("lathe", {**OWN, "app.kubernetes.io/component": "janitor"})
SERVE = Peer(
    "lathe",
    {**OWN, "app.kubernetes.io/component": "serve"},
    ports={"http": 8000, "grpc": 8001, "metrics": 8002, "openai": 9000},
)
STEP = Peer("lathe", {**OWN, "workflows.argoproj.io/workflow": "qat-x"})
DRIVER = Peer("lathe", {"workflows.argoproj.io/workflow": "qat-x"})
STRANGER = Peer("lathe")
CLIENT = Peer("lathe", {"lathe/client": "true"})
APPLICATION = Peer("shop", namespace_labels={"lathe/client": "true"})
OTHER = Peer("shop")
PROMETHEUS = Peer("monitoring", {"app.kubernetes.io/name": "prometheus"})
DNS = Peer("kube-system", {"k8s-app": "kube-dns"})
PIPELINES = Peer("kubeflow", {"app": "ml-pipeline"})
METADATA = Peer("kubeflow", {"component": "metadata-grpc-server"})
TRAINER = Peer(
    "kubeflow-system",
    {"app.kubernetes.io/name": "trainer", "app.kubernetes.io/component": "manager"},
)
STORE = Peer("kubeflow", {"app": "seaweedfs"})
API = Peer("", address="10.0.0.1")
API_LOCAL_IPV6 = Peer("", address="fd12:3456:789a::1")
API_GLOBAL_IPV6 = Peer("", address="2001:db8:1::10")
NODE_DNS = [Peer("", address=address) for address in ("169.254.20.10", "fd00::a")]
"""NodeLocal DNS, which answers on the node."""
POD_IDENTITY = [Peer("", address=address) for address in ("169.254.170.23", "fd00:ec2::23")]
"""The agent of EKS Pod Identity, on the node."""
INTERNET = Peer("", address="151.101.0.223")

# In the overlay kind: source, target, port, allowed.
FLOWS = [
    *((source, DNS, 53, True) for source in (STEP, TRAIN, SERVE, JANITOR, STRANGER)),
    *((s, dns, 53, True) for s in (STEP, TRAIN, SERVE, JANITOR, STRANGER) for dns in NODE_DNS),
    *((source, STORE, 8333, True) for source in (STEP, TRAIN, SERVE)),
    (JANITOR, STORE, 8333, False),
    *((source, API, 6443, True) for source in (STEP, DRIVER, JANITOR)),
    *((source, API, 6443, False) for source in (TRAIN, SERVE)),
    *((source, API_LOCAL_IPV6, 6443, True) for source in (STEP, DRIVER, JANITOR)),
    *((source, API_LOCAL_IPV6, 6443, False) for source in (TRAIN, SERVE)),
    *((source, API_GLOBAL_IPV6, 6443, False) for source in (STEP, DRIVER, JANITOR)),
    *((s, agent, 80, False) for s in (STEP, TRAIN, SERVE, JANITOR) for agent in POD_IDENTITY),
    *((source, PIPELINES, port, True) for source in (STEP, DRIVER) for port in (8887, 8888)),
    *((source, METADATA, 8080, True) for source in (STEP, DRIVER)),
    *((source, PIPELINES, 8888, False) for source in (TRAIN, SERVE, JANITOR, STRANGER)),
    (TRAIN, TRAINER, 10443, True),
    (TRAIN, TRAINER, 9443, False),
    (STEP, TRAINER, 10443, False),
    (TRAIN, TRAIN, 29400, True),
    (TRAIN, TRAIN, 41234, True),
    *((source, TRAIN, 29400, False) for source in (STEP, SERVE, STRANGER, OTHER, CLIENT)),
    *((s, SERVE, port, True) for s in (CLIENT, APPLICATION) for port in (8000, 8001, 9000)),
    *((source, SERVE, 8002, False) for source in (CLIENT, APPLICATION)),
    *((PROMETHEUS, SERVE, port, True) for port in (8002, 9000)),
    (PROMETHEUS, SERVE, 8001, False),
    *((s, SERVE, port, False) for s in (OTHER, STRANGER, TRAIN, STEP) for port in (8001, 9000)),
    *((source, INTERNET, 443, False) for source in (STEP, TRAIN, SERVE, JANITOR)),
    (OTHER, STEP, 8080, False),
]


def permits(objects: list[Object], source: Peer, target: Peer, port: int) -> bool:
    """Whether both ends allow a connection; other namespaces allow everything."""
    here = find_namespace(objects)
    leaves = source.namespace != here or _passes(objects, "egress", source, target, port)
    enters = target.namespace != here or _passes(objects, "ingress", target, source, port)
    return leaves and enters


def _passes(objects: list[Object], way: str, mine: Peer, other: Peer, port: int) -> bool:
    policies = [
        policy["spec"]
        for policy in of_kind(objects, "NetworkPolicy")
        if way.title() in policy["spec"]["policyTypes"]
        and matches(policy["spec"]["podSelector"], mine.labels)
    ]
    served = (mine if way == "ingress" else other).ports
    return not policies or any(
        _has_port(rule, served, port) and _has_peer(rule, way, mine, other)
        for policy in policies
        for rule in policy.get(way, [])
    )


def _has_port(rule: Object, served: dict[str, int], port: int) -> bool:
    if "ports" not in rule:
        return True
    return port in [served.get(p["port"], p["port"]) for p in rule["ports"]]


def _has_peer(rule: Object, way: str, mine: Peer, other: Peer) -> bool:
    return any(_is_peer(peer, mine, other) for peer in rule["from" if way == "ingress" else "to"])


def _is_peer(peer: dict[str, Any], mine: Peer, other: Peer) -> bool:
    if block := peer.get("ipBlock"):
        inside = [ip_address(other.address) in ip_network(n) for n in block.get("except", [])]
        return ip_address(other.address) in ip_network(block["cidr"]) and not any(inside)
    if not other.namespace:
        return False
    if "namespaceSelector" in peer:
        labels = {"kubernetes.io/metadata.name": other.namespace, **other.namespace_labels}
        here = matches(peer["namespaceSelector"], labels)
    else:
        here = mine.namespace == other.namespace
    return here and ("podSelector" not in peer or matches(peer["podSelector"], other.labels))


@pytest.fixture(scope="module")
def kind(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    return variant("kind", tmp_path_factory)


@pytest.mark.parametrize("source, target, port, expected", FLOWS)
def test_flows(kind: list[Object], source: Peer, target: Peer, port: int, expected: bool) -> None:
    assert permits(kind, source, target, port) is expected


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    return variant("standalone", tmp_path_factory)


@pytest.mark.parametrize(
    "source, target, port, expected", [flow for flow in FLOWS if flow[0] not in (STRANGER, DRIVER)]
)
def test_the_same_flows_beside_pipelines(
    standalone: list[Object], source: Peer, target: Peer, port: int, expected: bool
) -> None:
    source, target = (
        replace(peer, namespace="kubeflow") if peer.namespace == "lathe" else peer
        for peer in (source, target)
    )
    assert permits(standalone, source, target, port) is expected


def test_pods_of_others_beside_pipelines_are_left_alone(standalone: list[Object]) -> None:
    others = [replace(peer, namespace="kubeflow") for peer in (STRANGER, DRIVER, CLIENT)]
    for other in (PIPELINES, METADATA, STORE, *others):
        assert permits(standalone, other, INTERNET, 443)
        assert permits(standalone, APPLICATION, other, 3306)
        assert not permits(standalone, other, replace(TRAIN, namespace="kubeflow"), 29400)


@pytest.mark.parametrize("overlay", ["standalone", ALL[-1]])
def test_no_object_beside_pipelines_selects_or_replaces_what_is_not_its_own(
    tmp_path_factory: pytest.TempPathFactory, overlay: str
) -> None:
    objects = variant(overlay, tmp_path_factory)
    assert of_kind(objects, "Namespace", "ResourceQuota", "LimitRange", "Secret") == []
    names = {thing["metadata"]["name"] for thing in objects}
    assert {name for name in names if not name.startswith("lathe")} == set()
    for thing in objects:
        spec = thing.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if selector and thing["kind"] != "Service":
            selector = selector["matchLabels"]
        assert not selector or {"lathe"} & set(selector.values()), thing["metadata"]["name"]


def test_production_reaches_its_store_and_nothing_else(production: list[Object]) -> None:
    for source in (STEP, TRAIN, SERVE):
        assert permits(production, source, INTERNET, 443)
        assert not permits(production, source, INTERNET, 80)
        assert not permits(production, source, STORE, 8333)
    assert not permits(production, JANITOR, INTERNET, 443)


def test_public_egress_is_for_steps(tmp_path_factory: pytest.TempPathFactory) -> None:
    opened = variant("kind+public-egress", tmp_path_factory)
    assert permits(opened, STEP, INTERNET, 443) and permits(opened, STEP, INTERNET, 80)
    assert not permits(opened, TRAIN, INTERNET, 443)
    assert not permits(opened, STEP, Peer("", address="169.254.169.254"), 80)


def test_tracking_is_for_steps(tmp_path_factory: pytest.TempPathFactory) -> None:
    opened = variant("kind+tracking", tmp_path_factory)
    mlflow = Peer("mlflow")
    registry = Peer("kubeflow", {"component": "model-registry-server"})
    assert permits(opened, STEP, mlflow, 5000) and permits(opened, STEP, registry, 8080)
    assert not permits(opened, TRAIN, mlflow, 5000) and not permits(opened, TRAIN, registry, 8080)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_with_a_workload_identity_reach_its_agent(
    overlay: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    opened = variant(f"{overlay}+workload-identity", tmp_path_factory)
    here = find_namespace(opened)
    for agent in POD_IDENTITY:
        for source in (STEP, TRAIN, SERVE):
            assert permits(opened, replace(source, namespace=here), agent, 80)
        assert not permits(opened, replace(JANITOR, namespace=here), agent, 80)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_documented_patch_adds_a_range_of_the_api_server(overlay: str, tmp_path: Path) -> None:
    """The one in `docs/how-to/cluster-network.md`."""
    document = (ROOT / "docs/how-to/cluster-network.md").read_text()
    section = document.partition("## Public IPv6 addresses")[2]
    patches = yaml.safe_load(section.partition("```yaml\n")[2].partition("```")[0])
    base = os.path.relpath(MANIFESTS / "overlays" / overlay, tmp_path)
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump({"resources": [base], **patches}))
    objects = list(yaml.safe_load_all(text(tmp_path)))
    for source in (STEP, JANITOR):
        source = replace(source, namespace=find_namespace(objects))
        assert permits(objects, source, API_GLOBAL_IPV6, 6443)
        assert permits(objects, source, API, 6443)


def own_policies(objects: list[Object]) -> list[Object]:
    """The policies of the installation's namespace."""
    here, policies = find_namespace(objects), of_kind(objects, "NetworkPolicy")
    return [policy for policy in policies if policy["metadata"]["namespace"] == here]


def test_policies_and_services_select_pods_that_exist(objects: list[Object]) -> None:
    known = [pod.labels for pod in pods(objects)] + [STEP.labels, CLIENT.labels]
    selectors = {p["metadata"]["name"]: p["spec"] for p in own_policies(objects)}
    for name, spec in selectors.items():
        assert any(matches(spec["podSelector"], labels) for labels in known), name
    for thing in of_kind(objects, "Deployment", "PodDisruptionBudget", "PodMonitor"):
        assert any(matches(thing["spec"]["selector"], labels) for labels in known)
    for service in of_kind(objects, "Service"):
        assert any(matches({"matchLabels": service["spec"]["selector"]}, k) for k in known)


def test_named_ports_are_served(objects: list[Object]) -> None:
    by_labels = [
        (pod.labels, {p["name"] for c in pod.containers for p in c.get("ports", [])})
        for pod in pods(objects)
    ]
    for policy in own_policies(objects):
        for rule in policy["spec"].get("ingress", []):
            wanted = {p["port"] for p in rule.get("ports", [])}
            selected = [n for k, n in by_labels if matches(policy["spec"]["podSelector"], k)]
            assert all(wanted <= names for names in selected) and selected
    for service in of_kind(objects, "Service"):
        wanted = {p["targetPort"] for p in service["spec"]["ports"]}
        selector = {"matchLabels": service["spec"]["selector"]}
        assert [wanted <= names for k, names in by_labels if matches(selector, k)] == [True]
    for monitor in of_kind(objects, "PodMonitor"):
        ports = {e["port"] for e in monitor["spec"]["podMetricsEndpoints"]}
        selector = monitor["spec"]["selector"]
        assert [ports <= names for k, names in by_labels if matches(selector, k)] == [True]

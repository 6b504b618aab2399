"""The component openshift: uids from the namespace's range, and a Route."""

import pytest

from tests.support.rendered import find_namespace, named, of_kind, pods, variant

IDENTITY = {"runAsUser", "runAsGroup", "fsGroup"}


@pytest.mark.parametrize(
    "name",
    [
        "production+openshift",
        "standalone+openshift",
        pytest.param("kind+openshift", marks=pytest.mark.slow),
        "kind+openshift+kserve",
        "kind+kserve+openshift",
    ],
)
def test_no_pod_has_a_fixed_user(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    objects = variant(name, tmp_path_factory)
    found = pods(objects)
    assert len(found) == 4
    for pod in found:
        assert not IDENTITY & set(pod.spec["securityContext"]), pod.owner
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        for container in pod.containers:
            assert not IDENTITY & set(container["securityContext"])


def test_the_route_leads_to_the_gateway(tmp_path_factory: pytest.TempPathFactory) -> None:
    objects = variant("standalone+openshift", tmp_path_factory)
    route = named(objects, "Route", "lathe-serve")
    assert route["metadata"]["namespace"] == find_namespace(objects) == "kubeflow"
    service = named(objects, "Service", route["spec"]["to"]["name"])
    ports = {port["name"] for port in service["spec"]["ports"]}
    assert route["spec"]["port"]["targetPort"] in ports
    assert route["spec"]["tls"]["termination"] == "edge"
    policies = {one["metadata"]["name"] for one in of_kind(objects, "NetworkPolicy")}
    assert {"lathe-route", "lathe-openshift-dns"} <= policies

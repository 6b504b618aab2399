"""The fake Kubernetes API server with the real client."""

from pathlib import Path

import pytest
from kubernetes import client, config, watch
from kubernetes.client import ApiException

from tests.support.fake_kubernetes import TOKEN, Controller, Event, FakeKubernetes

DEPLOYMENT = {
    "metadata": {"name": "serve", "labels": {"app": "serve"}},
    "spec": {
        "replicas": 1,
        "selector": {"matchLabels": {"app": "serve"}},
        "template": {"metadata": {"labels": {"app": "serve"}}, "spec": {"containers": []}},
    },
}


@pytest.fixture
def server():
    with FakeKubernetes() as server:
        yield server


@pytest.fixture
def api(server: FakeKubernetes, tmp_path: Path) -> client.ApiClient:
    return config.new_client_from_config(str(server.kubeconfig(tmp_path)))


def owned_by(owner: dict, **metadata: object) -> dict:
    reference = {"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": owner["metadata"]["uid"]}
    return {"metadata": {"ownerReferences": [reference], **metadata}}


def test_objects_come_and_go(server: FakeKubernetes, api: client.ApiClient) -> None:
    apps = client.AppsV1Api(api)
    made = apps.create_namespaced_deployment("lathe", DEPLOYMENT)
    with pytest.raises(ApiException) as twice:
        apps.create_namespaced_deployment("lathe", DEPLOYMENT)
    assert twice.value.status == 409
    apps.patch_namespaced_deployment("serve", "lathe", {"spec": {"replicas": 3}})
    found = apps.read_namespaced_deployment("serve", "lathe")
    assert found.spec.replicas == 3 and found.metadata.generation == 2
    assert found.metadata.uid == made.metadata.uid
    with pytest.raises(ApiException) as stale:
        apps.replace_namespaced_deployment("serve", "lathe", made)
    assert stale.value.status == 409
    assert len(apps.list_namespaced_deployment("lathe", label_selector="app=serve").items) == 1
    assert not apps.list_namespaced_deployment("lathe", label_selector="app!=serve").items
    apps.delete_namespaced_deployment("serve", "lathe")
    with pytest.raises(ApiException) as gone:
        apps.read_namespaced_deployment("serve", "lathe")
    assert gone.value.status == 404


def test_a_watch_sees_each_change_and_may_expire(
    server: FakeKubernetes, api: client.ApiClient
) -> None:
    core = client.CoreV1Api(api)
    first = server.create("pods", {"metadata": {"name": "a"}})
    server.create("pods", {"metadata": {"name": "b"}}, "elsewhere")
    server.patch("pods", "a", {"status": {"phase": "Running"}})
    since = first["metadata"]["resourceVersion"]
    stream = watch.Watch().stream
    seen = stream(core.list_namespaced_pod, "lathe", resource_version=since, timeout_seconds=1)
    assert [(e["type"], e["object"].metadata.name) for e in seen] == [("MODIFIED", "a")]
    seen = stream(core.list_namespaced_pod, "lathe", timeout_seconds=1)
    assert [e["type"] for e in seen] == ["ADDED"]
    server.compact()
    with pytest.raises(ApiException) as expired:
        list(stream(core.list_namespaced_pod, "lathe", resource_version=since, timeout_seconds=1))
    assert expired.value.status == 410


def test_owned_objects_are_deleted_with_their_owner(server: FakeKubernetes) -> None:
    owner = server.create("pods", {"metadata": {"name": "owner"}})
    child = server.create("jobs.batch", owned_by(owner, name="child"))
    server.create("pods", owned_by(child, name="grandchild"))
    server.delete("pods", "owner")
    assert not server.list("jobs.batch") and not server.list("pods")


def test_an_owner_in_the_foreground_waits_for_what_is_held(server: FakeKubernetes) -> None:
    owner = server.create("jobs.batch", {"metadata": {"name": "owner"}})
    server.create("pods", owned_by(owner, name="child", finalizers=["test/held"]))
    server.delete("jobs.batch", "owner", foreground=True)
    assert server.get("jobs.batch", "owner")["metadata"]["deletionTimestamp"]
    assert server.get("pods", "child")["metadata"]["deletionTimestamp"]
    server.patch("pods", "child", {"metadata": {"finalizers": []}})
    assert not server.list("jobs.batch") and not server.list("pods")


def test_refusals(server: FakeKubernetes, tmp_path: Path) -> None:
    file = server.kubeconfig(tmp_path)
    custom = client.CustomObjectsApi(config.new_client_from_config(str(file)))
    place = ("serving.kserve.io", "v1beta1", "lathe", "inferenceservices")
    server.denied.add(("delete", "inferenceservices"))
    with pytest.raises(ApiException) as forbidden:
        custom.delete_namespaced_custom_object(*place, "x")
    assert forbidden.value.status == 403 and "cannot delete" in forbidden.value.body
    file.write_text(file.read_text().replace(TOKEN, "another"))
    custom = client.CustomObjectsApi(config.new_client_from_config(str(file)))
    with pytest.raises(ApiException) as unknown:
        custom.list_namespaced_custom_object(*place)
    assert unknown.value.status == 401


def test_a_controller_acts_on_what_is_made(server: FakeKubernetes, api: client.ApiClient) -> None:
    class Ready(Controller):
        def handle(self, event: Event) -> None:
            if event.key.resource == "deployments.apps" and event.type == "ADDED":
                status = {"readyReplicas": event.object["spec"]["replicas"]}
                server.patch("deployments.apps", event.key.name, {"status": status})

    Ready(server).start()
    apps = client.AppsV1Api(api)
    apps.create_namespaced_deployment("lathe", DEPLOYMENT)
    listing = apps.list_namespaced_deployment
    for event in watch.Watch().stream(listing, "lathe", timeout_seconds=5):
        status = event["object"].status
        if status and status.ready_replicas == 1:
            return
    pytest.fail("the controller did nothing")

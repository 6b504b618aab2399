"""A server that accepts connections and never answers, and refusals in the server's own words."""

import base64
import json
import socket
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from kfp_server_api import ApiException
from kubernetes import client as kubernetes

from lathe_base.errors import Code, StageError, UserError
from lathe_launch.cluster import api, doctor, nodes
from lathe_launch.cluster.api import Cluster
from pipelines.cluster import registry, server
from pipelines.cluster.pods import open_pods
from pipelines.cluster.server import TokenFile, answers, connect, pages, token_expiry
from tests.support import silent
from tests.support.errors import raises

LIMIT = 0.2


def never_answers(connection: socket.socket, stop: threading.Event) -> None:
    stop.wait(10)  # a request without a limit then fails the assertion in place of hanging


def list_runs(url: str) -> object:
    """A later request of a client that has connected."""
    client = server.Client(host=url, namespace="kubeflow")
    return client.runs.run_service_list_runs()


REQUESTS = {
    "sign in": lambda url: connect(),
    "list runs": list_runs,
    "list pods": lambda url: server.open_cluster("lathe").pods(),
    "find pods": lambda url: open_pods("run", "lathe", None),
    "read a ConfigMap": lambda url: server.config_map(server.open_cluster("lathe"), "kfp-launcher"),
    "list nodes": lambda url: nodes.gpu_memory("gpu"),
    "look for JobSet": lambda url: doctor.check_jobset(server.open_cluster("lathe")),
    "ask a registry": lambda url: registry.check_image(f"{url.removeprefix('http://')}/lathe:1"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_silent_server_ends_every_request(name, monkeypatch, tmp_path: Path) -> None:
    for module, constant in (
        (server, "TIMEOUT"),
        (server, "SIGN_IN_TIMEOUT"),
        (doctor, "TIMEOUT"),
        (nodes, "TIMEOUT"),
        (server, "KUBE_TIMEOUT"),
    ):
        monkeypatch.setattr(module, constant, (LIMIT, LIMIT))
    monkeypatch.setattr(server, "KUBE_PATIENCE_SECONDS", LIMIT)
    monkeypatch.setattr(registry, "SECONDS", LIMIT)
    for variable in ("LATHE_KFP_TOKEN_FILE", "LATHE_KFP_COOKIES", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with silent.server(never_answers) as port:
        url = f"http://127.0.0.1:{port}"
        monkeypatch.setenv("LATHE_KFP_ENDPOINT", url)
        config = {
            "current-context": "x",
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
        }
        (tmp_path / "config").write_text(yaml.safe_dump(config), encoding="utf-8")
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        began = time.monotonic()
        try:
            with answers():
                REQUESTS[name](url)
        except (UserError, StageError):
            pass
        assert time.monotonic() - began < 5


def refusal(status: int, body: str) -> ApiException:
    reply = SimpleNamespace(status=status, reason="Refused", data=body, getheaders=dict)
    return ApiException(http_resp=reply)


FORBIDDEN = (
    '{"error":"Failed to list runs","code":7,"message":"User \'eve@example.com\' is not authorized '
    "with reason: (request: &ResourceAttributes{Namespace:team-a,Verb:list,"
    'Group:pipelines.kubeflow.org,Version:v1beta1,Resource:runs,Subresource:,Name:,})"}'
)
PROXY = (
    '{"kind":"Status","message":"services \\"http:ml-pipeline:8888\\" is forbidden: User \\"eve\\" '
    'cannot create resource \\"services/proxy\\" in API group \\"\\" in the namespace '
    '\\"kubeflow\\"","code":403}'
)


@pytest.mark.parametrize(
    ("endpoint", "status", "body", "said", "cure"),
    [
        ("https://ui", 403, FORBIDDEN, "eve@example.com", "may list runs in namespace team-a"),
        ("", 403, PROXY, 'create resource "services/proxy"', "get and create services/proxy in"),
        ("https://ui", 403, "RBAC: access denied", "RBAC: access", "set LATHE_KFP_ENDPOINT to the"),
        ("https://ui", 401, '{"message":"token expired"}', "token expired", "LATHE_KFP_TOKEN_FILE"),
        ("", 401, '{"message":"Unauthorized"}', "Unauthorized", "kubectl auth whoami"),
        ("https://ui", 401, "<html>Who are you?</html>", "Refused", "LATHE_KFP_TOKEN_FILE"),
    ],
)
def test_a_refusal_keeps_the_servers_words(monkeypatch, endpoint, status, body, said, cure) -> None:
    monkeypatch.setenv("LATHE_KFP_ENDPOINT", endpoint)
    monkeypatch.delenv("KFP_ENDPOINT", raising=False)
    with raises(Code.UNAUTHORIZED if status == 401 else Code.FORBIDDEN) as raised, answers():
        raise refusal(status, body)
    assert said in raised.value.what and f"({status})" in raised.value.what
    assert cure in raised.value.hint and "<html>" not in str(raised.value)


def test_a_token_file_that_is_being_rewritten(tmp_path: Path) -> None:
    config = SimpleNamespace(api_key={})
    token = TokenFile(tmp_path / "token")
    for text in ("first", "", None, "second"):
        if text is None:
            (tmp_path / "token").unlink()
        else:
            (tmp_path / "token").write_text(text)
        token.refresh_api_key_hook(config)
        assert config.api_key["authorization"] == ("second" if text == "second" else "first")


@pytest.mark.parametrize("accepted", [True, False], ids=["accepted before", "never accepted"])
def test_a_rejected_token_is_tried_again_if_it_was_good_before(monkeypatch, accepted) -> None:
    """An API server that was replaced rejects every token for some seconds."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    cluster = Cluster(SimpleNamespace(configuration=SimpleNamespace(host="h")), "lathe")
    asked = []

    def call(**_: object) -> str:
        asked.append(now[0])
        if (accepted and len(asked) == 1) or now[0] > 40:
            return "answer"
        raise kubernetes.ApiException(status=401, reason="Unauthorized")

    if accepted:
        assert cluster.ask(call) == "answer"
        assert cluster.ask(call) == "answer" and now[0] > 40
        return
    with raises(Code.UNAUTHORIZED, "Unauthorized"):
        cluster.ask(call)
    assert len(asked) == api.REJECTED_ATTEMPTS and now[0] < 15


def test_a_listing_without_an_end_is_an_error() -> None:
    following = {"": "a", "a": "b", "b": "a"}

    def request(page_token: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(runs=[page_token], next_page_token=following[page_token])

    with raises(Code.SERVER_ERROR, "runs", kind=StageError):
        list(pages(request, "runs"))
    following["b"] = ""
    assert list(pages(request, "runs", size=2)) == ["", "a", "b"]


def test_a_token_says_when_it_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    monkeypatch.setenv("LATHE_KFP_TOKEN_FILE", str(token))
    assert token_expiry() is None
    claims = base64.urlsafe_b64encode(json.dumps({"exp": 1_800_000_000}).encode()).decode()
    token.write_text(f"head.{claims.rstrip('=')}.signature\n")
    assert token_expiry() == datetime(2027, 1, 15, 8, tzinfo=UTC)
    for other in ("opaque", "a.b.c", f"a.{base64.urlsafe_b64encode(b'[1]').decode()}.c"):
        token.write_text(other)
        assert token_expiry() is None

"""Kubeconfig features that the official client does not support: proxies and renewed tokens."""

import logging
from email.message import Message
from pathlib import Path

import pytest
import yaml
from kubernetes import client

from lathe_base.errors import Code, StageError
from lathe_base.storage.network import as_proxy
from lathe_launch.cluster.api import load_kubeconfig
from pipelines.cluster.server import Client, open_cluster
from tests.support.errors import raises
from tests.support.loopback import JSONHandler, LoopbackServer

HOST = "http://kubernetes.invalid:6443"


@pytest.fixture
def proxy():
    """A proxy that answers for the cluster, whose HOST does not resolve; records headers."""

    class Handler(JSONHandler):
        def do_GET(self) -> None:
            assert self.path.startswith(HOST), self.path
            seen.append(self.headers)
            self.reply(b'{"major": "1", "minor": "34", "multi_user": false}')

    seen: list[Message] = []
    with LoopbackServer(Handler) as server:
        yield server.url, seen


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Function that writes a kubeconfig with additional keys of its cluster."""

    def write(**cluster: str) -> None:
        context = {"cluster": "c", "user": "u", "namespace": "team"}
        file = {
            "current-context": "x",
            "contexts": [{"name": "x", "context": context}],
            "clusters": [{"name": "c", "cluster": {"server": HOST} | cluster}],
            "users": [{"name": "u", "user": {"tokenFile": "token"}}],
        }
        (tmp_path / "config").write_text(yaml.safe_dump(file), encoding="utf-8")
        (tmp_path / "token").write_text("first\n", encoding="utf-8")

    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY", "LATHE_KFP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    return write


@pytest.mark.parametrize("is_named", [True, False], ids=["proxy-url", "HTTP_PROXY"])
def test_requests_go_through_the_proxy_with_the_token_of_now(
    proxy, kubeconfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    address, seen = proxy
    address = address.replace("://", "://user:word@")
    kubeconfig(**({"proxy-url": address} if is_named else {}))
    if not is_named:
        monkeypatch.setenv("http_proxy", address)
    settings = client.Configuration()
    assert load_kubeconfig(settings) == "team"
    version = client.ApiClient(settings)
    for token in ("first", "second"):
        (tmp_path / "token").write_text(f"{token}\n", encoding="utf-8")
        version.call_api("/version", "GET", auth_settings=["BearerToken"])
        assert seen[-1]["Authorization"] == f"Bearer {token}"
        assert seen[-1]["Proxy-Authorization"] == as_proxy(address).headers["proxy-authorization"]
    (tmp_path / "token").unlink()
    version.call_api("/version", "GET", auth_settings=["BearerToken"])
    assert seen[-1]["Authorization"] == "Bearer second"


@pytest.mark.filterwarnings("ignore::FutureWarning:kfp")
def test_pipelines_is_reached_through_the_same_proxy(proxy, kubeconfig) -> None:
    address, seen = proxy
    kubeconfig(**{"proxy-url": address})
    assert Client(namespace="kubeflow").get_kfp_healthz().multi_user is False
    assert seen[-1]["Authorization"] == "Bearer first"


def test_a_token_with_a_line_break_is_refused_and_in_no_message(kubeconfig, tmp_path: Path) -> None:
    kubeconfig()
    (tmp_path / "token").write_text("planted\nsecret\n", encoding="utf-8")
    with raises(Code.UNAUTHORIZED, "config", "line break", kind=StageError) as refused:
        open_cluster("lathe")
    assert "planted" not in str(refused.value) and "secret" not in str(refused.value)


def test_a_proxy_of_another_kind_is_refused(kubeconfig) -> None:
    kubeconfig(**{"proxy-url": "socks5://127.0.0.1:1080"})
    with raises(Code.UNAUTHORIZED, "socks5://127.0.0.1:1080", kind=StageError):
        open_cluster("lathe")


PLUGIN_ANSWER = '{"apiVersion": "v1", "kind": "ExecCredential", "status": {}}'


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'login first: cloud auth login' >&2; exit 7", "login first: cloud auth login"),
        ("echo no JSON", "failed to decode process output"),
        (f"echo '{PLUGIN_ANSWER}'", "missing token or clientCertificateData"),
        (None, "No such file or directory"),
    ],
)
def test_a_credential_plugin_that_fails_is_said_once_in_its_own_words(
    kubeconfig, tmp_path: Path, capfd: pytest.CaptureFixture[str], script: str | None, words: str
) -> None:
    kubeconfig()
    if script:
        (tmp_path / "plugin").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "plugin").chmod(0o755)
    file = yaml.safe_load((tmp_path / "config").read_text())
    file["users"] = [
        {"name": "u", "user": {"exec": {"apiVersion": "v1", "command": str(tmp_path / "plugin")}}}
    ]
    (tmp_path / "config").write_text(yaml.safe_dump(file))
    handlers = [*logging.getLogger().handlers]
    with raises(
        Code.UNAUTHORIZED, f"the credential plugin {tmp_path}/plugin", kind=StageError
    ) as raised:
        open_cluster("lathe")
    assert str(raised.value).startswith(f"no kube context: the credential plugin {tmp_path}/plugin")
    assert str(raised.value).count(words) == 1
    assert "".join(capfd.readouterr()) == ""
    assert logging.getLogger().handlers == handlers

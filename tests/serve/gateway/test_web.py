"""HTTP features that clients use, and protection against requests forged by web pages."""

import gzip
import json
import logging
import shutil
import subprocess
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import requests

from lathe_base.errors import Code
from lathe_serving.client import Client
from lathe_serving.gateway import app
from lathe_serving.gateway.admission import Limits
from lathe_serving.server import TritonServer
from tests.serve.gateway.test_limits import BODY, LONG, post
from tests.support.connection import HEAD, connected, read_all, request
from tests.support.errors import raises
from tests.support.gateways import opened
from tests.support.server_metrics import expect_cancelled
from tests.support.tls import certificate

JSON = {"Content-Type": "application/json"}
SLOW = BODY | {"max_tokens": 400, "ignore_eos": True, "stream": True}

JAVA = """
import java.net.URI;
import java.net.http.*;

class Ask {
    public static void main(String[] given) throws Exception {
        var request = HttpRequest.newBuilder(URI.create(given[0]))
            .header("Content-Type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(given[1])).build();
        var client = HttpClient.newHttpClient();
        for (int i = 0; i < 2; i++) {
            var reply = client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(reply.statusCode() + " " + reply.version() + " " + reply.body());
        }
    }
}
"""


def sent(address: str, data: bytes, **headers: str) -> requests.Response:
    named = JSON | {name.replace("_", "-"): value for name, value in headers.items()}
    return requests.post(f"{address}/v1/completions", data, headers=named, timeout=30)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("java") is None, reason="no JDK")
def test_javas_client_is_answered(address: str, tmp_path: Path) -> None:
    """Java's client offers an HTTP/2 upgrade: https://openjdk.org/groups/net/httpclient."""
    (tmp_path / "Ask.java").write_text(JAVA)
    command = ["java", "Ask.java", f"{address}/v1/completions", json.dumps(BODY)]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    replies = found.stdout.splitlines()
    assert len(replies) == 2 and all(reply.startswith("200 HTTP_1_1 {") for reply in replies)


def test_a_client_that_offers_http_2_and_leaves_frees_its_rows(
    server: TritonServer, address: str, client: Client
) -> None:
    offer = b"HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    body = LONG | {"prompt": [*"abcdef"], "n": 4}
    with expect_cancelled(server, 6 * 4 * 1000):
        with connected(address) as leaving:
            leaving.sendall(request(body).replace(b"HTTP/1.1\r\n", offer))
            time.sleep(0.1)
        client.generate("b", max_tokens=1)


def test_a_stream_over_http_1_0_is_not_in_chunks(address: str) -> None:
    body = json.dumps(SLOW | {"max_tokens": 3}).encode()
    head = HEAD.replace(b"HTTP/1.1\r\nHost: localhost", b"HTTP/1.0") % len(body)
    with connected(address) as old:
        old.sendall(head + body)
        reply, text = read_all(old).split(b"\r\n\r\n", 1)
    assert reply.split()[1] == b"200" and b"chunked" not in reply.lower()
    assert text.startswith(b"data: {") and text.endswith(b"data: [DONE]\n\n")


def test_a_slash_at_the_end_is_the_same_path(address: str) -> None:
    named = {"Host": "localhost:29000"} | JSON
    url = f"{address}/v1/completions/"
    reply = requests.post(url, json=BODY, headers=named, timeout=30, allow_redirects=False)
    assert reply.status_code == 200
    assert requests.get(f"{address}/v1/models/", timeout=30).json()["data"]


def test_a_wrong_method_names_the_right_one(address: str) -> None:
    reply = requests.put(f"{address}/v1/completions", json=BODY, timeout=30)
    assert reply.status_code == 405 and reply.headers["Allow"] == "POST"


def test_a_compressed_body_is_read_within_the_limit(server: TritonServer) -> None:
    data = json.dumps(BODY).encode()
    with opened(server, Limits(body=10_000)) as address:
        assert sent(address, gzip.compress(data), Content_Encoding="gzip").status_code == 200
        bomb = gzip.compress(data + b" " * 1_000_000)
        assert sent(address, bomb, Content_Encoding="gzip").status_code == 413
        assert sent(address, gzip.compress(data)[:-9], Content_Encoding="gzip").status_code == 400
        assert sent(address, data, Content_Encoding="gzip").status_code == 400
        assert sent(address, zlib.compress(data), Content_Encoding="br").status_code == 415


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_cross_origin_simple_requests_are_rejected(address: str, kind: str) -> None:
    reply = sent(address, json.dumps(BODY).encode(), Content_Type=kind)
    assert reply.status_code == 415 and "application/json" in reply.json()["error"]["message"]


def test_a_name_that_is_not_this_machines_is_not_answered(address: str) -> None:
    for host in ("evil.example:29000", "localhost.evil.example", "10.0.0.1"):
        reply = requests.get(f"{address}/v1/models", headers={"Host": host}, timeout=30)
        assert reply.status_code == 421 and "not a host name of this machine" in reply.text
    for host in ("localhost:29000", "127.0.0.1", "[::1]:9000", "gpt.localhost"):
        reply = requests.get(f"{address}/v1/models", headers={"Host": host}, timeout=30)
        assert reply.status_code == 200


def test_the_page_that_is_allowed_may_name_its_host(server: TritonServer) -> None:
    with opened(server, origins=["https://app.example.com"]) as address:
        reply = requests.get(
            f"{address}/v1/models", headers={"Host": "app.example.com"}, timeout=30
        )
        assert reply.status_code == 200


@pytest.mark.parametrize(
    ("hosts", "host", "status"),
    [
        ([], "lathe.example.com", 421),
        (["Lathe.example.com"], "lathe.example.com", 200),
        (["lathe.example.com"], "lathe.example.com:8443", 200),
        (["lathe.example.com"], "other.example.com", 421),
        (["*"], "other.example.com", 200),
        (["lathe.example.com"], "localhost", 200),
    ],
)
def test_a_proxy_may_keep_its_own_host(
    server: TritonServer, hosts: list[str], host: str, status: int
) -> None:
    with opened(server, hosts=hosts) as address:
        reply = requests.get(f"{address}/v1/models", headers={"Host": host}, timeout=30)
        assert reply.status_code == status
        if status == 421:
            assert "LATHE_ALLOWED_HOSTS" in reply.json()["error"]["message"]


def test_https_is_served_with_a_certificate(server: TritonServer, tmp_path: Path) -> None:
    both, authority = certificate(tmp_path)
    with opened(server, tls=(both, both)) as address:
        assert address.startswith("https://")
        body = SLOW | {"max_tokens": 9, "temperature": 0}
        replies = [
            requests.post(
                f"{address}/v1/completions",
                json=body | {"stream": is_stream},
                verify=str(authority),
                timeout=30,
            )
            for is_stream in (False, True)
        ]
        assert replies[0].json()["choices"][0]["finish_reason"] == "length"
        assert replies[1].text.count("data: {") > 1 and replies[1].text.endswith("[DONE]\n\n")
        with pytest.raises(requests.exceptions.ConnectionError):
            requests.get(address.replace("https", "http"), timeout=30)
    for wrong in ((authority, both), (both, tmp_path / "missing.pem"), (tmp_path, both)):
        refused = raises(Code.MALFORMED, *wrong)
        with refused, opened(server, tls=wrong):
            pass


def test_a_request_keeps_its_name(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lathe"):
        assert post(address, **{"X-Request-Id": "mine-7"}).headers["x-request-id"] == "mine-7"
        while not any("mine-7" in line for line in caplog.messages):
            time.sleep(0.01)  # logged after the response is sent
    assert any(" 200 in " in line for line in caplog.messages if "request mine-7" in line)
    ones = [post(address).headers["x-request-id"] for _ in range(2)]
    assert ones[0] != ones[1]
    odd = post(address, **{"X-Request-Id": "a b\tc"}).headers["x-request-id"]
    assert odd not in ("a b\tc", "mine-7")
    assert post(address, {}).headers["x-request-id"]  # errors have one too


def test_a_stream_that_waits_is_kept_alive(
    address: str, monkeypatch: pytest.MonkeyPatch, openai: Any
) -> None:
    monkeypatch.setattr(app, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(app, "COMMENT_SECONDS", 0.001)
    plain = {name: value for name, value in SLOW.items() if name != "ignore_eos"}
    reply = requests.post(f"{address}/v1/completions", json=SLOW, stream=True, timeout=30)
    assert reply.status_code == 200
    lines = reply.text.splitlines()
    assert ": keep-alive" in lines and lines[-2] == "data: [DONE]"
    pieces = [
        p.choices[0].text
        for p in openai.completions.create(**plain, extra_body={"ignore_eos": True})
    ]  # clients skip the comments
    assert "".join(pieces) == post(address, SLOW | {"stream": False}).json()["choices"][0]["text"]


def test_an_error_that_comes_late_is_in_the_stream(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "FIRST_SECONDS", 0.0)
    too_long = SLOW | {"max_tokens": 10**6}
    assert '"context_length_exceeded"' in post(address, too_long).text
    monkeypatch.undo()
    assert post(address, too_long).status_code == 400

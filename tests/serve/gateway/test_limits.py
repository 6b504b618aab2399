"""Keys, limits, CORS, health and metrics of the gateway."""

import http.client
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from lathe_base.errors import Code
from lathe_serving.gateway import connections
from lathe_serving.gateway.__main__ import main
from lathe_serving.gateway.admission import ApiKeys, Limits
from lathe_serving.gateway.app import Gateway
from lathe_serving.gateway.triton import read_models
from lathe_serving.server import TritonServer
from tests.support.connection import HEAD, connected, request
from tests.support.errors import raises
from tests.support.gateways import opened, running

BODY = {"model": "gpt", "prompt": "hello", "max_tokens": 2, "temperature": 0}
LONG = {"model": "gpt", "prompt": "x", "max_tokens": 1000, "ignore_eos": True}


def post(address: str, body: Any = BODY, **headers: str) -> requests.Response:
    return requests.post(f"{address}/v1/completions", json=body, headers=headers, timeout=30)


def wait_for(address: str, line: str) -> str:
    """Poll the metrics until they contain a line; returns them."""
    deadline = time.monotonic() + 60
    while line not in (page := requests.get(f"{address}/metrics", timeout=30).text):
        assert time.monotonic() < deadline, page
        time.sleep(0.01)
    return page


def tokens(page: str, name: str) -> float:
    (line,) = (line for line in page.splitlines() if line.startswith(f"{name}{{"))
    return float(line.rpartition(" ")[2])


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# of the team\nfirst-key\n\nsecond-key\n")
    return path


def test_generation_requires_a_key(server: TritonServer, keys: Path) -> None:
    with opened(server, keys=keys) as address:
        for header in ("Bearer first-key", "bearer second-key"):
            assert post(address, Authorization=header).status_code == 200
        for wrong in ("", "Bearer", "Bearer first", "Basic first-key", "Bearer # of the team"):
            reply = post(address, Authorization=wrong)
            assert reply.status_code == 401, wrong
            assert reply.json()["error"]["code"] == "invalid_api_key"
        assert requests.get(f"{address}/v1/models", timeout=30).status_code == 401
        assert requests.get(f"{address}/v1/models/gpt", timeout=30).status_code == 401
        for path in ("health", "metrics"):
            assert requests.get(f"{address}/{path}", timeout=30).status_code == 200


def test_keys_are_replaced_without_a_restart(keys: Path) -> None:
    known = ApiKeys(keys)
    keys.with_name("new").write_text("third-key\n")
    os.replace(keys.with_name("new"), keys)
    assert known.find("Bearer third-key") and not known.find("Bearer first-key")
    keys.unlink()
    assert known.find("Bearer third-key")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, Code.NOT_FOUND),
        ("", Code.MALFORMED),
        ("# none\n\n", Code.MALFORMED),
        (b"\xff", Code.MALFORMED),
    ],
)
def test_a_file_without_keys_is_refused(
    tmp_path: Path, content: str | bytes | None, code: Code
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with raises(code, f"LATHE_API_KEYS {path}"):
        ApiKeys(path)


def test_too_many_requests_are_refused_at_once(server: TritonServer) -> None:
    with opened(server, Limits(requests=2)) as address, ThreadPoolExecutor(2) as pool:
        held = [pool.submit(post, address, LONG) for _ in range(2)]
        wait_for(address, "lathe_gateway_requests_in_flight 2.0")
        refused = post(address)
        assert refused.status_code == 503 and refused.headers["Retry-After"] == "1"
        assert refused.json()["error"]["type"] == "server_error"
        assert requests.get(f"{address}/health", timeout=30).status_code == 200
        assert [future.result().status_code for future in held] == [200, 200]
        assert post(address).status_code == 200


def test_a_request_that_would_wait_for_long_is_refused_at_once(server: TritonServer) -> None:
    with opened(server) as address, ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda _: post(address, LONG | {"n": 4}), range(16)))
        statuses = [reply.status_code for reply in replies]
        assert set(statuses) == {200, 503} and statuses.count(200) >= 2
        refused = [reply for reply in replies if reply.status_code == 503]
        assert "gpt is busy: " in refused[0].json()["error"]["message"]
        assert max(r.elapsed for r in refused) < max(r.elapsed for r in replies if r.ok)
        assert all(int(reply.headers["Retry-After"]) >= 1 for reply in refused)
        assert 'lathe_gateway_waiting{model="gpt"} 0.0' in requests.get(f"{address}/metrics").text


@pytest.mark.slow
def test_it_waits_for_as_long_as_is_allowed(server: TritonServer) -> None:
    with opened(server, max_wait=60) as address, ThreadPoolExecutor(16) as pool:
        replies = pool.map(lambda _: post(address, LONG), range(12))
        assert {reply.status_code for reply in replies} == {200}


def test_a_large_body_is_refused(server: TritonServer) -> None:
    with opened(server, Limits(body=1000)) as address:
        assert post(address, BODY | {"user": "x" * 1000}).status_code == 413
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
        parts: Iterator[bytes] = iter([b" " * 600, b" " * 600])
        kind = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", parts, kind, encode_chunked=True)
        assert connection.getresponse().status == 413
        connection.close()
        assert post(address).status_code == 200


def test_bodies_together_are_bounded(server: TritonServer) -> None:
    with opened(server, Limits(bodies=1000)) as address:
        with connected(address) as slow:
            slow.sendall(HEAD % 2000 + b" " * 900)
            while (refused := post(address, BODY | {"user": "x" * 200})).status_code == 200:
                pass  # the slow request has not been read yet
            assert refused.status_code == 503
            assert "too many bytes are being uploaded" in refused.json()["error"]["message"]
        deadline = time.monotonic() + 30
        while post(address, BODY | {"user": "x" * 200}).status_code != 200:
            assert time.monotonic() < deadline


def test_a_body_that_does_not_come_is_given_up(
    server: TritonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.2)
    with opened(server) as address, connected(address) as slow:
        slow.sendall(HEAD % 9 + b"{")
        assert b"408" in slow.recv(100)


def test_web_pages_may_ask_only_where_they_are_named(server: TritonServer, address: str) -> None:
    origin = {"Origin": "https://app.example.com"}
    asks = {**origin, "Access-Control-Request-Method": "POST"}
    url = "/v1/completions"
    assert post(address, **origin).status_code == 403
    assert requests.options(address + url, headers=asks, timeout=30).status_code == 403
    with opened(server, origins=["https://app.example.com"]) as opened_address:
        reply = requests.options(opened_address + url, headers=asks, timeout=30)
        assert reply.status_code == 200
        allowed = post(opened_address, **origin).headers["access-control-allow-origin"]
        assert allowed == "https://app.example.com"
        other = post(opened_address, Origin="https://other.example.com")
        assert other.status_code == 403
        assert "access-control-allow-origin" not in other.headers


def test_health_and_answers_without_a_server(server: TritonServer) -> None:
    models = read_models(Path(server.state.repository))
    with running(Gateway(models, "127.0.0.1:1", "127.0.0.1:1", Limits()), []) as address:
        reply = requests.get(f"{address}/health", timeout=30)
        assert (reply.status_code, reply.json()["status"]) == (503, "not ready: gpt")
        for stream in (False, True):
            refused = post(address, BODY | {"stream": stream})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "unavailable"


def test_metrics_count_requests_and_tokens(server: TritonServer) -> None:
    with opened(server) as address:
        post(address)
        post(address, BODY | {"ignore_eos": True, "stream": True})
        post(address, BODY | {"n": 0})
        with connected(address) as leaver:
            leaver.sendall(request(LONG))
            wait_for(address, "lathe_gateway_requests_in_flight 1.0")
        labels = 'key="",model="{}",path="/v1/completions",status="{}"'
        of_requests = f"lathe_gateway_requests_total{{{{{labels}}}}} {{}}"
        page = wait_for(address, of_requests.format("gpt", 499, 1.0))
        for verb in ("generate", "generate_stream"):
            body = {"text_input": "hello", "max_tokens": 2, "stream": verb == "generate_stream"}
            body |= {"min_tokens": 2, "num_return_sequences": 2, "decode_strategy": "sampling"}
            requests.post(f"{address}/v2/models/gpt/{verb}", json=body, timeout=30)
        after = wait_for(address, 'path="/v2/models/*/generate_stream",status="200"')
    assert of_requests.format("gpt", 200, 2.0) in page
    assert of_requests.format("", 400, 1.0) in page
    assert 'lathe_gateway_prompt_tokens_total{key="",model="gpt"} 10.0' in page
    assert "lathe_gateway_requests_in_flight 0.0" in page
    # Four streams and whole answers have waited for a slot, and one more has left.
    assert 'lathe_gateway_queue_seconds_count{model="gpt"} 5.0' in after
    assert 'lathe_gateway_prompt_tokens_total{key="",model="gpt"} 20.0' in after
    name = "lathe_gateway_completion_tokens_total"
    assert tokens(after, name) - tokens(page, name) == 8
    name = "lathe_gateway_first_token_seconds_count"
    for path in ("/v1/completions", "/v2/models/*/generate_stream"):
        assert f'{name}{{model="gpt",path="{path}"}} 1.0' in after
    assert f'{name}{{model="gpt",path="/v2/models/*/generate"}}' not in after


def test_the_command_line_names_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path}: no models" in capsys.readouterr().err
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.pbtxt").write_text("nonsense {")
    assert main([str(tmp_path)]) == 2
    assert "config.pbtxt" in capsys.readouterr().err
    monkeypatch.setenv("LATHE_API_KEYS", str(tmp_path / "keys"))
    assert main([str(tmp_path)]) == 2
    assert "LATHE_API_KEYS" in capsys.readouterr().err

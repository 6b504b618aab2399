"""The playground's server: what it forwards and what it rejects."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from lathe_base.errors import Code
from lathe_serving.client.playground import playground, serve_exports
from tests.serve.test_server import processes, wait_until_gone
from tests.support import warm
from tests.support.errors import raises

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def page(base_url: str) -> Iterator[str]:
    with playground([base_url]) as address:
        yield address


def test_it_forwards_three_calls_and_no_others(page: str, base_url: str) -> None:
    assert requests.get(f"{page}/endpoints", timeout=60).json() == [base_url]
    models = requests.get(f"{page}/0/models", timeout=60)
    assert models.json() == requests.get(f"{base_url}/models", timeout=60).json()
    body = {"model": "gpt", "prompt": "x", "temperature": 0, "max_tokens": 3}
    ours, theirs = (
        requests.post(f"{url}/completions", json=body, timeout=60).json()["choices"]
        for url in (f"{page}/0", base_url)
    )
    assert ours == theirs
    chat = {"model": "gpt", "messages": [{"role": "user", "content": "x"}]}
    replies = [
        requests.post(f"{url}/chat/completions", json=chat, timeout=60)
        for url in (f"{page}/0", base_url)
    ]
    assert {reply.json()["error"]["code"] for reply in replies} == {"no_chat_template"}
    for path in ("/1/models", "/0/../metrics", "/0/chat/completions", "/0/completions", "/health"):
        assert requests.get(f"{page}{path}", timeout=60).status_code == 404
    for path in (
        "/0/models",
        "/1/completions",
        "/http://127.0.0.1:1/completions",
    ):
        assert requests.post(f"{page}{path}", json=body, timeout=60).status_code == 404


def test_strangers_pages_cannot_ask(page: str) -> None:
    port = page.rpartition(":")[2]
    for host in (f"evil.example:{port}", "evil.example", f"localhost.evil.example:{port}", ""):
        for ask in (requests.get, requests.post):
            reply = ask(f"{page}/0/models", headers={**JSON, "Host": host}, timeout=60)
            assert reply.status_code == 403
    for host in (f"localhost:{port}", "localhost:12345"):  # through a tunnel
        assert requests.get(page, headers={"Host": host}, timeout=60).ok
    plain = requests.post(f"{page}/0/completions", data='{"model": "gpt"}', timeout=60)
    assert plain.status_code == 415
    assert "access-control-allow-origin" not in plain.headers


def test_a_body_of_no_size_is_refused(page: str) -> None:
    for length in ("many", "-1", "9" * 9):
        headers = {**JSON, "Content-Length": length}
        reply = requests.post(f"{page}/0/completions", headers=headers, timeout=60)
        assert reply.status_code == 413
    assert requests.post(f"{page}/0/completions", headers=JSON, timeout=60).status_code == 413


def test_the_page_needs_nothing_from_elsewhere(page: str) -> None:
    reply = requests.get(page, timeout=60)
    assert "http:" not in reply.text and "https:" not in reply.text and "src=" not in reply.text
    assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
    assert "unsafe" not in reply.headers["Content-Security-Policy"]


def test_invalid_ports_and_addresses_are_reported(page: str) -> None:
    for port, code in ((int(page.rpartition(":")[2]), Code.IN_USE), (99999, Code.INVALID_VALUE)):
        with raises(code, f"port {port}"), playground([], port):
            pass
    with raises(Code.INVALID_VALUE, "localhost:9000"), playground(["localhost:9000"]):
        pass


def test_invalid_model_names_are_reported(exported: Path) -> None:
    for exports, code, texts in (
        ({"a b": exported}, Code.INVALID_VALUE, ("model_name", "a b")),
        ({"a": exported, "a-score": exported}, Code.INVALID_VALUE, ("a-score",)),
        ({"a": exported.parent}, Code.WRONG_KIND, (exported.parent, "export.json")),
    ):
        with raises(code, *texts), serve_exports(exports):
            pass


@pytest.mark.slow
def test_the_command_serves_exports_until_it_is_stopped(
    triton: None, exported: Path, tmp_path: Path
) -> None:
    command = [*warm.python(), "-m", "lathe", "playground", f"a={exported}", f"b={exported}"]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(
        [*command, "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment,
        start_new_session=True,
    ) as run:
        assert run.stdout is not None
        address = next(word for word in run.stdout.readline().split() if "http" in word)
        models = requests.get(f"{address}/0/models", timeout=60).json()["data"]
        assert [model["id"] for model in models] == ["a", "b"]
        assert processes(str(tmp_path))
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 128 + signal.SIGTERM
    wait_until_gone(str(tmp_path))
    assert not list(tmp_path.glob("lathe*"))


def test_without_a_server_the_command_says_how_to_start_one(tmp_path: Path) -> None:
    run = subprocess.run(
        [*warm.python(), "-m", "lathe", "playground"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert run.returncode == 2 and "error[not-running]" in run.stderr
    assert "make serve" in run.stderr and not os.listdir(tmp_path)

"""The gateway process of `lathe serve`: started, supervised and stopped together with Triton."""

import json
import os
import re
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import requests

from lathe_base.config.settings import ServingSettings
from lathe_base.errors import Code, StageError
from lathe_serving import state as serve_state
from lathe_serving.environment import find_environment
from lathe_serving.server import start
from lathe_serving.state import HOST, ServerState
from tests.serve.test_server import processes, run_python, wait_until_gone
from tests.support.errors import raises

START_AND_LEAVE = """
import sys
from pathlib import Path
from lathe_serving.server import ANY_PORTS, start
from lathe_base.config.settings import ServingSettings
serving = ServingSettings(**ANY_PORTS)
start(Path(sys.argv[1]), serving, Path(sys.argv[2]), with_gateway=True).detach()
"""


def completion(state: ServerState) -> int:
    body = {"model": "gpt", "prompt": "x", "max_tokens": 3, "temperature": 0}
    reply = requests.post(f"{state.openai}/completions", json=body, timeout=60)
    return reply.status_code


def gateway_pid(state: ServerState) -> int:
    """Pid of a server's gateway, told apart from those of other servers by its port."""
    (pid,) = (
        pid
        for pid, line in processes(f"--port={state.gateway_port} ").items()
        if "-m lathe_serving.gateway " in line and "lathe_serving.guard" not in line
    )
    return pid


@pytest.mark.slow
def test_it_is_started_again_when_it_crashes_and_ends_with_the_server(
    triton: None, repository: Path, tmp_path: Path
) -> None:
    state = detached(repository, tmp_path)
    assert completion(state) == 200
    first = gateway_pid(state)
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 120
    while True:
        try:
            assert completion(state) == 200
            break
        except requests.ConnectionError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert gateway_pid(state) != first
    assert serve_state.stop(tmp_path) == state
    wait_until_gone(state.shared_memory)
    wait_until_gone(f"--port={state.gateway_port}")


def detached(repository: Path, folder: Path) -> ServerState:
    assert run_python(START_AND_LEAVE, repository, folder).wait(120) == 0
    state = serve_state.find(folder)
    assert state is not None
    return state


def until_health(state: ServerState, status: int, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    url = f"{state.openai}".removesuffix("v1") + "health"
    while requests.get(url, timeout=30).status_code != status:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def reload(state: ServerState) -> None:
    """Reload the model through Triton's own HTTP API, with the key from its command line."""
    command = Path(f"/proc/{state.server.pid}/cmdline").read_text(encoding="utf-8")
    _, key = re.findall(r"triton-admin=(\w+)", command)
    url = f"http://{HOST}:{state.triton_port}/v2/repository/models/gpt/load"
    requests.post(url, json={}, headers={"triton-admin": key}, timeout=60).raise_for_status()


def metric(state: ServerState, name: str) -> float:
    page = requests.get(f"{state.openai}".removesuffix("v1") + "metrics", timeout=30).text
    (line,) = (line for line in page.splitlines() if line.startswith(f"{name} "))
    return float(line.split()[1])


@pytest.mark.slow
def test_a_server_that_crashes_is_started_again_behind_its_gateway(
    triton: None, lasting: Path, tmp_path: Path
) -> None:
    state = detached(lasting, tmp_path)
    gateway, began = gateway_pid(state), metric(state, "lathe_gateway_triton_started_seconds")
    body = {"model": "gpt", "prompt": "x", "max_tokens": 16000, "ignore_eos": True}
    url = f"{state.openai}/completions"
    with ThreadPoolExecutor(2) as pool:
        streamed = [
            requests.post(url, json=body | {"stream": True}, stream=True, timeout=60)
            for _ in range(2)
        ]  # both have started
        whole = [pool.submit(requests.post, url, json=body, timeout=60) for _ in range(2)]
        time.sleep(0.2)
        os.kill(state.server.pid, signal.SIGKILL)
        for reply in (future.result() for future in whole):
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
            assert reply.headers["Retry-After"] == "1"
    for reply in streamed:
        *_, last, done, end = reply.content.split(b"\n\n")
        assert reply.status_code == 200
        assert (
            done == b"data: [DONE]"
            and end == b""
            and json.loads(last.removeprefix(b"data: "))["error"]["code"]
        )
    until_health(state, 503)
    until_health(state, 200)
    assert completion(state) == 200 and gateway_pid(state) == gateway
    again = serve_state.find(tmp_path)
    assert again is not None and again.server != state.server and again.guard == state.guard
    assert metric(state, "lathe_gateway_triton_restarts") == again.restarts == 1
    assert metric(state, "lathe_gateway_triton_started_seconds") > began
    os.kill(again.server.pid, signal.SIGKILL)
    assert serve_state.stop(tmp_path) is not None  # while it is restarting
    wait_until_gone(state.shared_memory)
    wait_until_gone(f"--port={state.gateway_port}")
    assert not list(Path("/dev/shm").glob(f"{state.shared_memory}*"))


@pytest.mark.slow
def test_a_server_whose_backend_dies_is_started_again(
    triton: None, repository: Path, tmp_path: Path
) -> None:
    """Triton itself would stay up, report that it is ready, and answer nothing."""
    state = detached(repository, tmp_path)
    (stub,) = (
        pid
        for pid, line in processes(state.shared_memory).items()
        if "backend_stub" in line.split()[0] and "/gpt/1/" in line
    )
    os.kill(stub, signal.SIGKILL)
    until_health(state, 503)
    until_health(state, 200)
    assert completion(state) == 200
    again = serve_state.find(tmp_path)
    assert again is not None and again.restarts == 1
    assert "a Python backend has died" in (tmp_path / "triton.log").read_text(errors="replace")
    assert serve_state.stop(tmp_path) is not None


ENDLESS = {"max_tokens": 16000, "min_tokens": 16000}
KILLERS: dict[str, dict[str, object]] = {
    "/v1/completions": {"model": "gpt", "prompt": "x", "ignore_eos": True, **ENDLESS},
    "/v2/models/gpt/generate": {"text_input": "x", **ENDLESS},
    "/v2/models/gpt/generate_stream": {"text_input": "x", "stream": True, **ENDLESS},
}


def post_killer(state: ServerState, path: str) -> requests.Response:
    """Send a request that crashes the server; returns a stream's response when it has begun."""
    body = KILLERS[path]
    url = f"http://{state.http}{path}"
    return requests.post(url, json=body, stream="stream" in body, timeout=60)


def crash_with(folder: Path, *paths: str) -> list[requests.Response]:
    """Crash the server by requests to these paths; returns the responses after its restart."""
    state = serve_state.find(folder)
    assert state is not None
    with ThreadPoolExecutor(len(paths)) as pool:
        asked = [pool.submit(post_killer, state, path) for path in paths]
        for future, path in zip(asked, paths, strict=True):
            if "stream" in KILLERS[path]:
                future.result()  # its answer has begun
        deadline = time.monotonic() + 30
        while metric(state, "lathe_gateway_requests_in_flight") < len(paths):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.3)
        os.kill(state.server.pid, signal.SIGKILL)
        replies = [future.result() for future in asked]
    until_health(state, 503)
    until_health(state, 200)
    return replies


@pytest.mark.slow
def test_a_request_of_which_the_server_dies_twice_is_refused(
    triton: None, lasting: Path, tmp_path: Path
) -> None:
    state = detached(lasting, tmp_path)
    completions, _, stream = KILLERS
    replies = crash_with(tmp_path, *KILLERS)
    assert [reply.status_code for reply in replies] == [503, 503, 200]
    assert "does not answer" in replies[2].text.splitlines()[-2]  # last event of the stream
    assert crash_with(tmp_path, completions)[0].status_code == 503
    assert crash_with(tmp_path, stream)[0].status_code == 200
    for path in (completions, stream):
        refused = requests.post(f"http://{state.http}{path}", json=KILLERS[path], timeout=60)
        assert refused.status_code == 400 and "crashed twice" in refused.text
    other = KILLERS[completions] | {"max_tokens": 3, "min_tokens": 0}
    answer = requests.post(f"{state.openai}/completions", json=other, timeout=60)
    assert answer.status_code == 200
    assert serve_state.stop(tmp_path) is not None


@pytest.mark.slow
def test_one_that_cannot_live_is_tried_until_it_can(
    triton: None, repository: Path, tmp_path: Path
) -> None:
    shutil.copytree(repository, tmp_path / "repository")
    state = detached(tmp_path / "repository", tmp_path / "state")
    config = tmp_path / "repository" / "gpt" / "config.pbtxt"
    right, log = config.read_text(), tmp_path / "state" / "triton.log"
    config.write_text("nonsense {")
    os.kill(state.server.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while "restarting in 3 s" not in log.read_text():  # the third time
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    assert [f"in {wait} s" in log.read_text() for wait in (0, 1, 3)] == [True] * 3
    config.write_text(right)
    until_health(state, 200)
    assert completion(state) == 200
    assert serve_state.stop(tmp_path / "state") is not None


@pytest.mark.slow
def test_a_stopped_server_stays_stopped(triton: None, repository: Path, tmp_path: Path) -> None:
    state = detached(repository, tmp_path)
    os.kill(state.server.pid, signal.SIGTERM)
    wait_until_gone(state.shared_memory)
    wait_until_gone(f"--port={state.gateway_port}")


@pytest.mark.slow
def test_both_end_with_an_owner_that_has_not_left(
    triton: None, repository: Path, serving: ServingSettings, tmp_path: Path
) -> None:
    server = start(repository, serving, tmp_path, with_gateway=True)
    os.kill(server.state.server.pid, signal.SIGKILL)
    wait_until_gone(server.state.shared_memory)
    wait_until_gone(f"--port={server.state.gateway_port}")


@pytest.mark.slow
def test_a_model_that_is_loaded_again_answers_or_says_why_not(
    triton: None, repository: Path, serving: ServingSettings, tmp_path: Path
) -> None:
    options = ("--model-control-mode=explicit", "--load-model=*")
    body = {"model": "gpt", "prompt": "x", "max_tokens": 1000, "ignore_eos": True}
    with (
        start(repository, serving, tmp_path, options=options, with_gateway=True) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        url = f"{server.state.openai}/completions"
        asked = [pool.submit(requests.post, url, json=body, timeout=60) for _ in range(4)]
        time.sleep(0.2)
        (repository / "gpt" / "config.pbtxt").touch()  # otherwise reloading does nothing
        reload(server.state)
        for reply in (future.result() for future in asked):
            if reply.status_code != 200:
                assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
        assert completion(server.state) == 200


@pytest.mark.slow
def test_unreadable_keys_are_reported_and_nothing_stays(
    triton: None,
    repository: Path,
    serving: ServingSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LATHE_API_KEYS", str(tmp_path / "keys"))
    with raises(
        Code.FAILED, "error[not-found]: LATHE_API_KEYS", tmp_path / "keys", kind=StageError
    ):
        start(repository, serving, tmp_path, with_gateway=True)
    wait_until_gone(str(tmp_path))


def test_an_environment_without_its_packages_is_named(
    triton: None,
    repository: Path,
    serving: ServingSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = replace(find_environment(), missing=("uvicorn",))
    monkeypatch.setattr("lathe_serving.server.find_environment", lambda: environment)
    with raises(Code.NOT_INSTALLED, "uvicorn", "make serve-env"):
        start(repository, serving, tmp_path, with_gateway=True)
    assert list(tmp_path.iterdir()) == []

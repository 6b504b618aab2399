"""The gateway that `lathe serve` runs beside Triton: started, kept, and ended with it."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import requests

from lathe.config.settings import ServingSettings
from lathe.errors import StageError, UserError
from lathe.serve import state as serve_state
from lathe.serve.environment import find_environment
from lathe.serve.server import start
from lathe.serve.state import ServerState
from tests.serve.test_server import processes, run_python, wait_until_gone

START_AND_LEAVE = """
import sys
from pathlib import Path
from lathe.serve.server import ANY_PORTS, start
from lathe.config.settings import ServingSettings
serving = ServingSettings(**ANY_PORTS)
start(Path(sys.argv[1]), serving, Path(sys.argv[2]), with_gateway=True).detach()
"""


def completion(state: ServerState) -> int:
    body = {"model": "gpt", "prompt": "x", "max_tokens": 3, "temperature": 0}
    reply = requests.post(f"{state.openai}/completions", json=body, timeout=60)
    return reply.status_code


def gateway_of(state: ServerState) -> int:
    (pid,) = (
        pid
        for pid, line in processes("-m lathe.gateway ").items()
        if state.repository in line and "lathe.serve.guard" not in line
    )
    return pid


def test_it_is_started_again_when_it_crashes_and_ends_with_the_server(
    triton: None, repository: Path, tmp_path: Path
) -> None:
    assert run_python(START_AND_LEAVE, repository, tmp_path).wait(120) == 0
    state = serve_state.find(tmp_path)
    assert state is not None and completion(state) == 200
    first = gateway_of(state)
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 120
    while True:
        try:
            assert completion(state) == 200
            break
        except requests.ConnectionError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert gateway_of(state) != first
    assert serve_state.stop(tmp_path) == state
    wait_until_gone(state.shared_memory)
    wait_until_gone(f"--port={state.gateway_port}")


def test_it_ends_with_a_server_that_is_killed(
    triton: None, repository: Path, serving: ServingSettings, tmp_path: Path
) -> None:
    server = start(repository, serving, tmp_path, with_gateway=True)
    os.kill(server.state.server.pid, signal.SIGKILL)
    wait_until_gone(server.state.shared_memory)
    wait_until_gone(f"--port={server.state.gateway_port}")


def test_keys_that_cannot_be_read_are_told_and_nothing_stays(
    triton: None,
    repository: Path,
    serving: ServingSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LATHE_API_KEYS", str(tmp_path / "keys"))
    with pytest.raises(StageError, match=r"LATHE_API_KEYS .*keys: .*No such file"):
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
    monkeypatch.setattr("lathe.serve.server.find_environment", lambda: environment)
    with pytest.raises(UserError, match=r"uvicorn not installed\n.*make serve-env"):
        start(repository, serving, tmp_path, with_gateway=True)
    assert list(tmp_path.iterdir()) == []

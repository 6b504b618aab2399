"""Starting and stopping a real Triton server, its state file, and cleanup."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from lathe_base.config.settings import GenerationSettings, ServingSettings
from lathe_base.errors import Code, StageError, UserError
from lathe_serving import client as client_functions
from lathe_serving import state as serve_state
from lathe_serving.client import Client
from lathe_serving.environment import PYTHON_VARIABLE, find_environment
from lathe_serving.repository import write_repository
from lathe_serving.server import ANY_PORTS, TRITON_PORTS, free_ports, start
from lathe_serving.state import STATE_VARIABLE
from tests.support import warm
from tests.support.errors import raises
from tests.support.processes import processes

LASTING = {"max_tokens": 16000, "min_tokens": 16000}


def wait_until_gone(word: str, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while processes(word) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes(word) == {}


def run_python(code: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    command = [*warm.python(), "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, text=True, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.slow
def test_killed_and_started_again_and_stopped(
    triton: None, repository: Path, serving: ServingSettings, tmp_path: Path
) -> None:
    folder = tmp_path / "state"
    first = start(repository, serving, folder)
    with raises(Code.IN_USE, folder, first.state.http):
        start(repository, serving, folder)
    os.kill(first.state.server.pid, signal.SIGKILL)
    wait_until_gone(first.state.shared_memory)
    assert serve_state.find(folder) is None
    with Client(first.state.grpc, "gpt") as client, raises(Code.UNREACHABLE, first.state.grpc):
        client.generate("x")

    with start(repository, serving, folder) as second:
        assert serve_state.find(folder) == second.state
        assert len(processes(second.state.shared_memory)) == 4
        with Client(second.state.grpc, "gpt") as client:
            assert client.generate("x", max_tokens=3, min_tokens=3).finish_reason == "length"
    assert serve_state.find(folder) is None
    assert processes(str(folder)) == processes(second.state.shared_memory) == {}
    assert not list(Path("/dev/shm").glob(f"{second.state.shared_memory}*"))
    freed = {port: getattr(second.state, port) for port in TRITON_PORTS}
    assert free_ports(ServingSettings(**freed)) == freed
    assert serve_state.stop(folder) is None


@pytest.mark.slow
def test_no_backend_crashes_when_its_server_ends(
    triton: None, repository: Path, serving: ServingSettings, tmp_path: Path
) -> None:
    """With idle and active backends; crashes show only in the kernel's log."""

    def kernel_log() -> str:
        asked = subprocess.run(["dmesg"], capture_output=True, text=True, check=False)
        if asked.returncode:
            pytest.skip("the kernel's log cannot be read")
        return asked.stdout

    kernel_log()
    with (
        start(repository, serving, tmp_path) as server,
        Client(server.state.grpc, "gpt") as client,
    ):
        client.generate("x", max_tokens=3, num_return_sequences=2)
        client.generate("x", max_tokens=3, decode_strategy="beam_search")
        assert list(client.stream("x", max_tokens=3))
        client.score_text("x", "y")
        left = client.stream("x", max_tokens=1000, min_tokens=1000)
        next(left)
        left.close()
        unread = client.stream("x", max_tokens=1000, min_tokens=1000)
        next(unread)
        stubs = [p for p, line in processes(server.state.shared_memory).items() if "_stub" in line]
        server.stop()
        with suppress(UserError):
            list(unread)
    time.sleep(0.5)
    assert len(stubs) >= 2
    assert [pid for pid in stubs if f"[{pid}]: segfault" in kernel_log()] == []


@pytest.mark.slow
def test_killed_under_load(
    triton: None, lasting: Path, serving: ServingSettings, tmp_path: Path
) -> None:
    """Every client gets an error, and the next server works."""
    first = start(lasting, serving, tmp_path)
    with (
        Client(first.state.grpc, "gpt", timeout_seconds=20) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        streams = [client.stream(f"{i}", **LASTING) for i in range(4)]
        for stream in streams:
            next(stream)
        waiting = [pool.submit(client.generate, f"{i}", **LASTING) for i in range(4)]
        os.kill(first.state.server.pid, signal.SIGKILL)
        for stream in streams:
            with raises(Code.UNREACHABLE, first.state.grpc):
                list(stream)
        for future in waiting:
            with raises(Code.UNREACHABLE, first.state.grpc):
                future.result()
    wait_until_gone(first.state.shared_memory)
    with start(lasting, serving, tmp_path) as second, Client(second.state.grpc, "gpt") as client:
        assert len(client.generate("x", max_tokens=3, min_tokens=3).tokens) == 3


START_AND_LEAVE = """
import sys
from pathlib import Path
from lathe_serving.server import start
from lathe_base.config.settings import ServingSettings
serving = ServingSettings(http_port=0, grpc_port=0, metrics_port=0)
start(Path(sys.argv[1]), serving, Path(sys.argv[2])).detach()
"""


@pytest.mark.slow
def test_a_detached_server_outlives_its_parent(
    triton: None, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    with raises(Code.NOT_RUNNING, tmp_path):
        client_functions.generate("x")
    assert run_python(START_AND_LEAVE, repository, tmp_path).wait(120) == 0
    text = client_functions.generate("x", max_tokens=4, seed=1)
    assert "".join(client_functions.stream("x", max_tokens=4, seed=1)) == text
    stopped = serve_state.stop()
    assert stopped is not None
    wait_until_gone(stopped.shared_memory)


def test_no_orphan_when_the_parent_dies_while_it_starts(
    triton: None, repository: Path, tmp_path: Path
) -> None:
    parent = run_python(START_AND_LEAVE, repository, tmp_path)
    try:
        while not (found := processes(f"--backend-directory={tmp_path}")):
            assert parent.poll() is None
            time.sleep(0.01)
        parent.kill()
        parent.wait()
        wait_until_gone(f"--backend-directory={tmp_path}")
    finally:
        serve_state.stop(tmp_path)
    assert not (tmp_path / "server.json").exists()
    (region,) = {re.search("lathe_[0-9a-f]{12}", line)[0] for line in found.values()}  # type: ignore[index]
    assert not list(Path("/dev/shm").glob(f"{region}*"))


@pytest.mark.parametrize("key", ANY_PORTS)
def test_a_port_in_use_is_named_before_anything_starts(
    triton: None, repository: Path, tmp_path: Path, key: str
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ports = ANY_PORTS | {key: port}
        with raises(Code.IN_USE, f"Serving.{key} {port}", "make stop"):
            start(repository, ServingSettings(**ports), tmp_path / "state", with_gateway=True)
    assert not (tmp_path / "state").exists()


@pytest.mark.slow
def test_a_model_that_does_not_load_shows_the_log(
    triton: None, exported: Path, serving: ServingSettings, tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    write_repository(exported, repository, serving, GenerationSettings())
    (repository / "gpt" / "1" / "model.onnx").write_bytes(b"not a graph")
    with raises(Code.FAILED, "model.onnx: onnxruntime", "triton.log", kind=StageError):
        start(repository, serving, tmp_path / "state")
    wait_until_gone(str(tmp_path))
    assert not (tmp_path / "state" / "server.json").exists()


def test_a_missing_environment_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "python"))
    with raises(Code.NOT_INSTALLED, tmp_path / "python"):
        find_environment()
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    with raises(Code.NOT_INSTALLED, sys.executable, "nvidia-pytriton"):
        find_environment()


def test_triton_may_be_installed_in_the_environment_that_runs(
    triton: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = find_environment().python
    monkeypatch.setattr("lathe_serving.environment.ROOT", tmp_path)
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    with raises(Code.NOT_INSTALLED, "pip install 'lathe[serve]'"):
        find_environment()
    monkeypatch.setattr(sys, "executable", str(python))
    assert find_environment().python == python

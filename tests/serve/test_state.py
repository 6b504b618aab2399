"""Whatever `server.json` contains, only a server's own processes, files and memory are touched."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lathe_base.config.settings import ServingSettings
from lathe_base.errors import Code
from lathe_serving import state as serve_state
from lathe_serving.environment import unlink_backends
from lathe_serving.server import start
from lathe_serving.state import STATE_VARIABLE, Process, send
from lathe_serving.stubs import clear_shared_memory
from tests.support.errors import raises

NAME = "lathe_0123456789ab"
PORTS = {"http_port": 8000, "grpc_port": 8001, "metrics_port": 8002}


@pytest.fixture
def innocent() -> Iterator[subprocess.Popen[bytes]]:
    """A foreign process with a server's command line that leads its process group."""
    guard = ["-m", "lathe_serving.guard", "3", NAME, "/x/tritonserver", "--model-repository=/r"]
    said = ["/x/tritonserver", *guard, f"--backend-config=python,shm-region-prefix-name={NAME}"]
    code = "import time; print(flush=True); time.sleep(600)"
    process = subprocess.Popen(
        [said[0], "-c", code, *said[1:]], executable=sys.executable, stdout=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline()
    yield process
    assert process.poll() is None, "the foreign process was killed"
    process.kill()
    process.wait()


def values(pid: int, **changed: Any) -> dict[str, Any]:
    """State whose server and guard have the pid of the process, but an earlier start time."""
    process = Process.of(pid).model_dump()
    process["started"] -= 1
    names = {"model_name": "gpt", "repository": "/r", "shared_memory": NAME}
    return {"server": process, "guard": process, **names, **PORTS, **changed}


def write(folder: Path, value: Any) -> Path:
    path = folder / "server.json"
    path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    return path


def test_a_process_with_the_number_of_a_server_that_has_ended_lives(
    innocent: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    path = write(tmp_path, values(innocent.pid))
    assert serve_state.find(tmp_path) is None
    assert serve_state.stop(tmp_path) is None
    assert not path.exists()


def test_a_process_of_an_earlier_boot_is_another(
    innocent: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    process = Process.of(innocent.pid).model_dump() | {"boot": "another"}
    write(tmp_path, values(innocent.pid, server=process, guard=process))
    assert serve_state.stop(tmp_path) is None


def test_a_process_with_another_command_line_is_another(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as sleeping:
        process = Process.of(sleeping.pid).model_dump()
        write(tmp_path, values(sleeping.pid, server=process, guard=process))
        assert serve_state.stop(tmp_path) is None
        assert sleeping.poll() is None
        sleeping.kill()


def test_a_fully_matching_process_is_terminated(tmp_path: Path) -> None:
    command = ["/x/tritonserver", "600", "--model-repository=/r"]
    command.append(f"--backend-config=python,shm-region-prefix-name={NAME}")
    code = "import time; print(flush=True); time.sleep(600)"
    with subprocess.Popen(
        [command[0], "-c", code, *command[1:]], executable=sys.executable, stdout=subprocess.PIPE,
        start_new_session=True,
    ) as server:  # fmt: skip
        assert server.stdout is not None and server.stdout.readline()
        process = Process.of(server.pid).model_dump()
        write(tmp_path, values(server.pid, server=process, guard=process))
        stopped = serve_state.stop(tmp_path)
        if stopped is None:
            server.kill()
        assert stopped is not None
        assert server.wait(60) == -signal.SIGTERM


def broken() -> Iterator[tuple[str, Any]]:
    pid = os.getpid()
    good = values(pid)
    yield from {
        "empty": b"", "no JSON": b"{", "not UTF-8": b"\xff\xfe", "null": None, "a list": [good],
        "a number": 3, "a string": "server", "deep": b"[" * 100_000, "nothing in it": {},
        "the user's": {"name": "my server", "port": 80},
        "of an earlier version": {"pid": pid, "group": pid, "shared_memory": NAME, **PORTS},
        "one more": good | {"more": 1},
    }.items()  # fmt: skip
    for wrong in (-1, 0, 1, True, 2.5, "17", None, [17], 10**30):
        yield f"pid {wrong}", good | {"server": good["server"] | {"pid": wrong}}
        yield f"guard {wrong}", good | {"guard": good["guard"] | {"pid": wrong}}
    for name in ("", "l", "lathe_", "lathe_*", "../x", "lathe_0123456789ab*", NAME + "\n", None):
        yield f"shared memory {name!r}", good | {"shared_memory": name}
    for port in (-1, 0, 65536, "8000"):
        yield f"port {port}", good | {"http_port": port}


@pytest.mark.parametrize("value", [pytest.param(v, id=name) for name, v in broken()])
def test_invalid_state_is_reported_in_one_line_and_kept(tmp_path: Path, value: Any) -> None:
    path = write(tmp_path, value)
    before = path.read_bytes()
    for function in (serve_state.stop, serve_state.find):
        with raises(Code.MALFORMED, path) as caught:
            function(tmp_path)
        assert len(caught.value.what.splitlines()) == 1
    assert path.read_bytes() == before


def test_our_own_process_and_one_that_is_absent_are_safe(tmp_path: Path) -> None:
    own = Process.of(os.getpid()).model_dump()
    write(tmp_path, values(os.getpid(), server=own, guard=own))
    assert serve_state.stop(tmp_path) is None
    write(tmp_path, values(os.getpid(), server=own | {"pid": 2**22}, guard=own))
    assert serve_state.stop(tmp_path) is None


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "fifo"])
def test_a_state_file_that_is_a_folder_is_reported(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "server.json")
    with raises(Code.WRONG_KIND, tmp_path / "server.json"):
        serve_state.stop(tmp_path)


def test_the_command_says_what_is_wrong_and_has_no_traceback(tmp_path: Path) -> None:
    def lathe_stop() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "lathe", "stop"]
        variables = os.environ | {STATE_VARIABLE: str(tmp_path)}
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)

    path = write(tmp_path, [])
    run = lathe_stop()
    assert (run.returncode, run.stdout) == (2, "")
    assert re.fullmatch(rf"error\[malformed\]: {path}: .*\n  hint: .*\n", run.stderr)
    path.unlink()
    run = lathe_stop()
    assert (run.returncode, run.stdout, run.stderr) == (0, "no server is running\n", "")


def test_a_server_does_not_start_over_somebodys_file(
    triton: None, repository: Path, serving: ServingSettings, tmp_path: Path
) -> None:
    path = write(tmp_path, {"the user's": "own"})
    with raises(Code.MALFORMED, path):
        start(repository, serving, tmp_path)
    assert json.loads(path.read_text()) == {"the user's": "own"}


@pytest.mark.parametrize("prefix", ["", "lathe_", "*", "sem.", "lathe_0123456789ab*"])
def test_shared_memory_is_removed_by_a_servers_whole_name_alone(prefix: str) -> None:
    with pytest.raises(ValueError, match="is not a server's"):
        clear_shared_memory(prefix)


def test_only_our_links_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "backends"
    (folder / "python").mkdir(parents=True)
    (folder / "python" / "model.py").symlink_to("/site/tritonserver/backends/python/model.py")
    (folder / "python" / "__pycache__").mkdir()
    (folder / "python" / "__pycache__" / "model.cpython-311.pyc").touch()
    own = [folder / "notes.txt", folder / "python" / "mine.py"]
    for path in own:
        path.write_text("the user's own")
    (folder / "python" / "link").symlink_to(own[0])
    unlink_backends(folder)
    assert not (folder / "python" / "model.py").is_symlink()
    assert all(path.is_file() for path in (*own, folder / "python" / "link"))
    for path in (*own, folder / "python" / "link"):
        path.unlink()
    unlink_backends(folder)
    assert not folder.exists()


def test_a_held_process_keeps_its_place() -> None:
    code = "import time; print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as sleeping:
        assert sleeping.stdout is not None and sleeping.stdout.readline()
        with Process.of(sleeping.pid).pidfd(lambda command: code in command) as held:
            sleeping.kill()
            sleeping.wait()
            assert held is not None
            send(held, signal.SIGKILL)  # must have no effect

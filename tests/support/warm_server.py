"""Fork server for the commands of `tests.support.warm`; it exits with the test run."""

import array
import atexit
import fcntl
import gc
import importlib.util
import io
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import warm

LEASES: list[socket.socket] = []
"""Open connections of this process, which keep the servers running."""
KEEPERS: list[subprocess.Popen[bytes]] = []


@cache
def address(python: str) -> Path:
    """Socket of the test run's fork server for an interpreter, which the first caller starts."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    environment = Path(python).parents[1].name.strip(".")
    folder = Path(tempfile.gettempdir(), f"lathe-warm-{run}-{environment}")
    folder.mkdir(exist_ok=True)
    path = folder / "socket"
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            command = [python, "-m", "tests.support.warm_server", str(path)]
            root = Path(__file__).parents[2]
            with subprocess.Popen(
                command, cwd=root, stdout=subprocess.PIPE, start_new_session=True
            ) as server:
                assert server.stdout and server.stdout.readline(), "the fork server did not start"
                server.returncode = 0  # it may outlive this process: no warning
    lease = socket.socket(socket.AF_UNIX)
    lease.connect(str(path))
    lease.sendall(bytes(8))
    LEASES.append(lease)
    return path


def prepare() -> None:
    """Begin to start the server for this interpreter; another process keeps it running for as long
    as this one and its forks run."""
    command = [sys.executable, "-m", "tests.support.warm_server"]
    root = Path(__file__).parents[2]
    keeper = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, start_new_session=True)
    keeper.returncode = 0  # it outlives this process by a moment: no warning
    KEEPERS.append(keeper)


class Request(NamedTuple):
    """A command, with the file descriptors of its standard streams."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    streams: list[int]


def serve(listening: socket.socket) -> Request | None:
    """Fork for every request: returns the request in each fork, None once all clients have gone."""
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    forks: dict[socket.socket, tuple[int, int]] = {}  # connection: pid and pidfd
    began = False
    while not began or len(selector.get_map()) > 1:
        for key, _ in selector.select():
            if key.fileobj is listening:
                began, connection = True, listening.accept()[0]
                if request := _read(connection):
                    if (pid := os.fork()) == 0:
                        listening.close()
                        return request
                    for stream in request.streams:
                        os.close(stream)
                    connection.sendall(f"{pid}\n".encode())
                    forks[connection] = pid, os.pidfd_open(pid)
                    selector.register(forks[connection][1], selectors.EVENT_READ, connection)
                selector.register(connection, selectors.EVENT_READ)
            elif selector.get_map().get(key.fd) is not key:
                continue  # a fork and its client have ended at once
            elif isinstance(key.fileobj, int):  # a fork has ended
                _end(selector, forks, key.data)
            elif isinstance(key.fileobj, socket.socket) and not key.fileobj.recv(1):
                if key.fileobj in forks:  # its client was killed
                    signal.pidfd_send_signal(forks[key.fileobj][1], signal.SIGKILL)
                    _end(selector, forks, key.fileobj)
                else:
                    selector.unregister(key.fileobj)
    return None


def _read(connection: socket.socket) -> Request | None:
    """Read a request; None for a lease."""
    space = socket.CMSG_SPACE(3 * array.array("i").itemsize)
    head, ancillary, *_ = connection.recvmsg(8, space)
    if not (size := int.from_bytes(head, "big")):
        return None
    streams = array.array("i")
    streams.frombytes(ancillary[0][2])
    with connection.makefile("rb") as file:
        sent = json.loads(file.read(size))
    return Request(sent["arguments"], sent["folder"], sent["environment"], list(streams))


def _end(selector: selectors.BaseSelector, forks: dict[Any, tuple[int, int]], client: Any) -> None:
    pid, descriptor = forks.pop(client)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    selector.unregister(descriptor)
    os.close(descriptor)
    selector.unregister(client)
    with suppress(OSError):  # the client was killed
        client.sendall(f"{status}\n".encode())
    client.close()


def become(request: Request, interpreter: Path) -> None:
    """Run the command in this process, a fork.

    Args:
        interpreter: replaces `sys.executable` if child processes are to be forks too.
    """
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    is_unbuffered = "-u" in request.arguments[:1] or "PYTHONUNBUFFERED" in request.environment
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = os.fdopen(number, "wb", 0 if is_unbuffered else -1, closefd=False)
        text = io.TextIOWrapper(
            *(raw, "utf-8", "backslashreplace" if number == 2 else "strict"),
            line_buffering=number == 2,
            write_through=is_unbuffered,
        )
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    tempfile.tempdir = None  # TMPDIR may differ
    if kube_config := sys.modules.get("kubernetes.config.kube_config"):
        home = os.environ.get("KUBECONFIG", "~/.kube/config")
        kube_config.KUBE_CONFIG_DEFAULT_LOCATION = home  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if warm.CHILDREN in os.environ:
        sys.executable = str(interpreter)
    how, *arguments = [a for a in request.arguments if a != "-u"]
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(":"))
    is_safe = "PYTHONSAFEPATH" in request.environment
    if how == "-m":
        sys.path[0] = sys.path[0] if is_safe else request.folder
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.path[0], sys.argv = "", ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0] = sys.path[0] if is_safe else str(Path(how).parent)
        sys.argv = [how, *arguments]
        runpy.run_path(how, run_name="__main__")


def main(path: str) -> None:
    """Import the modules, listen at `path` and fork for every request."""
    names: tuple[str, ...] = warm.TORCH
    if importlib.util.find_spec("paddle"):
        from lathe_paddle.environment import prepare

        prepare()
        names = warm.PADDLE
    for name in names:
        importlib.import_module(name)
    # Stands in for the interpreter. `python -IS ...` only prepares a process and then calls exec:
    # it runs the real one.
    client = f'"{sys.executable}" -SE "{warm.__file__}" "{path}"'
    script = Path(path).with_name("python3")
    script.write_text(
        f'#!/bin/sh\ncase "$1" in -IS) exec "{sys.executable}" "$@";; esac\nexec {client} "$@"\n'
    )
    script.chmod(0o755)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(64)
    gc.freeze()  # pages that the collector does not touch stay shared
    print("ready", flush=True)
    if (request := serve(listening)) is None:
        shutil.rmtree(Path(path).parent, ignore_errors=True)
        return
    try:
        become(request, script)
        code: object = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    if not isinstance(code, int):
        print(code, file=sys.stderr) if code is not None else None
        code = int(code is not None)
    # Shut down as the interpreter does, without tearing down the imported modules.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1])
    else:
        address(sys.executable)
        sys.stdin.read()

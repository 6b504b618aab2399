"""Starts a tritonserver on loopback and waits until its model is ready."""

import logging
import re
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from http.client import HTTPException
from pathlib import Path
from typing import Any

from lathe_base.config.settings import ServingSettings
from lathe_base.errors import Code, StageError, UserError
from lathe_base.ports import free_port
from lathe_base.progress import bar
from lathe_serving import state as serve_state
from lathe_serving.environment import (
    ServeEnvironment,
    find_environment,
    restrictions,
    with_vllm,
)
from lathe_serving.repository import served_runtimes
from lathe_serving.state import (
    BACKENDS,
    HOST,
    LOG_FILE,
    LOOPBACK,
    STATE_FILE,
    Process,
    ServerState,
)

log = logging.getLogger("lathe")

LOG_LINES = 20
CHATTER = re.compile(r"I\d{4} |[|+]|\s*$")  # information, tables, empty lines
POLL_SECONDS = 0.05
READY_SECONDS, VLLM_SECONDS = 120.0, 600.0  # for a server to be ready
TRITON_PORTS = ("http_port", "grpc_port", "metrics_port")
GATEWAY_PORT = "gateway_port"
TRITON_PORT = "triton_port"
"""Triton's own HTTP port behind a gateway, which then uses `http_port`."""
ANY_PORTS: dict[str, Any] = dict.fromkeys((*TRITON_PORTS, GATEWAY_PORT), 0)
DRAIN_SECONDS = 3  # how long Triton waits for requests in flight on shutdown


class TritonServer:
    """A server that this process started; as a context manager, it ends with the block.

    Unless `detach` was called, it also ends if this process dies, or if it crashes.
    """

    def __init__(
        self, folder: Path, state: ServerState, guard: subprocess.Popen[bytes], owner: socket.socket
    ) -> None:
        self.folder, self.state = folder, state
        self._guard, self._owner = guard, owner
        self._detached = False

    def __enter__(self) -> "TritonServer":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._detached:
            self.stop()

    def detach(self) -> ServerState:
        """Let the server outlive this process, and its own crashes; `state.stop` ends it."""
        self._owner.sendall(b"1")
        self._detached = True
        return self.state

    def stop(self) -> None:
        """End the server."""
        serve_state.end(self.state)
        serve_state.forget(self.folder)
        self._owner.close()
        self._guard.wait()


def start(
    repository: Path,
    serving: ServingSettings,
    folder: Path | None = None,
    timeout_seconds: float | None = None,
    options: Sequence[str] = (),
    with_gateway: bool = False,
) -> TritonServer:
    """Start a server on a model repository and wait until the model is ready.

    Args:
        repository: written by `write_repository`.
        serving: model name and ports; port 0 picks a free one.
        folder: state folder; default `state.default_folder()`.
        timeout_seconds: how long to wait; by default 2 minutes, or 10 for vLLM.
        options: additional tritonserver options, such as `--model-control-mode=explicit`.
        with_gateway: whether to start the gateway in front of Triton's HTTP.

    Raises:
        UserError: a port is in use, a server of this state folder is already running, or there is
            no environment with Triton and the gateway's packages.
        StageError: the server ended, or was not ready in time; the message has the log's last
            lines.
    """
    # Everything that can be wrong is found before anything is started or written.
    folder = (folder or serve_state.default_folder()).absolute()
    environment = backends = find_environment()
    if with_gateway:
        environment.require_gateway()
    is_vllm = "vllm" in served_runtimes(repository)
    if is_vllm:
        backends = with_vllm(environment)
    if running := serve_state.find(folder):
        raise UserError(
            f"a server of {folder} is already running on {running.http}",
            "run `make stop`",
            Code.IN_USE,
        )
    # Free now: the sockets that prove it are closed again before Triton binds the ports.
    ports = free_ports(serving, with_gateway)

    # Triton's command and, after `--`, the gateway's: those of the guard, which runs both.
    folder.mkdir(parents=True, exist_ok=True)
    shared_memory = f"lathe_{uuid.uuid4().hex[:12]}"
    command = _command(backends, repository.absolute(), folder, ports, shared_memory)
    command += options
    if is_vllm:  # the guard and the gateway stay in Triton's own environment
        variables = backends.variables()
        paths = [f"{name}={variables[name]}" for name in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")]
        command = ["env", *paths, *command]
    if with_gateway:
        command += ["--", *_gateway(environment, repository.absolute(), folder, ports)]
    guard, owner = _spawn(environment, shared_memory, command, folder)

    try:
        # The guard tells the server's process id on its socket, or closes it if there is none.
        state = ServerState(
            server=_process(int(owner.makefile().readline() or 0), folder / LOG_FILE),
            guard=_process(guard.pid, folder / LOG_FILE),
            model_name=serving.model_name,
            repository=str(repository.absolute()),
            shared_memory=shared_memory,
            **ports,
        )
        timeout = timeout_seconds or (VLLM_SECONDS if is_vllm else READY_SECONDS)
        _wait_ready(state, guard, folder / LOG_FILE, timeout)
        state.write(folder)
    except BaseException:
        owner.close()  # the guard ends the server
        guard.wait()
        raise
    log.info("tritonserver is ready: http %s, grpc %s", state.http, state.grpc)
    if state.openai:
        log.info("OpenAI API: %s", state.openai)
    return TritonServer(folder, state, guard, owner)


def free_ports(serving: ServingSettings, with_gateway: bool = False) -> dict[str, int]:
    """Check that the ports can be bound, and pick a free one for each 0; returns them by name.

    Raises:
        UserError: one is in use; names it.
    """
    bound = {}
    with ExitStack() as sockets:
        gateway = (GATEWAY_PORT, TRITON_PORT) if with_gateway else ()
        for key in (*TRITON_PORTS, *gateway):
            port = (key != TRITON_PORT and getattr(serving, key)) or free_port()
            probe = sockets.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
                probe.listen()
            except (OSError, OverflowError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise UserError(
                    f"Serving.{key} {port} cannot be used on {HOST}: {reason}",
                    "stop the server there (`make stop` for one started by Lathe), or pass -o "
                    f"Serving.{key}=0 for any free port",
                    Code.IN_USE,
                ) from None
            bound[key] = port
    return bound


def _command(
    environment: ServeEnvironment,
    repository: Path,
    folder: Path,
    ports: Mapping[str, int],
    shared_memory: str,
) -> list[str]:
    return [
        str(environment.binary),
        f"--model-repository={repository}",
        f"--backend-directory={environment.link_backends(folder / BACKENDS)}",
        f"--backend-config=python,shm-region-prefix-name={shared_memory}",
        "--disable-auto-complete-config",
        f"--http-address={HOST}",
        f"--http-port={ports.get(TRITON_PORT, ports['http_port'])}",
        f"--grpc-address={HOST}",
        f"--grpc-port={ports['grpc_port']}",
        f"--metrics-address={HOST}",
        f"--metrics-port={ports['metrics_port']}",
        f"--exit-timeout-secs={DRAIN_SECONDS}",
        *restrictions(),
    ]


def _gateway(
    environment: ServeEnvironment, repository: Path, folder: Path, ports: Mapping[str, int]
) -> list[str]:
    return [
        str(environment.python),
        "-m",
        "lathe_serving.gateway",
        str(repository),
        f"--triton={HOST}:{ports['grpc_port']}",
        f"--triton-http={HOST}:{ports[TRITON_PORT]}",
        f"--host={HOST}",
        f"--port={ports['http_port']}",
        f"--port={ports[GATEWAY_PORT]}",
        f"--drain-seconds={DRAIN_SECONDS}",
        f"--server-state={folder / STATE_FILE}",
    ]


def _spawn(
    environment: ServeEnvironment, shared_memory: str, command: list[str], folder: Path
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    owner, other = socket.socketpair()
    with (folder / LOG_FILE).open("wb") as log_file, other:
        guarded = ["-m", "lathe_serving.guard", str(other.fileno()), shared_memory, str(folder)]
        guard = subprocess.Popen(
            [environment.python, *guarded, *command],
            env=environment.variables(),
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in this terminal must not reach the server
        )
    return guard, owner


def _process(pid: int, log_path: Path) -> Process:
    try:
        return Process.of(pid)
    except OSError:
        raise StageError(
            f"tritonserver exited before it was ready\n{_tail(log_path)}", Code.FAILED
        ) from None


def _wait_ready(
    state: ServerState, guard: subprocess.Popen[bytes], log_path: Path, timeout_seconds: float
) -> None:
    addresses = [f"http://{state.http}/v2/health/ready"]
    if state.gateway_port:
        addresses.append(f"http://{HOST}:{state.gateway_port}/health")
    started = time.monotonic()
    with bar("wait for tritonserver (seconds)") as waited:
        while True:
            try:
                for address in addresses:
                    LOOPBACK.open(address, timeout=1).close()
                return
            except (OSError, HTTPException):
                pass  # it does not listen yet, or answers that it is not ready
            seconds = time.monotonic() - started
            if guard.poll() is not None:
                raise StageError(
                    f"tritonserver exited before it was ready\n{_tail(log_path)}", Code.FAILED
                )
            if seconds > timeout_seconds:
                raise StageError(
                    f"tritonserver was not ready in {timeout_seconds:g} s\n{_tail(log_path)}",
                    Code.TIMEOUT,
                )
            waited.advance(int(seconds) - waited.done)
            time.sleep(POLL_SECONDS)


def _tail(log_path: Path) -> str:
    """The log's last lines, without Triton's information messages."""
    lines = log_path.read_text(errors="replace", encoding="utf-8").splitlines()
    telling = [line for line in lines if not CHATTER.match(line)][-LOG_LINES:]
    return "\n".join([*telling, f"the whole log: {log_path}"])

"""The state file of the running server, with which clients find it and `stop` ends it.

The state folder is `run/serve` in the working directory, or `LATHE_SERVE_STATE`. It contains
`server.json` (process, ports and model), `triton.log` and the backend directory.
"""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from stat import S_ISREG
from typing import Annotated
from urllib.request import ProxyHandler, build_opener

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lathe_base.errors import Code, UserError, explain
from lathe_base.inputs import first_mistake
from lathe_base.storage import atomic_file
from lathe_serving.environment import unlink_backends
from lathe_serving.process import Process, ends_within, send
from lathe_serving.shared_memory import SHARED_MEMORY, clear_shared_memory

HOST = "127.0.0.1"
LOOPBACK = build_opener(ProxyHandler({}))  # HTTP to loopback must not use the environment's proxy
STATE_VARIABLE = "LATHE_SERVE_STATE"
STATE_FILE = "server.json"
LOG_FILE = "triton.log"
BACKENDS = "backends"
STATE_FILES = {STATE_FILE, LOG_FILE, BACKENDS}
STOP_SECONDS = 15.0  # for the gateway to answer what it has, and the server to end
GUARD_SECONDS = 5.0  # for the guard to kill its process group and end

Port = Annotated[int, Field(gt=0, lt=2**16)]


def default_folder() -> Path:
    """The state folder in which `lathe client`, `make serve` and `make stop` look for the
    server."""
    return Path(os.environ.get(STATE_VARIABLE) or Path("run") / "serve").absolute()


class ServerState(BaseModel):
    """A started server, and its guard, which leads the group of all its processes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    server: Process
    guard: Process
    restarts: Annotated[int, Field(ge=0)] = 0
    """Number of times that the guard has restarted the server after a crash."""
    model_name: str
    repository: str
    http_port: Port
    grpc_port: Port
    metrics_port: Port
    gateway_port: Port | None = None
    """None: without a gateway."""
    triton_port: Port | None = None
    """Triton's own HTTP, which is `http_port` without a gateway."""
    shared_memory: Annotated[str, Field(pattern=f"^{SHARED_MEMORY.pattern}$")]
    """Prefix of its regions in /dev/shm, unique to this server."""

    @property
    def http(self) -> str:
        """HTTP address, `host:port`."""
        return f"{HOST}:{self.http_port}"

    @property
    def grpc(self) -> str:
        """gRPC address, `host:port`."""
        return f"{HOST}:{self.grpc_port}"

    @property
    def openai(self) -> str | None:
        """Base URL of the OpenAI API, if there is a gateway."""
        return f"http://{HOST}:{self.gateway_port}/v1" if self.gateway_port else None

    def is_alive(self) -> bool:
        """Whether the server, or the guard that restarts it, is running, rather than a later
        process with the same PID."""
        with self.server.held(self.is_server) as server, self.guard.held(self.is_guard) as guard:
            return server is not None or guard is not None

    def is_server(self, command: Sequence[str]) -> bool:
        """Whether a command line is that of this server."""
        shared_memory = f"--backend-config=python,shm-region-prefix-name={self.shared_memory}"
        is_triton = Path(command[0]).name == "tritonserver"
        return is_triton and {f"--model-repository={self.repository}", shared_memory} <= {*command}

    def is_guard(self, command: Sequence[str]) -> bool:
        """Whether a command line is that of this server's guard."""
        return {"lathe_serving.guard", self.shared_memory} <= {*command}

    def write(self, folder: Path) -> None:
        """Write the state file."""
        with atomic_file(folder / STATE_FILE) as path:
            path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


def find(folder: Path | None = None) -> ServerState | None:
    """The running server of a state folder, or None.

    Raises:
        UserError: the folder's `server.json` is something else.
    """
    state = read(folder or default_folder())
    return state if state and state.is_alive() else None


def stop(folder: Path | None = None) -> ServerState | None:
    """End the server of a state folder and all its processes; None if none is running.

    Requests in flight get a few seconds to finish; processes that remain are killed.

    Raises:
        UserError: the folder's `server.json` is something else; nothing is then ended or removed.
    """
    folder = folder or default_folder()
    state = find(folder)
    if state is not None:
        end(state)
    forget(folder)
    return state


def forget(folder: Path) -> None:
    """Remove the state file, and the links to this machine's environment.

    Raises:
        UserError: `server.json` is something else.
    """
    read(folder)
    (folder / STATE_FILE).unlink(missing_ok=True)
    unlink_backends(folder / BACKENDS)


def end(state: ServerState) -> None:
    """Terminate a server, wait, kill its remaining processes, and clear its shared memory.

    The guard does all this; if it hangs, it is killed too, and so is a server without a guard.
    """
    with state.server.held(state.is_server) as server, state.guard.held(state.is_guard) as guard:
        if guard is not None:
            send(guard, signal.SIGTERM)
            if not ends_within(guard, STOP_SECONDS + GUARD_SECONDS):
                os.killpg(state.guard.pid, signal.SIGKILL)  # the guard exists, and so does it
        if server is not None:
            send(server, signal.SIGTERM)
            if not ends_within(server, STOP_SECONDS):
                send(server, signal.SIGKILL)
        if server is not None or guard is not None:
            clear_shared_memory(state.shared_memory)


def read(folder: Path) -> ServerState | None:
    """The state in a folder, whose server may have ended; None if there is none.

    Raises:
        UserError: `server.json` is something else.
    """
    path = folder / STATE_FILE
    try:
        if not S_ISREG(path.stat().st_mode):
            raise UserError(f"{path}: not a file", _HINT, Code.WRONG_KIND)
        return ServerState.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", _HINT, explain(error).code) from None
    except ValidationError as error:
        raise UserError(
            f"{path}: not a server state file: {first_mistake(error)}", _HINT, Code.MALFORMED
        ) from None


_HINT = f"move it away, or set {STATE_VARIABLE} to another folder"

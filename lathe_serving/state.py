"""The processes of the running server, and its state file, with which clients find it and `stop`
ends it.

The state folder is `run/serve` in the working directory, or `LATHE_SERVE_STATE`. It contains
`server.json` (process, ports and model), `triton.log` and the backend directory.
"""

import os
import select
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG
from typing import Annotated
from urllib.request import ProxyHandler, build_opener

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lathe_base.errors import Code, UserError, explain
from lathe_base.inputs import first_mistake
from lathe_base.storage import atomic_file
from lathe_serving.environment import unlink_backends
from lathe_serving.stubs import SHARED_MEMORY, clear_shared_memory

HOST = "127.0.0.1"
LOOPBACK = build_opener(ProxyHandler({}))  # HTTP to loopback must not use the environment's proxy
STATE_VARIABLE = "LATHE_SERVE_STATE"
STATE_FILE = "server.json"
LOG_FILE = "triton.log"
BACKENDS = "backends"
STATE_FILES = {STATE_FILE, LOG_FILE, BACKENDS}
STOP_SECONDS = 15.0  # for the gateway to answer what it has, and the server to end
GUARD_SECONDS = 5.0  # for the guard to kill its process group and end
BOOT = Path("/proc/sys/kernel/random/boot_id")
HINT = f"move it away, or set {STATE_VARIABLE} to another folder"

Port = Annotated[int, Field(gt=0, lt=2**16)]


def default_folder() -> Path:
    """The state folder in which `lathe client`, `make serve` and `make stop` look for the
    server."""
    return Path(os.environ.get(STATE_VARIABLE) or Path("run") / "serve").absolute()


class Process(BaseModel):
    """A process of this machine, identified by its PID and start time: the kernel may reuse a PID
    for another one.

    Attributes:
        pid: its PID.
        started: its start time, in clock ticks since boot.
        boot: the id of that boot.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    pid: int = Field(gt=1, le=2**22)  # the kernel's PID_MAX_LIMIT
    started: int = Field(gt=0)
    boot: str

    @classmethod
    def of(cls, pid: int) -> "Process":
        """The process that has this PID now.

        Raises:
            OSError: there is none.
        """
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # Field 2, the name, is arbitrary but ends with `)`: after it come field 3, the state, and
        # field 22, the start time. A zombie is a process that has ended and was not reaped.
        fields = stat.rpartition(")")[2].split()
        if fields[0] in "ZX":
            raise ProcessLookupError(f"process {pid} has ended")
        boot = BOOT.read_text(encoding="utf-8").strip()
        return cls(pid=pid, started=int(fields[19]), boot=boot)

    @contextmanager
    def pidfd(self, is_right: Callable[[Sequence[str]], bool]) -> Iterator[int | None]:
        """Open a pidfd of the process, which never refers to another one; None if the process has
        ended, or `is_right` rejects its command line."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            yield None
            return
        # What is read now is from this process, or from a successor that differs.
        try:
            command = os.fsdecode(Path(f"/proc/{self.pid}/cmdline").read_bytes()).split("\0")
            is_there = Process.of(self.pid) == self and is_right(command)
        except (OSError, ValueError):
            is_there = False
        try:
            yield descriptor if is_there else None
        finally:
            os.close(descriptor)


def send(descriptor: int, number: signal.Signals) -> None:
    """Send a signal to the process of a pidfd, unless it has ended."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, number)


def ends_within(descriptor: int, seconds: float) -> bool:
    """Wait for the process of a pidfd; return whether it ended in time."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


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
        with self.server.pidfd(self.is_server) as server, self.guard.pidfd(self.is_guard) as guard:
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
    with state.server.pidfd(state.is_server) as server, state.guard.pidfd(state.is_guard) as guard:
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
            raise UserError(f"{path}: not a file", HINT, Code.WRONG_KIND)
        return ServerState.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", HINT, explain(error).code) from None
    except ValidationError as error:
        raise UserError(
            f"{path}: not a server state file: {first_mistake(error)}", HINT, Code.MALFORMED
        ) from None

"""Where the running server is: its state file, by which clients find it and `stop` ends it.

The state folder is `run/serve` under the working directory, or `LATHE_SERVE_STATE`. It holds
`server.json`, which names process, ports and model, `triton.log` and the backend directory.
"""

import json
import os
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

from lathe.serve.guard import clear_shared_memory
from lathe.storage import atomic_file

HOST = "127.0.0.1"
LOOPBACK = build_opener(ProxyHandler({}))  # HTTP to it, never through the environment's proxy
STATE_VARIABLE = "LATHE_SERVE_STATE"
STATE_FILE = "server.json"
LOG_FILE = "triton.log"
BACKENDS = "backends"
STOP_SECONDS = 15.0


def default_folder() -> Path:
    """Where `lathe client`, `make serve` and `make stop` look for the server."""
    return Path(os.environ.get(STATE_VARIABLE) or Path("run") / "serve").absolute()


@dataclass(frozen=True)
class ServerState:
    """A started server. It leads no process group of its own: `group` holds all its processes."""

    pid: int
    group: int
    model_name: str
    repository: str
    http_port: int
    grpc_port: int
    metrics_port: int
    shared_memory: str  # prefix of its regions in /dev/shm, unique to it

    @property
    def http(self) -> str:
        return f"{HOST}:{self.http_port}"

    @property
    def grpc(self) -> str:
        return f"{HOST}:{self.grpc_port}"

    def is_alive(self) -> bool:
        """Whether the process runs, and is this server and no later one with its number."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
            command = Path(f"/proc/{self.pid}/cmdline").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] not in "ZX" and self.shared_memory in command

    def write(self, folder: Path) -> None:
        with atomic_file(folder / STATE_FILE) as path:
            path.write_text(json.dumps(asdict(self), indent=2) + "\n")


def find(folder: Path | None = None) -> ServerState | None:
    """The running server of a state folder, or None."""
    try:
        state = _read(folder or default_folder())
    except (OSError, ValueError, TypeError):
        return None
    return state if state.is_alive() else None


def stop(folder: Path | None = None) -> ServerState | None:
    """End the server of a state folder and every process of it; None where none runs.

    Requests in flight get a few seconds to end; what does not leave is killed.
    """
    folder = folder or default_folder()
    state = find(folder)
    if state is not None:
        end(state)
    (folder / STATE_FILE).unlink(missing_ok=True)
    shutil.rmtree(folder / BACKENDS, ignore_errors=True)  # links to this machine's environment
    return state


def end(state: ServerState) -> None:
    """Terminate, wait, kill what is left, and clear its shared memory."""
    with suppress(ProcessLookupError):
        os.kill(state.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while state.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(state.group, signal.SIGKILL)
    clear_shared_memory(state.shared_memory)


def _read(folder: Path) -> ServerState:
    return ServerState(**json.loads((folder / STATE_FILE).read_text()))

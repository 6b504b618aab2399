"""Python processes with slow imports preloaded: `[*warm.python(), "-m", "lathe", ...]`.

One fork server per test run imports the modules and forks for every command. The process that the
test starts is a small client that represents the fork: it passes on its standard streams, working
directory, environment and signals, and exits with the fork's status; killing the client kills the
fork. The fork is not a child of the process that started the client, so tests that inspect child
processes must use `sys.executable`.

With the environment of `for_children()`, the Python processes that a command starts are forks too:
the steps of a pipeline, the nodes and workers of a training run. They exit with their parent, but
not through Lathe's own mechanism, so tests of kills and signals must not use it.
`interpreter(python)` does the same for the interpreter of another environment.
"""

import array
import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path

OWN = sys.executable
CHILDREN = "LATHE_TEST_WARM_CHILDREN"
"""Environment variable: if set, child processes of a fork are forks too."""
TIED = "LATHE_TIED"  # from lathe_launch/parent.py, which cannot be imported without site-packages
PR_SET_PDEATHSIG = 1

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
TORCH = (
    *("torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "safetensors.torch"),
    *("kubernetes", "kubeflow_trainer_api", "minio", "pydantic", "rich.progress", "typer"),
    *("kfp.dsl.executor", "kfp.local", "tests.support.quick_kfp"),
    *("lathe.cli", "lathe.train.pretrain", "lathe.compress.prune", "lathe.compress.quantize"),
)
"""Modules to preload; they read no environment variable of a test at import."""
PADDLE = ("paddle", "paddleslim", "lathe.cli.options")


def python() -> list[str]:
    """Start of a command line, in place of `[sys.executable]`."""
    from tests.support.warm_server import address

    return [OWN, "-SE", __file__, str(address(OWN))]


def for_children() -> dict[str, str]:
    """Environment for a command `[*python(), ...]` that starts Python processes itself."""
    return {CHILDREN: "yes"}


def interpreter(python: str = OWN) -> Path:
    """Program to run in place of an interpreter, also for its children with `for_children()`."""
    from tests.support.warm_server import address

    return address(python).with_name("python3")


def main(path: str, arguments: list[str]) -> None:
    """Run Python with these arguments in a fork of the server, and exit with its status."""
    if os.environ.pop(TIED, None):  # the fork exits with this process, and this with its parent
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    body = json.dumps(request).encode()
    streams = array.array("i", [0, 1, 2])
    head = len(body).to_bytes(8, "big")
    server.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    server.sendall(body)
    replies = server.makefile()
    pid = int(replies.readline())
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status = int(replies.readline())
    if status < 0:
        if -status != signal.SIGKILL:  # which cannot be reset
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

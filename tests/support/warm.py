"""A Python that has imported what takes seconds: `[*warm.python(), "-m", "lathe", ...]`.

One server for all processes of a test run imports, and forks for every command. What is started is
a small client, which stands for the fork: it passes on its standard streams, folder, environment
and signals, and ends as the fork does; a client that is killed takes the fork with it. The fork is
no child of whoever starts the client, so use `sys.executable` where a test looks for the children.

With the variables of `for_children()`, the Pythons that a command starts are such forks too: the
steps of a pipeline, the nodes and workers of a training. They end with what started them, but not
by the means that Lathe has for it, so tests of kills and signals do without. `interpreter(paddle)`
is such a Python of another environment.
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
"""Environment variable: whether the children of a fork are forks."""
TIED = "LATHE_TIED"  # of lathe/launch/parent.py, which cannot be imported without site-packages
PR_SET_PDEATHSIG = 1

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
TORCH = (
    *("torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "safetensors.torch"),
    *("kubernetes", "kubeflow_trainer_api", "minio", "pydantic", "rich.progress", "typer"),
    *("kfp.dsl.executor", "kfp.local", "tests.support.quick_kfp"),
    *("lathe.cli", "lathe.train.pretrain", "lathe.compress.prune", "lathe.compress.quantize"),
)
"""What reads no environment variable of a test while it is imported."""
PADDLE = ("paddle", "paddleslim", "lathe.cli.options")


def python() -> list[str]:
    """The beginning of a command, in place of `[sys.executable]`."""
    from tests.support.warm_server import address

    return [OWN, "-SE", __file__, str(address(OWN))]


def for_children() -> dict[str, str]:
    """Environment of a command, `[*python(), ...]`, that starts Pythons itself."""
    return {CHILDREN: "yes"}


def interpreter(python: str = OWN) -> Path:
    """A program that stands for this interpreter, and for its children with `for_children()`."""
    from tests.support.warm_server import address

    return address(python).with_name("python3")


def main(path: str, arguments: list[str]) -> None:
    """Have the server run a Python with these arguments, and end as it does."""
    if os.environ.pop(TIED, None):  # the fork ends with this process, which ends with its parent
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    asked = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    body = json.dumps(asked).encode()
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
        if -status != signal.SIGKILL:  # whose handling nobody may set
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

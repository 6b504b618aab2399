"""The fork server of the tests (`tests/support/warm_server.py`)."""

import os
import signal
import subprocess
import time
from pathlib import Path

from tests.support import warm


def test_a_fork_that_ends_as_its_client_is_killed_leaves_the_server(tmp_path: Path) -> None:
    """Both are noticed at once, where the server sees the first one's end only as it wakes."""
    go, pid = tmp_path / "go", tmp_path / "pid"
    code = (
        "import os, pathlib, time\n"
        f"pathlib.Path({str(pid)!r}).write_text(f'{{os.getpid()}} {{os.getppid()}}\\n')\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)"
    )
    client = subprocess.Popen([*warm.python(), "-c", code])
    while not (pid.exists() and pid.read_text().endswith("\n")):
        time.sleep(0.01)
    fork, server = map(int, pid.read_text().split())
    os.kill(server, signal.SIGSTOP)
    try:
        go.touch()
        while Path(f"/proc/{fork}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        client.kill()
        client.wait()
    finally:
        os.kill(server, signal.SIGCONT)
    done = subprocess.run([*warm.python(), "-c", "print('still here')"], capture_output=True)
    assert done.stdout == b"still here\n", done.stderr

"""The local launcher with real processes: groups that succeed, fail or are killed."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from lathe_base.config.recipe import load_recipe
from lathe_base.errors import Code, StageError
from lathe_base.ports import free_port
from lathe_launch.local import Node, _join, run
from lathe_launch.parent import TERMINATION
from lathe_launch.shape import Shape, WorkerFailed, required_shape
from tests.support.errors import raises

TWO = Shape(processes_per_node=2)
TWO_NODES = Shape(nodes=2, processes_per_node=2)

SLEEPING_WORKER = """
import os, sys, time
open(f"{sys.argv[1]}/pid{os.environ['RANK']}", "w").write(str(os.getpid()))
time.sleep(600)
"""


def script(folder: Path, body: str) -> str:
    path = folder / "worker.py"
    path.write_text(textwrap.dedent(body))
    return str(path)


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, seconds: float = 120.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def test_auto_is_a_process_for_each_gpu_of_all_nodes() -> None:
    nodes = ("Distributed.dp_degree=auto", "Launch.nodes=2", "Launch.gpus_per_node=4")
    assert required_shape(load_recipe("base", nodes)) == Shape(2, 4)


@pytest.mark.parametrize(
    ("shape", "places"),
    [(TWO, ["0 0", "0 1"]), (TWO_NODES, ["0 0", "0 1", "1 0", "1 1"])],
    ids=["one node", "two nodes"],
)
@pytest.mark.slow
def test_processes_form_one_group(tmp_path, shape, places):
    worker = script(
        tmp_path,
        """
        import os, sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        place = f"{os.environ['GROUP_RANK']} {os.environ['LOCAL_RANK']}"
        out = f"{sys.argv[1]}/{dist.get_rank()}"
        open(out, "w").write(f"{total.item()} {dist.get_world_size()} {place}")
        dist.destroy_process_group()
        """,
    )
    before = signal.getsignal(signal.SIGTERM)
    run([worker, str(tmp_path)], shape)
    said = [(tmp_path / str(rank)).read_text() for rank in range(shape.processes)]
    total = sum(range(1, shape.processes + 1))
    assert said == [f"{total}.0 {shape.processes} {place}" for place in places]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("shape", [TWO, TWO_NODES], ids=["one node", "two nodes"])
@pytest.mark.slow
def test_failure_names_the_rank_and_stops_the_others(tmp_path, shape):
    worker = script(
        tmp_path,
        """
        import os, sys, time
        rank = os.environ["RANK"]
        open(f"{sys.argv[1]}/pid{rank}", "w").write(str(os.getpid()))
        if rank == sys.argv[2]:
            sys.exit("no tokens left to read")
        time.sleep(600)
        """,
    )
    last = shape.processes - 1
    texts = (f"rank {last} ", "exit code 1", "no tokens left")
    with raises(Code.FAILED, *texts, kind=WorkerFailed) as caught:
        run([worker, str(tmp_path), str(last)], shape)
    assert caught.value.rank == last
    assert not any(alive(int(path.read_text())) for path in tmp_path.glob("pid*"))


@pytest.mark.parametrize("shape", [TWO, TWO_NODES], ids=["one node", "two nodes"])
@pytest.mark.slow
def test_killed_rank_fails_the_launch(tmp_path, shape):
    worker = script(
        tmp_path,
        """
        import os, signal, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()  # fails in the others, as their peer is gone
        """,
    )
    with raises(Code.KILLED, kind=WorkerFailed) as caught:
        run([worker], shape)
    assert (caught.value.rank, caught.value.exit_code) == (0, -signal.SIGKILL)


@pytest.mark.parametrize(
    ("number", "nodes"),
    [
        (signal.SIGTERM, 1),
        *(
            pytest.param(number, nodes, marks=pytest.mark.slow)
            for number, nodes in ((signal.SIGINT, 1), (signal.SIGKILL, 1), (signal.SIGTERM, 2))
        ),
    ],
)
def test_a_signal_to_the_launcher_leaves_no_worker(tmp_path, number, nodes):
    worker = script(tmp_path, SLEEPING_WORKER)
    code = (
        "import sys; from lathe_launch.local import run; from lathe_launch.shape import Shape; "
        "run(sys.argv[2:], Shape(int(sys.argv[1]), 2))"
    )
    command = [sys.executable, "-c", code, str(nodes), worker, str(tmp_path)]
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}) as launcher:
        pids = [tmp_path / f"pid{rank}" for rank in range(2 * nodes)]
        have_begun = wait_for(lambda: all(p.exists() and p.read_text() for p in pids))
        launcher.send_signal(number)
        assert have_begun
        assert launcher.wait(120) == (-number if number == signal.SIGKILL else 128 + number)
    assert wait_for(lambda: not any(alive(int(p.read_text())) for p in pids), 60)


SIGNALLED_INSIDE_TORCH = """
import signal, sys, time, types
from pathlib import Path
from torch.distributed.elastic.metrics import api
from lathe_launch.local import run
from lathe_launch.shape import Shape

def now():
    if len(list(Path(sys.argv[2]).glob("pid*"))) == 2:
        api.time = time
        signal.raise_signal(signal.SIGTERM)
    return time.time()

api.time = types.SimpleNamespace(time=now)  # asked before each look at the workers
run(sys.argv[1:], Shape(1, 2))
"""


@pytest.mark.slow
def test_a_signal_while_torch_handles_errors_of_its_own(tmp_path: Path) -> None:
    worker = script(tmp_path, SLEEPING_WORKER)
    command = [sys.executable, "-c", SIGNALLED_INSIDE_TORCH, worker, str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    pids = [int(path.read_text() or 0) for path in tmp_path.glob("pid*")]
    assert wait_for(lambda: not any(alive(pid) for pid in pids), 60)


SAVING_WORKER = """
import os, signal, sys, time
from pathlib import Path
from lathe_launch.parent import report_preemption
signal.signal(signal.SIGTERM, lambda *_: None)
Path(sys.argv[1], "pid" + os.environ["RANK"]).write_text(str(os.getpid()))
signal.pause()
time.sleep(2)  # saves its state
report_preemption("the state is saved")
sys.exit(75)
"""
PREEMPTED = """
import sys
from lathe_base.errors import Preempted
from lathe_launch.local import run
from lathe_launch.shape import Shape
try:
    run(sys.argv[2:], Shape(int(sys.argv[1]), 2))
except Preempted as error:
    print(error)
    sys.exit(error.status)
"""


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.slow
def test_more_than_one_sigterm_is_one_preemption(tmp_path: Path, nodes: int) -> None:
    """Kubernetes, a queue and a person may each send one."""
    worker = script(tmp_path, SAVING_WORKER)
    command = [sys.executable, "-c", PREEMPTED, str(nodes), worker, str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes) as launcher:
        pids = [tmp_path / f"pid{rank}" for rank in range(2 * nodes)]
        assert wait_for(lambda: all(p.exists() and p.read_text() for p in pids))
        for _ in range(4):
            launcher.send_signal(signal.SIGTERM)
            time.sleep(0.4)
        out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 75, err
    assert "the state is saved" in out and "Traceback" not in err


def test_a_node_says_whom_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lathe_launch.local.SAY_SECONDS", 0.1)
    monkeypatch.setattr("lathe_launch.local.JOIN_POLL_SECONDS", 0.05)
    node = Node(Shape(3, 1), 0, "127.0.0.1", free_port())
    handlers = [signal.getsignal(number) for number in TERMINATION]

    def join_late() -> None:
        store = None
        for rank in (1, 2):
            while len(caplog.messages) < rank:
                time.sleep(0.01)
            store = store or TCPStore(node.address, node.port, wait_for_workers=False)
            store.set(f"node {rank}", "")

    late = threading.Thread(target=join_late)
    late.start()
    store = _join(node)
    late.join()
    assert store.check(["node 0", "node 1", "node 2"])
    assert f"node 0 waits for node 1, 2 of 3 to join 127.0.0.1:{node.port}" in caplog.messages[0]
    assert "waits for node 2 of 3" in caplog.messages[-1]
    assert [signal.getsignal(number) for number in TERMINATION] == handlers


def test_a_node_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lathe_launch.local.JOIN_SECONDS", 0.2)
    monkeypatch.setattr("lathe_launch.local.JOIN_POLL_SECONDS", 0.05)
    with raises(Code.TIMEOUT, "node 1 of 2", "127.0.0.1:", kind=StageError):
        _join(Node(Shape(2, 1), 0, "127.0.0.1", free_port()))


NODE = """
from pathlib import Path
from lathe_base.console import end_cleanly_on_sigterm
from lathe_launch.local import main
end_cleanly_on_sigterm()
main(Path("outcome"), 30, ["-c", "pass"])
"""


@pytest.mark.slow
def test_a_node_that_waits_for_the_others_ends_at_once(tmp_path: Path) -> None:
    port = free_port()
    environment = os.environ | Node(Shape(2, 1), 0, "127.0.0.1", port).environment()
    with subprocess.Popen([sys.executable, "-c", NODE], env=environment, cwd=tmp_path) as node:
        for _ in range(600):  # until the first node listens and waits for the second
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        time.sleep(1)
        node.terminate()
        assert node.wait(timeout=60) == -signal.SIGTERM

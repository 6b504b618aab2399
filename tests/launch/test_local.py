"""The local launcher with real processes: a group that works, fails, is killed."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from lathe.launch.local import Shape, WorkerFailed, run

TWO = Shape(processes_per_node=2)


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


def wait_for(condition, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def test_processes_form_a_group(tmp_path):
    worker = script(
        tmp_path,
        """
        import os, sys, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        out = f"{sys.argv[1]}/{dist.get_rank()}"
        open(out, "w").write(f"{total.item()} {dist.get_world_size()} {os.environ['LOCAL_RANK']}")
        dist.destroy_process_group()
        """,
    )
    before = signal.getsignal(signal.SIGTERM)
    run([worker, str(tmp_path)], TWO)
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["3.0 2 0", "3.0 2 1"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_failure_names_the_rank_and_stops_the_others(tmp_path):
    worker = script(
        tmp_path,
        """
        import os, sys, time
        rank = os.environ["RANK"]
        open(f"{sys.argv[1]}/pid{rank}", "w").write(str(os.getpid()))
        if rank == "1":
            sys.exit("no tokens left to read")
        time.sleep(600)
        """,
    )
    with pytest.raises(WorkerFailed, match=r"rank 1 .*exit code 1.*\n.*no tokens left") as caught:
        run([worker, str(tmp_path)], TWO)
    assert caught.value.rank == 1
    assert not alive(int((tmp_path / "pid0").read_text()))


def test_killed_rank_fails_the_launch(tmp_path):
    worker = script(
        tmp_path,
        """
        import os, signal, time
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        """,
    )
    with pytest.raises(WorkerFailed) as caught:
        run([worker], TWO)
    assert (caught.value.rank, caught.value.exit_code) == (0, -signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_leaves_no_worker(tmp_path, number):
    worker = script(
        tmp_path,
        """
        import os, sys, time
        open(f"{sys.argv[1]}/pid{os.environ['RANK']}", "w").write(str(os.getpid()))
        time.sleep(600)
        """,
    )
    code = (
        "import sys; from lathe.launch.local import Shape, run; "
        "run(sys.argv[1:], Shape(processes_per_node=2))"
    )
    command = [sys.executable, "-c", code, worker, str(tmp_path)]
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}) as launcher:
        pids = [tmp_path / f"pid{rank}" for rank in (0, 1)]
        assert wait_for(lambda: all(p.exists() and p.read_text() for p in pids))
        launcher.send_signal(number)
        assert launcher.wait(20) == 128 + number
    assert not any(alive(int(p.read_text())) for p in pids)

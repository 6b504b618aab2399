"""Restarting a step that is killed in its pod."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.tables import quick_only

STEP = """
import os, signal, sys, time
{imports}
from pathlib import Path
from components.stage import stage
from lathe_base.errors import Code, StageError, UserError
from lathe_launch.shape import WorkerFailed

def attempt():
    with open("attempts", "a") as file:
        file.write("x")
    return len(Path("attempts").read_text())

with stage("tiny", ["Launch.restarts=2"]) as settings:
    n = attempt()
    print("attempt", n, flush=True)
    {body}
print("outputs written")
"""
KILLED_TWICE = "if n < 3: os.kill(os.getpid(), signal.SIGKILL)"
ALWAYS = "os.kill(os.getpid(), signal.SIGSEGV)"
RANK = "if n == 1: raise WorkerFailed(1, -9, 'step 7')"
MISTAKE = "raise UserError('corpus.txt: empty', 'give text', Code.TOO_LITTLE_DATA)"
FAILED = "raise StageError('the store does not answer', Code.UNREACHABLE)"
WAITS = "time.sleep(60)"
COMPUTES = "a = torch.randn(800, 800); (a @ a).sum().item()"
SHOWS = "print(os.getppid(), sys.stdin.read(), sorted(os.environ), flush=True)\n    " + KILLED_TWICE


def start(folder: Path, body: str, in_pod: bool = True, imports: str = "") -> subprocess.Popen[str]:
    variables = {k: v for k, v in os.environ.items() if k != "POD_NAME"}
    # As in the command of a step, so that `import kfp` does not import the client.
    variables |= {"PYTHONPATH": str(Path.cwd()), "_KFP_RUNTIME": "true"}
    variables |= {"POD_NAME": "step"} if in_pod else {}
    script = STEP.format(body=body, imports=imports)
    command = [sys.executable, "-m", "components.supervise", "-c", script]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, cwd=folder, env=variables, text=True, **streams)


def attempts(folder: Path) -> int:
    path = folder / "attempts"
    return len(path.read_text()) if path.exists() else 0


def test_it_starts_again_and_says_so(tmp_path: Path) -> None:
    out, _ = (step := start(tmp_path, KILLED_TWICE)).communicate(timeout=120)
    assert step.returncode == 0 and attempts(tmp_path) == 3
    assert out.count("outputs written") == 1
    assert "[lathe] the step was killed by SIGKILL" in out and "restarts left: 1" in out


@pytest.mark.slow
def test_a_lost_worker_process_is_such_a_death(tmp_path: Path) -> None:
    out, _ = (step := start(tmp_path, RANK)).communicate(timeout=120)
    assert step.returncode == 0 and attempts(tmp_path) == 2
    assert "rank 1 ended with exit code -9" in out and "the step lost a worker process" in out


@pytest.mark.slow
def test_not_for_ever(tmp_path: Path) -> None:
    out, _ = (step := start(tmp_path, ALWAYS)).communicate(timeout=120)
    assert step.returncode == 128 + signal.SIGSEGV and attempts(tmp_path) == 3
    assert "error[killed]: the step was killed by SIGSEGV; restarts left: 0" in out


@pytest.mark.parametrize(("body", "status"), quick_only([(MISTAKE, 2), (FAILED, 1)], [(FAILED, 1)]))
def test_permanent_failures_are_not_retried(tmp_path: Path, body: str, status: int) -> None:
    step = start(tmp_path, body)
    step.communicate(timeout=120)
    assert step.returncode == status and attempts(tmp_path) == 1


def test_elsewhere_there_is_one_process(tmp_path: Path) -> None:
    step = start(tmp_path, KILLED_TWICE, in_pod=False)
    step.communicate(timeout=120)
    assert step.returncode == -signal.SIGKILL and attempts(tmp_path) == 1


def test_a_signal_reaches_the_work(tmp_path: Path) -> None:
    step = start(tmp_path, WAITS)
    while attempts(tmp_path) == 0:
        time.sleep(0.05)
    step.terminate()
    out, _ = step.communicate(timeout=120)
    assert step.returncode == 128 + signal.SIGTERM and attempts(tmp_path) == 1
    assert "restarting" not in out


@pytest.mark.slow
def test_libraries_that_start_threads_do_not_keep_a_step_from_ending(tmp_path: Path) -> None:
    step = start(tmp_path, COMPUTES, imports="import onnxruntime, torch")
    out, err = step.communicate(timeout=120)
    assert step.returncode == 0 and out.endswith("outputs written\n"), err


@pytest.mark.slow
def test_every_attempt_has_the_same_environment_and_the_input(tmp_path: Path) -> None:
    out, _ = start(tmp_path, SHOWS).communicate("given", timeout=120)
    first, *others = [line for line in out.splitlines() if "POD_NAME" in line]
    assert "given" in first and "LATHE_RESTARTS_FD" not in first
    assert others == [first.replace("given", "")] * 2  # the first run has read stdin


@pytest.mark.slow
def test_the_supervisor_is_small_and_a_step_does_not_outlive_it(tmp_path: Path) -> None:
    step = start(tmp_path, "print(os.getpid(), flush=True); " + WAITS, imports="import torch")
    assert step.stdout
    while not (line := step.stdout.readline().strip()).isdigit():
        assert line
    status = Path(f"/proc/{step.pid}/status").read_text()
    assert int(status.partition("VmRSS:")[2].split()[0]) < 30_000  # kB
    step.kill()
    step.wait()
    while Path(f"/proc/{line}").exists():
        time.sleep(0.05)

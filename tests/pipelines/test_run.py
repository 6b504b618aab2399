"""Local pipeline runs: log, errors, exit."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lathe.model.checkpoint import load_checkpoint
from lathe_base.storage import fetch, list_uris, upload
from pipelines.local.log import StageLog
from tests.support import warm
from tests.support.micro_run import write_corpus, write_recipe


def start(
    folder: Path,
    *arguments: object,
    python: list[str] | None = None,
    environment: dict[str, str] | None = None,
) -> subprocess.Popen:
    """Start `python -m pipelines.local.run ...` in `folder`."""
    command = [*(python or warm.python()), "-m", "pipelines.local.run", *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ran(folder: Path, *arguments: object, seconds: float = 600) -> str:
    """Run a pipeline to its end, with steps as forks too; returns its output."""
    run = start(folder, *arguments, environment=warm.for_children())
    out, err = run.communicate(timeout=seconds)
    assert run.returncode == 0, out + err
    assert "Traceback" not in out + err
    return out


@dataclass(frozen=True)
class Finished:
    """Folder, arguments and output of a finished run."""

    folder: Path
    arguments: tuple[object, ...]
    out: str

    def again(self) -> str:
        """Run the same command again; returns its output."""
        return ran(self.folder, *self.arguments)

    def start(self, *arguments: object, **how: Any) -> subprocess.Popen:
        """Start the same command with more arguments; `prepare` is reused by any training."""
        return start(self.folder, *self.arguments, *arguments, **how)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("finished")
    recipe, corpus = write_recipe(folder), write_corpus(folder)
    arguments = ("pretrain", "--recipe", recipe, "--corpus", corpus, "--name", "one")
    return Finished(folder, arguments, ran(folder, *arguments))


@pytest.mark.slow
def test_pretrain_runs_and_a_second_run_reuses_its_stages(finished):
    stages = re.findall(r"^\S.*", finished.out, re.M)
    assert stages[:3] == ["prepare", "pretrain", "evaluate-dense"]
    assert "step 3/3, loss" in finished.out
    assert "KFP" not in finished.out and "executor_input" not in finished.out
    (weights,) = finished.folder.glob("run/one/*/pretrain/model/model.safetensors")
    model = str(weights.parent)
    assert model in finished.out

    out = finished.again()
    assert out.count(": reused") == 3
    assert model in out


@pytest.mark.slow
def test_a_model_that_the_user_deleted_is_trained_again(finished):
    (weights,) = finished.folder.glob("run/one/*/pretrain/model/model.safetensors")
    weights.unlink()
    for path in finished.folder.glob("run/one/cache/*.json"):
        if "evaluation" in path.read_text():
            path.write_bytes(b"\xff")
    out = finished.again()
    assert f"pretrain runs again: {weights} is missing" in out
    assert out.count(": reused") == 1 and "step 3/3, loss" in out


@pytest.mark.slow
def test_a_stages_user_error_is_one_message(tmp_path, recipe):
    (tmp_path / "short.txt").write_text("too short to train on")
    run = start(tmp_path, "pretrain", "--recipe", recipe, "--corpus", tmp_path / "short.txt")
    out, err = run.communicate(timeout=240)
    assert run.returncode == 1
    assert (
        err.startswith("error[too-little-data]: prepare: ")
        and "short.txt" in err
        and "hint: " in err
    )
    assert "Traceback" not in out + err
    assert "pretrain" not in out


FOREVER = ("-o", "Engine.max_steps=10000000")
TWO_BY_TWO = ("-o", "Launch.nodes=2", "-o", "Distributed.dp_degree=4")
TWO_BY_TWO += ("-o", "Global.local_batch_size=1", "-o", "Global.micro_batch_size=1")


@pytest.mark.slow
def test_two_nodes_of_two_processes_train_inside_the_dag(finished):
    folder = finished.folder
    before = set(folder.glob("run/one/*/pretrain/model/steps.log"))
    out = ran(folder, *finished.arguments, *TWO_BY_TWO)
    (log,) = {*folder.glob("run/one/*/pretrain/model/steps.log")} - before
    total, each = map(int, re.search(r"ips_total: (\d+) .* ips: (\d+)", log.read_text()).groups())
    assert round(total / each) == 4  # data-parallel ranks
    assert json.loads((log.parents[1] / "metrics").read_text())["step"] == 3
    assert "evaluate-dense\n" in out


@pytest.mark.slow
def test_a_killed_rank_fails_the_step_and_leaves_no_process(finished):
    """On one node; `tests/launch` covers two."""
    run = finished.start("-o", "Distributed.dp_degree=2", *FOREVER)
    wait_for_step(run)
    workers = processes(finished.folder, "-m lathe pretrain")
    ranks = {environment(pid)["RANK"]: pid for pid in workers if "RANK" in environment(pid)}
    assert sorted(ranks) == ["0", "1"]
    os.kill(ranks["1"], signal.SIGKILL)
    _, err = run.communicate(timeout=120)
    assert run.returncode == 1
    assert err.startswith("error[killed]: pretrain: rank 1 ended with exit code -9")
    assert not processes(finished.folder, "lathe") and not processes(finished.folder)


def wait_for_step(run: subprocess.Popen) -> None:
    for line in run.stdout:
        if "step 3/" in line:
            return
    pytest.fail(run.stderr.read())


@pytest.mark.parametrize("name", ["pretrain", pytest.param("full", marks=pytest.mark.long)])
@pytest.mark.slow
def test_a_run_whose_artifacts_all_live_in_a_store(tmp_path, recipe, corpus, s3, monkeypatch, name):
    monkeypatch.setenv("LATHE_STORE", f"{s3}/runs")
    upload(corpus, f"{s3}/corpus")
    recipes = ["--recipe", recipe]
    if name == "full":
        recipes += ["--prune-recipe", recipe, "--qat-recipe", recipe]
    ran(tmp_path, name, *recipes, "--corpus", f"{s3}/corpus/", "--name", "one")
    (folder,) = (path for path in tmp_path.glob(f"run/one/{name}-*") if path.is_dir())
    tasks = {path.name for path in folder.iterdir() if path.is_dir()}
    kept = {uri.rstrip("/").rsplit("/", 1)[1] for uri in list_uris(f"{s3}/runs/{folder.name}/")}
    assert {"prepare", "pretrain", "evaluate-dense"} <= kept <= tasks
    model = fetch(f"{s3}/runs/{folder.name}/pretrain/model/", tmp_path / "fetched")
    assert load_checkpoint(model).digest
    log = (tmp_path / "run/one/run.log").read_text()
    given = [uri for text in EXECUTOR_INPUT.findall(log) for uri in input_uris(json.loads(text))]
    assert len(given) >= 3 and all(uri.startswith(f"{s3}/runs/") for uri in given)


EXECUTOR_INPUT = re.compile(r"Got executor_input:\n    (\{\n.*?\n    \})\n", re.S)


def input_uris(task: dict) -> list[str]:
    artifacts = task["inputs"].get("artifacts", {}).values()
    return [one["uri"] for listed in artifacts for one in listed["artifacts"]]


@pytest.mark.slow
def test_a_signal_leaves_no_process(finished):
    run = finished.start(*FOREVER)
    wait_for_step(run)
    assert processes(finished.folder)
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=120)
    assert run.returncode == 128 + signal.SIGTERM
    assert "interrupted" in err
    assert not processes(finished.folder)


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_and_the_next_one_resumes(tmp_path, recipe, corpus):
    arguments = ("pretrain", "--recipe", recipe, "--corpus", corpus, "--name", "one")
    own = [sys.executable]  # not a fork: its pid is the run's
    run = start(tmp_path, *arguments, *FOREVER, python=own)
    wait_for_step(run)
    second = start(tmp_path, *arguments)
    _, err = second.communicate(timeout=240)
    assert second.returncode == 2
    assert err.startswith("error[in-use]: ") and "run/one: " in err and str(run.pid) in err

    run.kill()
    assert ended_within(30, tmp_path)
    third = start(tmp_path, *arguments, *FOREVER)
    shown = [next(third.stdout) for _ in range(4)]
    assert "reused" in "".join(shown)  # from the finished `prepare`
    third.send_signal(signal.SIGTERM)
    assert third.wait(180) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    "begun", ["pipelines.local.runner", "executor_main", "lathe_launch.local", "-m lathe pretrain"]
)
@pytest.mark.slow
def test_a_run_that_is_killed_while_a_process_starts_leaves_none(finished, begun):
    run = finished.start(*TWO_BY_TWO, *FOREVER)
    while not processes(finished.folder, begun):
        assert run.poll() is None
        time.sleep(0.01)
    run.kill()
    assert ended_within(30, finished.folder)


@pytest.mark.slow
def test_a_run_whose_runner_is_killed_fails_and_leaves_no_process(finished):
    run = finished.start(*FOREVER)
    wait_for_step(run)
    (runner,) = processes(finished.folder, "pipelines.local.runner")
    os.kill(runner, signal.SIGKILL)
    run.communicate(timeout=120)
    assert run.returncode == 1
    assert ended_within(30, finished.folder)


def ended_within(seconds: float, folder: Path) -> bool:
    deadline = time.monotonic() + seconds
    while processes(folder, ""):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def processes(folder: Path, of: str = "executor_main") -> list[int]:
    """Pids of the stages' processes, whose command lines contain the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_text().replace("\0", " ")
        except OSError:
            continue
        if of in command and str(folder) in command:
            found.append(int(path.parent.name))
    return found


def environment(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


def test_log_shows_lathe_and_keeps_a_defects_traceback():
    log = StageLog()
    lines = """\
10:00:00.000 - INFO - Executing task \x1b[96m'prune'\x1b[0m
    [KFP Executor 2026-01-01 10:00:00 INFO]: Got executor_input:
    {
    }
    [lathe] pruned 3 heads
    [rank0]:step 1/3, loss 5.2, 9 s left
    [rank1]:step 1/3, loss 5.2, 9 s left
    Traceback (most recent call last):
      File "x.py", line 1, in <module>
    KeyError: 'h.0'
10:00:01.000 - ERROR - Task \x1b[96m'prune'\x1b[0m finished with status \x1b[91mFAILURE\x1b[0m"""
    shown = [text for line in lines.splitlines() for text in log.feed(line)]
    assert shown == ["prune", "    pruned 3 heads", "    step 1/3, loss 5.2, 9 s left"]
    assert log.failed == "prune"
    assert str(log.error()).splitlines()[:2] == [
        "prune: failed",
        "    Traceback (most recent call last):",
    ]
    assert str(log.error()).endswith("KeyError: 'h.0'")

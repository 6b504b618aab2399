"""Runs every component with Pipelines' own command and the environment of a pod."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from components.step import NAMES, component
from tests.support.pod_step import POD, RUN, SECONDS, PodStep, run_all

pytestmark = pytest.mark.slow


def in_process(step: PodStep, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a step's command as a local process, with the environment of its container."""
    kept = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    kept |= {name: str(folder / name) for name in ("MPLCONFIGDIR", "HF_HOME")}
    environment = {**kept, **POD, "PYTHONPATH": str(Path.cwd())}
    return subprocess.run(
        step.command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
    )


def test_it_ends_with_its_status_and_has_its_outputs(tmp_path: Path) -> None:
    ran: list[str] = []

    def run(name: str, **given: Any) -> dict[str, Path]:
        folder = tmp_path / RUN / f"{name}-{len(ran)}"
        folder.mkdir(parents=True)
        ran.append(name)
        step = PodStep(component(name), folder, given)
        done = in_process(step, folder)
        assert done.returncode == 0, f"{name}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        assert json.loads((folder / "executor_output.json").read_text())
        assert all(path.exists() for path in step.outputs.values()), name
        return step.outputs

    run_all(tmp_path, run)
    assert set(ran) == set(NAMES)

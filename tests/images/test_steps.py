"""Runs every component in the train image with the restrictions of a pod."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from components.step import NAMES, component
from tests.support.pod_step import POD, RUN, SECONDS, PodStep, run_all
from tests.support.podman import RESTRICTED

pytestmark = pytest.mark.containers

LIMITS = ["--memory=4g", "--cpus=2", "--pids-limit=1024", "--shm-size=2g"]


def test_it_ends_with_its_status_and_has_its_outputs(images: dict[str, str], work: Path) -> None:
    ran: list[str] = []
    variables = {name: value for name, value in POD.items() if name != "HOME"}
    options = [f"--env={name}={value}" for name, value in variables.items()]
    options += [f"--volume={work}:{work}", *RESTRICTED, *LIMITS]

    def run(name: str, **given: Any) -> dict[str, Path]:
        folder = work / RUN / f"{name}-{len(ran)}"
        folder.mkdir(parents=True)
        for made in (folder, folder.parent):
            made.chmod(0o777)
        ran.append(name)
        step = PodStep(component(name), folder, given)
        command = ["podman", "run", "--rm", *options, images["train"], *step.command]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, f"{name}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        assert all(path.exists() for path in step.outputs.values()), name
        return step.outputs

    run_all(work, run)
    assert set(ran) == set(NAMES)

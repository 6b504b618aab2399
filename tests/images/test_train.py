"""The train image works with the restrictions of a cluster."""

import json
import subprocess
from pathlib import Path

import pytest

from lathe.model.checkpoint import Checkpoint
from tests.support.micro_run import RECIPE
from tests.support.podman import mount, run

pytestmark = pytest.mark.containers


def test_python_and_the_command(images: dict[str, str]) -> None:
    assert run(images["train"], "python", "--version").startswith("Python 3.11.")
    shown = run(images["train"], "lathe", "--help")
    assert "Usage: lathe" in shown and "pretrain" in shown


def test_a_user_mistake_ends_with_status_2(images: dict[str, str]) -> None:
    command = ["podman", "run", "--rm", images["train"], "lathe", "pretrain", "-r", "no-such"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "hint:" in done.stderr


def test_a_few_steps_from_text(images: dict[str, str], work: Path, corpus: Path) -> None:
    (work / "micro.yaml").write_text(RECIPE)
    options = [f"--volume={work}:/work", mount(corpus, "/corpus")]
    recipe = ["--recipe", "/work/micro.yaml"]
    prepare = ["--source", "/corpus", "--output", "/work/tokens"]
    pretrain = ["--data", "/work/tokens", "--output", "/work/dense"]
    run(images["train"], "lathe", "prepare", *prepare, *recipe, options=options)
    run(images["train"], "lathe", "pretrain", *pretrain, *recipe, options=options)
    trace = map(json.loads, (work / "dense" / "train.jsonl").read_text().splitlines())
    assert max(line["step"] for line in trace) == 3
    assert (work / "dense" / "model.safetensors").stat().st_uid == 10001


def test_a_model_is_rehearsed_on_the_triton_inside(
    images: dict[str, str], work: Path, exported: Path, checkpoint: Checkpoint
) -> None:
    (work / "micro.yaml").write_text(RECIPE)
    options = [
        f"--volume={work}:/work",
        "--workdir=/work",
        mount(exported, "/exported"),
        mount(checkpoint.folder, "/model"),
    ]
    deploy = ["/exported", "--model", "/model", "--output", "/work/deployed", "--no-keep-running"]
    recipe = ["--recipe", "/work/micro.yaml"]
    run(images["train"], "lathe", "deploy", *deploy, *recipe, options=options)
    report = json.loads((work / "deployed" / "deploy.json").read_text())
    assert report

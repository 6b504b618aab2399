"""The whole DAG with real stages at micro size, from a corpus to responses of a server."""

import json
import re

import pytest

from tests.pipelines.test_run import start

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("triton")]

# This learning rate ruins the model, and the gate tolerates no loss.
RUINOUS = (
    "Optimizer.lr.max_lr=0.5",
    "Optimizer.lr.warmup_rate=0",
    "Gate.max_perplexity_increase=0",
)


def test_full_deploys_and_qat_of_its_model_is_stopped_by_the_gate(tmp_path, recipe, corpus):
    recipes = ("--recipe", recipe, "--prune-recipe", recipe, "--qat-recipe", recipe)
    run = start(tmp_path, "full", "--corpus", corpus, *recipes, "--name", "all")
    out, err = run.communicate(timeout=600)
    assert run.returncode == 0, out + err

    stages = re.findall(r"^[a-z][a-z0-9-]+$", out, re.M)
    assert stages[0] == "prepare" and len(stages) == len(set(stages)) == 14
    assert stages.index("gate") < stages.index("report") == 13
    assert re.search(r"dense.*pruned.*INT8", out)
    for row in ("Parameters", "File", "Perplexity", "Cloze accuracy", "Prefill", "Decode"):
        assert row in out
    assert "make serve && make client" in out

    folder = tmp_path / "run" / "all"
    assert "data:image/svg+xml" in (folder / "report.html").read_text()
    rehearsal = json.loads((tmp_path / "run" / "deployed" / "deploy.json").read_text())
    assert rehearsal["identical"] + rehearsal["near_ties"] == rehearsal["prompts"]

    (dense,) = folder.glob("*/pretrain/model")
    overrides = [word for override in RUINOUS for word in ("-o", override)]
    arguments = ("--model", dense, "--corpus", corpus, "--recipe", recipe, "--name", "qat")
    run = start(tmp_path, "qat", *arguments, *overrides)
    out, err = run.communicate(timeout=600)
    assert run.returncode == 0, out + err
    assert "failed: perplexity" in out and "not deployed" in out
    assert (tmp_path / "run" / "qat" / "report.html").is_file()

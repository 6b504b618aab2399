"""Every component to its exit status, by Pipelines' own command, with the variables of a pod."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.components.test_components import NAMES
from tests.pipelines.conftest import write_corpus, write_recipe
from tests.support.pod_step import PodStep

pytestmark = pytest.mark.slow

RUN = "9fed934b-5541-4cd9-87fd-64364ad2c765"
SECONDS = 600
POD = {
    "POD_NAME": "full-x7k2p-system-container-impl-1",
    "POD_NAMESPACE": "lathe",
    "POD_UID": "edf7d8cc-017e-45fa-b3c9-225582d2deba",
    "KFP_RUN_ID": RUN,
    "HOME": "/nonexistent",  # the image's is read-only
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
}
Run = Callable[..., dict[str, Path]]


def in_process(step: PodStep, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a step's command on this machine, as the container of a pod does in its image."""
    kept = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    kept |= {name: str(folder / name) for name in ("MPLCONFIGDIR", "HF_HOME")}
    environment = {**kept, **POD, "PYTHONPATH": str(Path.cwd())}
    return subprocess.run(
        step.command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
    )


def run_all(folder: Path, run: Run) -> None:
    """Run every component, each on what those before it have made; `run(name, **given)` returns
    its outputs."""
    given = {"recipe": str(write_recipe(folder)), "overrides": ["Production.burst_seconds=1"]}
    corpus = {"corpus": str(write_corpus(folder))}
    run("inputs", recipes=[given["recipe"]], overrides=given["overrides"], **corpus)
    data = run("prepare", **given, **corpus)["data"]
    vocabulary = run("tokenizer", **given, **corpus)["vocabulary"]
    numbers = {"shard": 1, "of": 1, "tokenizer": vocabulary}
    tokens = run("tokenize", **given, **corpus, **numbers)["tokens"]
    run("join", **given, shards=[tokens], finished=[])
    dense = run("pretrain", **given, data=data)["model"]
    run("certify", **given, data=data, kills=1)
    pruned = run("prune", **given, model=dense, data=data)["pruned"]
    sensitivity = run("analyze", **given, model=pruned, data=data)["sensitivity"]
    made = {"model": pruned, "data": data, "sensitivity": sensitivity}
    int8 = run("quantize", **given, **made)["quantized"]
    found: dict[str, Any] = {"sensitivity": sensitivity}
    for name, model in {"dense": dense, "int8": int8}.items():
        scored = run("evaluate", **given, model=model, data=data)["evaluation"]
        exported = run("export", **given, model=model, data=data)["exported"]
        found |= {f"{name}_model": model, f"{name}_evaluation": scored, f"{name}_export": exported}
    compared = {"baseline": found["dense_evaluation"], "candidate": found["int8_evaluation"]}
    verdict = run("gate", **given, **compared)["verdict"]
    rehearsed = {"exported": found["int8_export"], "model": int8, "data": data}
    deployed = run("deploy", **given, **rehearsed)["deployed"]
    run("report", **given, **found, deployed=deployed)
    chosen = {"target": "bytes=0.99", "budget": "perplexity=99", "ratios": [0.5]}
    chosen |= {name: found[name] for name in ("dense_evaluation", "dense_export")}
    chosen |= {"models": [int8], "evaluations": [found["int8_evaluation"]]}
    run("choose", **given, **chosen, exports=[found["int8_export"]])
    live = {"deployed": deployed, "evaluation": found["int8_evaluation"], "gate": verdict}
    live |= {"production": f"file://{folder}/nowhere", "model": int8, "data": data}
    run("release", **given, **live)
    ended = {"state": "COMPLETE", "error": {}, "pipelineJobResourceName": RUN}
    run("notify", pipeline="full", status=ended)


def test_it_ends_with_its_status_and_has_its_outputs(tmp_path: Path) -> None:
    ran: list[str] = []

    def run(name: str, **given: Any) -> dict[str, Path]:
        component = getattr(importlib.import_module(f"components.{name}.component"), name)
        folder = tmp_path / RUN / f"{name}-{len(ran)}"
        folder.mkdir(parents=True)
        ran.append(name)
        step = PodStep(component, folder, given)
        done = in_process(step, folder)
        assert done.returncode == 0, f"{name}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        assert json.loads((folder / "executor_output.json").read_text())
        assert all(path.exists() for path in step.outputs.values()), name
        return step.outputs

    run_all(tmp_path, run)
    assert set(ran) == set(NAMES)

"""The compiled pipelines are what they were, and ask of the cluster what they should."""

from pathlib import Path

import pytest
import yaml

from pipelines.compile import FUNCTIONS, built, write

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return {path.stem: path for path in write(tmp_path_factory.mktemp("build"))}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_drift(compiled, name):
    golden = GOLDEN / f"{name}.yaml"
    assert compiled[name].read_text() == golden.read_text(), (
        f"pipeline {name} compiles to something else than {golden}: "
        "if that is meant, run `make golden` and look at its diff"
    )


@pytest.mark.parametrize("name", ["qat", "full"])
def test_deploy_waits_for_the_gate_and_is_never_cached(compiled, name):
    spec = next(yaml.load_all(compiled[name].read_text(), yaml.CSafeLoader))
    branches = {_name(t): t for t in _tasks(spec) if _name(t).startswith("gate-")}
    verdict = "inputs.parameter_values['pipelinechannel--gate-Output'] == true"
    conditions = {k: t["triggerPolicy"]["condition"] for k, t in branches.items()}
    assert conditions == {"gate-passed": verdict, "gate-failed": f"!({verdict})"}
    passed, failed = (
        spec["components"][branches[k]["componentRef"]["name"]]["dag"]["tasks"]
        for k in ("gate-passed", "gate-failed")
    )
    assert [_name(t) for t in passed.values()] == ["to-production", "deploy", "report"]
    assert [_name(t) for t in failed.values()] == ["report-2"]
    assert "enableCache" not in passed["deploy"]["cachingOptions"]


@pytest.mark.parametrize("name", ["qat", "full"])
def test_a_model_goes_live_only_where_releases_are_named_and_beside_the_live_one(compiled, name):
    spec = next(yaml.load_all(compiled[name].read_text(), yaml.CSafeLoader))
    tasks = {_name(task): task for task in _tasks(spec)}
    conditions = {
        key: tasks[key]["triggerPolicy"]["condition"]
        for key in ("to-production", "as-good-as-live")
    }
    assert conditions == {
        "to-production": "inputs.parameter_values['pipelinechannel--production'] != ''",
        "as-good-as-live": "inputs.parameter_values['pipelinechannel--challenge-Output'] == true",
    }
    (last,) = spec["components"][tasks["as-good-as-live"]["componentRef"]["name"]]["dag"]["tasks"]
    assert last == "release"
    for key in ("resolve", "challenge", "release"):
        assert "enableCache" not in tasks[key]["cachingOptions"]
    assert "retryPolicy" not in tasks["release"] or not tasks["release"]["retryPolicy"].get(
        "maxRetryCount"
    )


def test_full_compresses_the_pruned_model(compiled):
    spec = next(yaml.safe_load_all(compiled["full"].read_text()))
    tasks = spec["root"]["dag"]["tasks"]

    def producer(task, name):
        return tasks[task]["inputs"]["artifacts"][name]["taskOutputArtifact"]["producerTask"]

    assert producer("prune", "model") == "pretrain"
    assert producer("analyze", "model") == producer("quantize", "model") == "prune"
    assert producer("gate", "baseline") == "evaluate-dense"
    assert producer("gate", "candidate") == "evaluate-int8"
    assert producer("condition-branches-1", "pipelinechannel--export-int8-exported") == (
        "export-int8"
    )


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.slow
def test_a_handful_of_parameters(name):
    assert len(built(name).component_spec.inputs) <= 10


def _tasks(spec):
    dags = [spec["root"], *spec["components"].values()]
    return [task for dag in dags if "dag" in dag for task in dag["dag"]["tasks"].values()]


def _name(task):
    return task["taskInfo"]["name"]

"""Tracking a pipeline's steps in MLflow, in a file store read back by MLflow's client."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kfp import dsl

from components.artifacts import record
from components.stage import stage
from lathe_base.errors import Code, UserError
from lathe_base.tracking import runs

RUN = "9fed934b-5541"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An MLflow file store, with the environment of a step's pod."""
    pytest.importorskip("mlflow")
    for name, value in runs.DEFAULTS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "store"))
    monkeypatch.setenv("KFP_RUN_ID", RUN)
    log = logging.getLogger("lathe")
    before = log.handlers, log.propagate, log.level
    yield tmp_path / "store"
    log.handlers, log.propagate = before[:2]
    log.setLevel(before[2])


def step(monkeypatch: pytest.MonkeyPatch, name: str, *, local: str = "") -> None:
    """Make this process look like KFP's executor of a step."""
    above = f"{local}/{name}" if local else f"s3://b/pipelines/full/{RUN}/{name}/0a1b2c"
    outputs = {"metrics": {"artifacts": [{"uri": f"{above}/metrics"}]}}
    given = json.dumps({"inputs": {}, "outputs": {"artifacts": outputs}})
    monkeypatch.setattr(sys, "argv", ["executor_main", "--executor_input", given])


def metrics_artifact(folder: Path) -> dsl.Metrics:
    return dsl.Metrics(name="metrics", uri=str(folder / "metrics"))


def tracked(store: Path) -> dict[str, Any]:
    """Read MLflow's runs by name."""
    from mlflow import MlflowClient

    client = MlflowClient(str(store))
    experiment = client.get_experiment_by_name("lathe")
    found = client.search_runs([experiment.experiment_id]) if experiment else []
    assert len({run.info.run_name for run in found}) == len(found)
    return {run.info.run_name: run for run in found}


def results(run) -> dict[str, float]:
    """The metrics of a run without what its steps have used."""
    return {name: value for name, value in run.data.metrics.items() if "usage." not in name}


def test_a_run_of_the_pipeline_has_a_run_for_each_step(store, tmp_path, monkeypatch):
    for name, loss in (("pretrain", 3.5), ("evaluate-int8", 4.5)):
        step(monkeypatch, name)
        with stage("tiny", ["Engine.max_steps=7"]):
            figures = {"loss": loss, "passed": True, "seen.a (b)": 5, "ratio": float("inf")}
            record(figures, metrics_artifact(tmp_path))
    found = tracked(store)
    parent = found.pop(f"full {RUN}")
    assert set(found) == {"pretrain", "evaluate-int8"}
    for run in found.values():
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.params["recipe"] == "tiny"
        assert run.data.params["Engine.max_steps"] == "7"
        assert run.info.status == "FINISHED" and run.info.end_time >= run.info.start_time
    assert results(found["pretrain"]) == {"loss": 3.5, "passed": 1.0, "seen.a _b_": 5}
    assert found["pretrain"].data.metrics["usage.cpu_hours"] > 0
    assert results(parent) == {
        **{"pretrain.loss": 3.5, "pretrain.passed": 1.0, "pretrain.seen.a _b_": 5},
        **{"evaluate-int8.loss": 4.5, "evaluate-int8.passed": 1.0, "evaluate-int8.seen.a _b_": 5},
    }
    assert parent.info.status == "FINISHED"


def test_no_request_has_more_parameters_than_mlflows_server_takes(store, monkeypatch):
    from mlflow import MlflowClient
    from mlflow.utils.validation import MAX_PARAMS_TAGS_PER_BATCH

    sizes, log_batch = [], MlflowClient.log_batch

    def counted(client, run, metrics=(), params=()):
        sizes.append(len(params))
        log_batch(client, run, metrics, params)

    monkeypatch.setattr(MlflowClient, "log_batch", counted)
    settings = {f"Group.key_{n}": n for n in range(2 * MAX_PARAMS_TAGS_PER_BATCH + 1)}
    runs.open_step(runs.Task("full", RUN, "pretrain"), settings)
    assert max(sizes) <= MAX_PARAMS_TAGS_PER_BATCH  # a file store, as here, has no limit
    assert len(tracked(store)["pretrain"].data.params) == len(settings)


def test_curves_of_a_training_are_thinned_out(store, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    model = tmp_path / "model"
    model.mkdir()
    lines = [{"step": n, "loss": 5.0 - n / 1000, "lr": 1e-3} for n in range(1, 2502)]
    lines.insert(1000, {"step": 1000, "eval_loss": 4.2, "eval_perplexity": 66.7})
    (model / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    step(monkeypatch, "pretrain")
    with stage("tiny", []):
        record({}, metrics_artifact(tmp_path), dsl.Model(name="model", uri=str(model)))
    run = tracked(store)["pretrain"].info.run_id
    history = MlflowClient(str(store)).get_metric_history(run, "train.loss")
    points = sorted((point.step, point.value) for point in history)
    assert len(points) <= runs.POINTS
    assert points[0] == (1, 4.999) and points[-1] == (2501, 5.0 - 2.501)
    (only,) = MlflowClient(str(store)).get_metric_history(run, "train.eval_loss")
    assert (only.step, only.value) == (1000, 4.2)


def test_the_report_and_the_verdict_are_kept(store, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    (tmp_path / "page").write_text("<html>")
    (tmp_path / "verdict").write_text("{}")
    (tmp_path / "folder").mkdir()
    step(monkeypatch, "report")
    with stage("tiny", []):
        outputs = [
            dsl.HTML(name="page", uri=str(tmp_path / "page")),
            dsl.Artifact(name="verdict", uri=str(tmp_path / "verdict")),
            dsl.Model(name="folder", uri=str(tmp_path / "folder")),
        ]
        record({"INT8.perplexity": 3.5}, metrics_artifact(tmp_path), *outputs)
    run = tracked(store)["report"].info.run_id
    files = {file.path for file in MlflowClient(str(store)).list_artifacts(run)}
    assert files == {"page.html", "verdict.json"}


def test_a_step_that_fails_and_is_tried_again_is_one_run(store, tmp_path, monkeypatch):
    step(monkeypatch, "pretrain")
    with pytest.raises(SystemExit), stage("tiny", []):
        raise UserError("corpus.txt: empty", "give a file with text", Code.TOO_LITTLE_DATA)
    found = tracked(store)
    assert {run.info.status for run in found.values()} == {"FAILED"} and len(found) == 2
    with stage("tiny", []):
        record({"loss": 1.0}, metrics_artifact(tmp_path))
    again = tracked(store)
    assert {run.info.status for run in again.values()} == {"FINISHED"}
    assert {n: r.info.run_id for n, r in again.items()} == {
        n: r.info.run_id for n, r in found.items()
    }


def test_a_run_on_this_machine_has_the_name_of_its_folder(store, tmp_path, monkeypatch):
    monkeypatch.delenv("KFP_RUN_ID")
    step(monkeypatch, "prepare", local="/home/me/run/one/pretrain-2026-01-05-03-00-00-000001")
    with stage("tiny", []):
        record({"tokens": 5}, metrics_artifact(tmp_path))
    assert set(tracked(store)) == {"prepare", "pretrain 2026-01-05-03-00-00-000001"}


def test_a_turn_of_a_loop_on_this_machine_is_of_its_run(store, tmp_path, monkeypatch):
    monkeypatch.delenv("KFP_RUN_ID")
    run = "/home/me/run/one/pretrain-2026-01-05-03-00-00-000001"
    step(monkeypatch, "tokenize", local=f"{run}/for-loop-2-iteration-1")
    with stage("tiny", []):
        record({"tokens": 5}, metrics_artifact(tmp_path))
    assert set(tracked(store)) == {"tokenize", "pretrain 2026-01-05-03-00-00-000001"}


def test_a_file_that_cannot_be_kept_costs_that_file_only(store, tmp_path, monkeypatch, capsys):
    (tmp_path / "page").write_text("<html>")
    monkeypatch.setattr(runs.TrackedStep, "file", lambda *_: (_ for _ in ()).throw(OSError("full")))
    step(monkeypatch, "report")
    with stage("tiny", []):
        page = dsl.HTML(name="page", uri=str(tmp_path / "page"))
        record({"INT8.perplexity": 3.5}, metrics_artifact(tmp_path), page)
    assert "not logged to MLflow: page.html: full" in capsys.readouterr().out
    assert tracked(store)["report"].info.status == "FINISHED"


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["no server", "not installed"])
def test_an_unreachable_server_fails_nothing_and_is_contacted_once(
    store, tmp_path, monkeypatch, capsys, harm
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    if harm == "not installed":
        monkeypatch.setitem(sys.modules, "mlflow", None)
    step(monkeypatch, "pretrain")
    with stage("tiny", []):
        record({"loss": 1.0}, metrics_artifact(tmp_path))
    assert json.loads((tmp_path / "metrics").read_text())["loss"] == 1.0
    out = capsys.readouterr().out
    assert out.count("not logged to MLflow at http://127.0.0.1:9") == 1
    assert ("pip install 'lathe[tracking]'" in out) == (harm == "not installed")


@pytest.mark.slow
def test_without_an_address_mlflow_is_not_even_imported(tmp_path, monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "LATHE_MODEL_REGISTRY"):
        monkeypatch.delenv(name, raising=False)
    script = (
        "import sys\nfrom kfp import dsl\nfrom components.artifacts import record\n"
        "from components.stage import stage\n"
        "from lathe_base.tracking.models import register_release\n"
        "with stage('tiny', []):\n"
        f"    record({{'loss': 1.0}}, dsl.Metrics(name='m', uri={str(tmp_path / 'metrics')!r}))\n"
        "    register_release('gpt', 'sha256-0', 's3://b/gpt/', {})\n"
        "assert not {'mlflow', 'model_registry'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith('figures: {"loss": 1.0, ')

"""The scenarios of `make test-cluster` that work with the fake servers."""

from importlib import import_module
from typing import Any

import pytest
from typer.testing import CliRunner

from lathe_launch.cluster.api import LABELS
from pipelines.cluster.server import open_cluster
from tests.cluster import scenarios
from tests.cluster.site import Site
from tests.pipelines.test_doctor import cluster, play, quick
from tests.support.fake_kfp import frame
from tests.support.fake_trainer import run_command
from tests.support.tables import quick_only

__all__ = ["cluster"]


def in_this_process(module: str, arguments: list[str]) -> str:
    result = CliRunner().invoke(import_module(module).app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def site(cluster) -> Site:
    return Site(open_cluster("lathe"), command=in_this_process, poll=0.01)


def test_the_doctor(site, cluster):
    play(cluster, quick)
    assert scenarios.doctor(site).endswith(" ok, 1 warnings")  # about Triton's version
    assert not site.left_behind()


def test_a_training_on_two_nodes(kfp, site):
    kfp.script = [frame("RUNNING"), frame("SUCCEEDED")]
    scenarios.two_nodes(site)
    (run,) = kfp.runs.values()
    assert run["runtime_config"]["parameters"]["nodes"] == 2


@pytest.mark.parametrize("typed", ["", "lathe-pipeline"])
def test_a_run_of_the_form(kfp, site, cluster, typed):
    if typed:
        cluster.delete("serviceaccounts", "default-editor")
    site.submit("pretrain")
    scenarios.form(site)
    submitted, run = kfp.runs.values()
    parameters = run["runtime_config"]["parameters"]
    assert parameters.pop("overrides")[0] == "Engine.max_steps=120"
    assert parameters == {
        **{"recipe": "tiny", "kills": 0, "gpus": 0, "nodes": 2, "cpus": 0, "notify": False},
        **{"node_pool": "gpu", "queue": "", "memory": "", "model": "", "corpus": ""},
        **{"tokenizer": "", "cloze": ""},
    }
    assert run["pipeline_version_reference"] == submitted["pipeline_version_reference"]
    assert run["service_account"] == typed


@pytest.mark.parametrize("trained_again", quick_only([False, True], [True]))
def test_a_clone(kfp, site, cluster, trained_again):
    site.trained = site.submit("full", "-o", "Global.seed=3")
    start = site.start

    def start_and_run(body: dict[str, Any]) -> str:
        run = start(body)
        for step in ("inputs", "gate", *(["pretrain"] if trained_again else [])):
            labels = {"pipeline/runid": run, "lathe/stage": step}
            spec = {"containers": [{"name": "main", "image": "i"}]}
            body = {"metadata": {"name": step, "labels": labels}, "spec": spec}
            cluster.create("pods", body | {"status": {"phase": "Succeeded"}})
        return run

    site.start = start_and_run
    if trained_again:
        with pytest.raises(AssertionError, match="pretrain"):
            scenarios.cloned(site)
        return
    assert scenarios.cloned(site) == "ran gate, inputs"
    first, second = (run["runtime_config"]["parameters"] for run in kfp.runs.values())
    assert second == first | {"overrides": ["Global.seed=3", "Gate.max_accuracy_drop=0.5"]}


@pytest.mark.slow
def test_a_recurring_run_of_the_form(kfp, site, cluster):
    site.submit("pretrain")
    create = kfp._create_recurring

    def create_and_start(request: Any) -> Any:
        made = create(request)
        run = kfp.create_scheduled_run(made["recurring_run_id"], *["RUNNING"] * 9, "FAILED")
        labels = {"pipeline/runid": run, "lathe/stage": "pretrain"}
        spec = {"containers": [{"name": "main", "image": "i"}]}
        body = {"metadata": {"name": "step", "labels": labels}, "spec": spec}
        cluster.create("pods", body | {"status": {"phase": "Running"}})
        return made

    kfp._create_recurring = create_and_start
    kfp.script = [frame("RUNNING")]

    def end(method: str, path: str) -> None:
        if kfp.sent("POST", ".*:terminate") and cluster.list("pods"):
            cluster.delete("pods", "step")

    cluster.faults.append(end)
    assert scenarios.recurring(site) == "started 1 at its time, which trained"
    assert not kfp.recurring_runs and len(kfp.sent("POST", ".*:terminate")) == 1


def test_a_cancelled_run(kfp, site, cluster):
    kfp.script = [frame("RUNNING"), frame("RUNNING"), frame("FAILED")]
    labels = {"pipeline/runid": "", "lathe/stage": "pretrain"}
    submit = site.submit

    def submit_and_start(*arguments: str, nodes: int) -> str:
        run = submit(*arguments, nodes=nodes)
        metadata = {"name": "step", "labels": labels | {"pipeline/runid": run}}
        status = {"phase": "Running"}
        spec = {"containers": [{"name": "main", "image": "i"}]}
        cluster.create("pods", {"metadata": metadata, "spec": spec, "status": status})
        return run

    def end(method: str, path: str) -> None:
        if kfp.sent("POST", ".*:terminate") and cluster.list("pods"):
            cluster.delete("pods", "step")

    site.submit = submit_and_start
    cluster.faults.append(end)
    assert scenarios.cancel(site).startswith("nothing left after")
    assert len(kfp.sent("POST", ".*:terminate")) == 1


def test_a_schedule(kfp, site):
    assert scenarios.schedule(site) == "created, updated, removed"
    assert not kfp.recurring_runs


@pytest.mark.slow
def test_a_network_without_the_policies_and_services(site, cluster):
    play(cluster, run_command)
    with pytest.raises(AssertionError, match="Pipelines is closed"):
        scenarios.network(site)
    assert not site.left_behind()


def test_leftover_objects(site, cluster):
    site.runs.append("mine")
    for run in ("mine", "another"):
        metadata = {"name": f"job-{run}", "labels": LABELS | {"lathe/run-id": run}}
        body = {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": metadata,
            "spec": {"runtimeRef": {"name": "lathe-torch"}},
        }
        cluster.create("trainjobs.trainer.kubeflow.org", body)
    assert site.left_behind() == ["job-mine"]

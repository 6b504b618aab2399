"""The scenarios of `make test-cluster` that work with the fake servers."""

from importlib import import_module

import pytest
from typer.testing import CliRunner

from lathe_launch.cluster.api import LABELS
from pipelines.cluster.kube_context import open_cluster
from tests.cluster import scenarios
from tests.cluster.site import Site
from tests.pipelines.test_doctor import cluster, play, quick
from tests.support.fake_kfp import frame
from tests.support.fake_trainer import run_command

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

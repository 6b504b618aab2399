"""Queries of a node pool from a fake Kubernetes API server on the loopback interface."""

import json
from dataclasses import asdict
from urllib.parse import urlsplit

import pytest
import yaml

from components.machines import Pool
from components.plan import plan
from lathe_base.checks import Finding, run_checks
from lathe_base.config.settings import Placement
from lathe_base.errors import Code, StageError
from lathe_launch.cluster.nodes import gpu_memory, node_pool_shortage
from lathe_launch.shape import require_whole_gpus
from pipelines.cluster.preflight import Preflight
from tests.support.errors import raises
from tests.support.loopback import JSONHandler, LoopbackServer

POOL = {"a100-1": "8", "a100-2": "8", "a100-3": "4", "a100-4": None}
LABELS = {
    "a100-1": {"nvidia.com/gpu.memory": "81920"},
    "a100-2": {"nvidia.com/gpu.memory": "16384", "nvidia.com/mig-1g.5gb.memory": "4864"},
    "a100-3": {"nvidia.com/gpu.memory": "unknown"},
}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A cluster with four nodes in the pool a100, and the token `right`."""

    class Handler(JSONHandler):
        def do_GET(self) -> None:
            address = urlsplit(self.path)
            allowed = self.headers["Authorization"] == "Bearer right"
            items = [
                {
                    "metadata": {
                        "name": name,
                        "labels": {"lathe/node-pool": "a100"} | LABELS.get(name, {}),
                    },
                    "status": {"allocatable": {"cpu": "96"} | ({"nvidia.com/gpu": n} if n else {})},
                }
                for name, n in POOL.items()
            ]
            body = json.dumps({"kind": "NodeList", "apiVersion": "v1", "items": items}).encode()
            self.reply(body, 200 if allowed and address.path == "/api/v1/nodes" else 403)

    path = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(path))
    with LoopbackServer(Handler) as server:

        def allow(token: str) -> None:
            config = {
                "current-context": "x",
                "clusters": [{"name": "c", "cluster": {"server": server.url}}],
                "users": [{"name": "u", "user": {"token": token}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            }
            path.write_text(yaml.safe_dump(config))

        yield allow


def test_a_pool_that_is_large_enough(cluster):
    cluster("right")
    assert node_pool_shortage("a100", nodes=2, gpus=8) is None
    assert node_pool_shortage("a100", nodes=3, gpus=4, context="x") is None


def test_pods_may_share_a_node(cluster):
    cluster("right")
    assert node_pool_shortage("a100", nodes=5, gpus=4) is None
    assert node_pool_shortage("a100", nodes=20, gpus=1) is None
    assert node_pool_shortage("a100", nodes=6, gpus=4)


def test_one_that_is_not_says_what_it_has(cluster):
    cluster("right")
    listed = "a100-1 has 8, a100-2 has 8, a100-3 has 4, a100-4 has 0"
    shortage = node_pool_shortage("a100", nodes=3, gpus=8)
    assert shortage and f"each (nvidia.com/gpu) are requested, but {listed}" in shortage.what


def test_no_such_pool(cluster):
    cluster("right")
    shortage = node_pool_shortage("h100", nodes=1, gpus=1)
    assert shortage and "no node has the label lathe/node-pool=h100" in shortage.what


def test_submit_warns_and_strict_refuses(cluster):
    cluster("right")
    pool = Pool(nodes=1, gpus=1, node_pool="scaled-to-zero")
    arguments = asdict(pool)
    (warning,) = run_checks(Preflight("full", arguments).nodes(), is_preflight=True)
    assert warning.state == "warning"
    assert warning.said.startswith("node pool scaled-to-zero: no node has the label")
    assert "pods wait until an autoscaler adds nodes" in warning.said
    (problem,) = run_checks(Preflight("full", arguments, is_strict=True).nodes(), is_preflight=True)
    assert problem.state == "broken" and "no node has the label" in problem.said


def test_failing_queries(cluster):
    with raises(Code.UNAUTHORIZED, kind=StageError):
        node_pool_shortage("a100", nodes=1, gpus=1)
    cluster("wrong")
    with raises(Code.SERVER_ERROR, "Forbidden", kind=StageError):
        node_pool_shortage("a100", nodes=1, gpus=1)
    with raises(Code.UNAUTHORIZED, kind=StageError):
        node_pool_shortage("a100", nodes=1, gpus=1, context="other")


def test_the_smallest_gpu_of_a_pool_counts(cluster):
    cluster("right")
    assert gpu_memory("a100") == 16 * 2**30
    assert gpu_memory("a100", settings=Placement(gpu_resource="nvidia.com/mig-1g.5gb")) == (
        4864 * 2**20
    )
    shared = Placement(gpu_resource="nvidia.com/gpu.shared")
    assert gpu_memory("a100", settings=shared) == 16 * 2**30
    assert gpu_memory("a100", settings=Placement(gpu_resource="amd.com/gpu")) is None


def test_submit_refuses_a_recipe_that_cannot_fit_the_pool(cluster):
    cluster("right")
    arguments = {"recipe": "gpt-1.3b-dp8", "overrides": [], "gpus": 8, "node_pool": "a100"}
    found: dict[bool, list[Finding]] = {}
    for is_tried in (True, False):
        checks = Preflight("full", arguments, is_tried=is_tried).recipe("recipe", "gpt-1.3b-dp8")
        found[is_tried] = [one for one in run_checks(checks, True) if one.state != "ok"]
    (problem,) = found[True]
    assert problem.state == "broken"
    assert "recipe gpt-1.3b-dp8 with NODES=1 GPUS=8" in problem.said
    assert "which has 17.2 GB" in problem.said and "NO_TRY=1" in problem.hint
    assert "-o Distributed." in problem.hint
    assert not found[False]


SHARED = {"nvidia.com/gpu.replicas": "4"}


@pytest.mark.parametrize(
    ("resource", "labels", "gpus", "said"),
    [
        ("nvidia.com/mig-1g.10gb", {}, 2, "are MIG slices"),
        ("nvidia.com/gpu.shared", {}, 2, "are time slices"),
        ("nvidia.com/gpu", SHARED, 2, "are time slices"),
        ("nvidia.com/gpu", {"nvidia.com/gpu.product": "A100-MIG-1g.5gb"}, 2, "are MIG slices"),
        ("nvidia.com/gpu", SHARED, 1, None),
        ("nvidia.com/mig-1g.10gb", {}, 1, None),
        ("nvidia.com/gpu", {}, 8, None),
    ],
)
def test_several_slices_for_one_pod_are_refused(
    resource: str, labels: dict[str, str], gpus: int, said: str | None
) -> None:
    settings = Placement(gpu_resource=resource)
    if said is None:
        require_whole_gpus(gpus, settings, [labels])
        return
    with raises(Code.LAYOUT, said) as raised:
        require_whole_gpus(gpus, settings, [labels])
    assert "GPUS=1" in raised.value.hint


def test_the_first_step_of_a_run_refuses_slices() -> None:
    """Runs made in the UI do not pass the checks of `make submit`."""
    slices = ["Launch.gpu_resource=nvidia.com/mig-1g.10gb"]
    plan("tiny", slices, pool=Pool(gpus=1))
    plan("tiny", [], pool=Pool(gpus=2))
    step = ["Launch.steps.prune.gpu_resource=nvidia.com/gpu.shared"]
    for overrides in (slices, step):
        with raises(Code.LAYOUT, overrides[0].partition("=")[2]):
            plan("tiny", overrides, pool=Pool(gpus=2))

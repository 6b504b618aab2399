"""Rolling out releases to pods with real Triton servers under load."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lathe.release import publish as production
from lathe.release.publish import Acceptance, publish_release, roll_back
from lathe.release.rehearsal import Request, greedy
from lathe.release.release import Releases, open_releases, release_name
from lathe_base.config.settings import ProductionSettings, Recipe
from lathe_base.errors import StageError
from lathe_launch.cluster import rollout
from lathe_serving.state import LOOPBACK
from tests.support import warm
from tests.support.fake_deployments import NAME, Deployments, deployment, until
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.small_release import RECIPE
from tests.support.triton_pods import Program, Service

PROMPT = "The old clerk saw the"
QUICK = {"POLL_SECONDS": 0.1, "RENEW_SECONDS": 0.5, "LOCK_SECONDS": 2.0}


class Asking(threading.Thread):
    """A client that sends one request after another, each on a new connection."""

    def __init__(self, service: Service) -> None:
        super().__init__(daemon=True)
        self.url = f"http://{service.address}/v2/models/gpt/generate"
        self.texts: list[str] = []
        self.failures: list[str] = []
        self.ended = threading.Event()

    def __enter__(self) -> "Asking":
        self.start()
        until(lambda: self.texts)
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.join()

    def run(self) -> None:
        body = json.dumps({"text_input": PROMPT, **greedy(8)}).encode()
        while not self.ended.wait(0.01):
            try:
                with LOOPBACK.open(Request(self.url, body), timeout=30) as reply:
                    self.texts.append(json.loads(reply.read())["text_output"])
            except Exception as error:
                self.failures.append(repr(error))


@pytest.fixture
def recipe(s3: str) -> Recipe:
    settings = ProductionSettings(
        releases=f"{s3}/releases", burst_seconds=0.5, burst_clients=4, rollout_seconds=60
    )
    return RECIPE.model_copy(update={"Production": settings})


@pytest.fixture
def releases(recipe: Recipe) -> Releases:
    return open_releases(recipe)


@pytest.fixture
def cluster(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_cluster: None
) -> Iterator[FakeKubernetes]:
    monkeypatch.setattr(rollout, "POLL_SECONDS", 0.1)
    for name, seconds in QUICK.items():
        monkeypatch.setattr(rollout, name, seconds)
    with FakeKubernetes() as fake:
        monkeypatch.setenv("KUBECONFIG", str(fake.kubeconfig(tmp_path)))
        monkeypatch.delenv("POD_NAMESPACE", raising=False)
        yield fake


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path / "pods")


@pytest.fixture
def controller(cluster: FakeKubernetes, program: Program) -> Iterator[Deployments]:
    """Controller of a Deployment with one pod that waits for its first release."""
    cluster.create("deployments.apps", deployment(replicas=1))
    made = Deployments(cluster, program)
    made.start()
    yield made
    cluster.stop()
    made.join()
    until(lambda: all(pod.stopped for pod in made.made))


def live(releases: Releases) -> str | None:
    pointer = releases.pointer()
    return pointer.live and pointer.live.release


@pytest.mark.slow
def test_the_model_is_swapped_under_its_clients_and_a_failure_goes_back(
    recipe: Recipe,
    releases: Releases,
    controller: Deployments,
    program: Program,
    deployed: Path,
    other_deployed: Path,
) -> None:
    first = publish_release(recipe, deployed)
    assert first.rolled and [pod.release for pod in controller.ready] == [first.address]
    service = Service(controller)
    try:
        with Asking(service) as client:
            second = publish_release(recipe, other_deployed, replaces=first.release)
            until(lambda: len(client.texts) > 5 and len(set(client.texts[-5:])) == 1)
        assert client.failures == []
        assert len(set(client.texts)) == 2 and client.texts[0] != client.texts[-1]
        assert (live(releases), second.before) == (second.release, first.release)

        pointer = releases.pointer()
        program.refuses = first.address
        with Asking(service) as client, pytest.raises(StageError) as failed:
            publish_release(recipe, deployed, replaces=second.release)
        assert "no space left in /models" in str(failed.value)
        assert f"rolled back to {second.address}, which is serving" in str(failed.value)
        assert client.failures == [] and len(set(client.texts)) == 1
        assert releases.pointer() == pointer

        program.refuses = None
        with Asking(service) as client:
            assert roll_back(recipe).release == live(releases) == first.release
        assert client.failures == []
        assert [pod.release for pod in controller.ready] == [first.address]
    finally:
        service.close()


KILLED = """
import os, pathlib, signal, sys
from lathe_launch.cluster import rollout
from lathe.release.publish import publish_release
from lathe_base.config.settings import Recipe
rollout._wait = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
publish_release(Recipe.model_validate_json(sys.argv[1]), pathlib.Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_killed_in_the_rollout_and_run_again(
    recipe: Recipe,
    releases: Releases,
    cluster: FakeKubernetes,
    controller: Deployments,
    deployed: Path,
) -> None:
    command = [*warm.python(), "-c", KILLED, recipe.model_dump_json(), str(deployed)]
    assert subprocess.run(command, env=os.environ, check=False).returncode == -signal.SIGKILL
    assert rollout.LOCK in cluster.get("deployments.apps", NAME)["metadata"]["annotations"]
    assert live(releases) is None
    made = publish_release(recipe, deployed)
    assert live(releases) == made.release
    assert [pod.release for pod in controller.ready] == [made.address]
    assert rollout.LOCK not in cluster.get("deployments.apps", NAME)["metadata"]["annotations"]


@pytest.mark.slow
def test_two_at_once_do_not_mix(
    recipe: Recipe,
    releases: Releases,
    controller: Deployments,
    deployed: Path,
    other_deployed: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meet = threading.Barrier(2)
    accepted = Acceptance(8, 8, 11, 100, 1.0, 1.0, 1.0)

    def accept(*_: object) -> Acceptance:
        meet.wait()
        return accepted

    monkeypatch.setattr(production, "accept", accept)
    folders = deployed, other_deployed
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(publish_release, recipe, folder) for folder in folders]
    failed = [run.exception() for run in runs if run.exception()]
    done = {run.result().release: run.result() for run in runs if not run.exception()}
    assert all("is being rolled out by another" in str(error) for error in failed)
    won = done.pop(live(releases))
    assert [pod.release for pod in controller.ready] == [won.address]
    # The other one was rejected, or on a busy machine came first: they never mix.
    assert [was.release for was in releases.pointer().previous] == list(done)
    assert {release_name(folder / "repository") for folder in folders} == set(releases.published())

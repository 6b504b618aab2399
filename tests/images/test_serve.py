"""The serve image serves a read-only model repository."""

import json
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.support.podman import mount, podman, run, running

pytestmark = pytest.mark.containers


def test_it_answers_is_healthy_and_ends_when_told(images: dict[str, str], repository: Path) -> None:
    options = [mount(repository, "/models"), "--publish=127.0.0.1::8000"]
    with running(images["serve"], *options) as server:
        address = podman("port", server, "8000").strip()
        wait_ready(server, f"http://{address}/v2/health/ready")
        question = {"text_input": "All that glitters", "max_tokens": 5}
        (name,) = (p.name for p in repository.iterdir() if not p.name.endswith("-score"))
        asked = urllib.request.Request(
            f"http://{address}/v2/models/{name}/generate", json.dumps(question).encode()
        )
        with urllib.request.urlopen(asked, timeout=30) as reply:
            answer = json.load(reply)
        assert answer["token_count"] == 5 and answer["finish_reason"] == "length"
        podman("healthcheck", "run", server)
        assert podman("inspect", "--format", "{{.State.Health.Status}}", server) == "healthy\n"
        with pytest.raises(urllib.error.HTTPError):  # models cannot be unloaded by requests
            urllib.request.urlopen(f"http://{address}/v2/repository/models/{name}/unload", b"{}")
        podman("stop", "--time", "40", server)
        assert podman("inspect", "--format", "{{.State.ExitCode}}", server) == "0\n"


def test_it_is_unhealthy_without_a_server(images: dict[str, str]) -> None:
    with running(images["serve"], '--entrypoint=["sleep", "60"]') as idle:
        done = subprocess.run(["podman", "healthcheck", "run", idle], capture_output=True)
    assert done.returncode == 1


def test_it_fetches_a_release(images: dict[str, str]) -> None:
    shown = run(
        images["serve"],
        "-m",
        "lathe_base.storage",
        "fetch",
        "--help",
        options=["--entrypoint=python"],
    )
    assert "usage" in shown.lower()


def test_it_has_the_gateway(images: dict[str, str]) -> None:
    options = ["--entrypoint=python", "--env=LATHE_API_KEYS="]
    assert "--max-requests" in run(
        images["serve"], "-m", "lathe_serving.gateway", "--help", options=options
    )


def wait_ready(server: str, address: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(address, timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail(podman("logs", server)[-3000:])

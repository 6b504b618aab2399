"""Reporting training progress in the TrainJob's status to Kubeflow Trainer's server."""

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from lathe.train import trace
from lathe_base.progress import Bar
from tests.support.fake_status_server import StatusServer, serve
from tests.support.small_run import records, run
from tests.support.tables import quick_only
from tests.support.tls import certificate


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StatusServer]:
    """Run the status server, with the environment that Trainer sets in containers."""
    pem, authority = certificate(tmp_path)
    with serve(pem) as server:
        (tmp_path / "token").write_text(server.token + "\n")
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", server.url)
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(authority))
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
        monkeypatch.setattr(trace, "STATUS_SECONDS", 0.05)
        yield server
        wait_for_no_reporter()


def reporters() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "trainjob-status"]


def wait_for_no_reporter() -> None:
    deadline = time.monotonic() + 60
    while reporters():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def metrics(status: dict[str, list[dict[str, str]]]) -> dict[str, float]:
    return {metric["name"]: float(metric["value"]) for metric in status["metrics"]}


def test_a_training_tells_how_far_it_is(
    server: StatusServer, small_data: Path, tmp_path: Path
) -> None:
    run("pretrain", small_data, tmp_path / "out")
    wait_for_no_reporter()
    assert server.refused == []
    statuses = [status for _, status in server.received]
    percents = [s["progressPercentage"] for s in statuses if "progressPercentage" in s]
    assert percents == sorted(percents) and percents[-1] == 100 and len(percents) >= 2
    assert statuses[-1]["estimatedRemainingSeconds"] == 0
    last = metrics(statuses[-1])
    assert set(last) == {
        *("loss", "learning_rate", "tokens_per_second", "eval_loss", "eval_perplexity")
    }
    for name, key in (("loss", "loss"), ("learning_rate", "lr"), ("eval_loss", "eval_loss")):
        assert last[name] == pytest.approx(records(tmp_path / "out", key)[-1], rel=1e-5)


def test_messages_keep_their_distance_and_the_last_one_is_the_newest(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "STATUS_SECONDS", 0.5)
    reporter = trace.open_status()
    assert reporter
    steps = Bar("step", 1000)
    for loss in range(1000):
        steps.advance()
        reporter.metrics({"loss": float(loss), "grad_norm": float("nan")})
        reporter.progress(steps)
        time.sleep(0.001)
    reporter.close()
    wait_for_no_reporter()
    times = [at for at, _ in server.received]
    assert len(times) >= 2
    assert all(later - at > 0.45 for at, later in pairwise(times[:-1]))
    assert metrics(server.received[-1][1]) == {"loss": 999.0}
    assert server.received[-1][1]["progressPercentage"] == 100


def test_a_new_token_is_used(server: StatusServer, tmp_path: Path) -> None:
    reporter = trace.open_status()
    assert reporter
    for token in ("of-the-pod", "renewed"):
        server.token = token
        (tmp_path / "token").write_text(token)
        before = len(server.received)
        deadline = time.monotonic() + 60
        while len(server.received) == before and time.monotonic() < deadline:
            reporter.metrics({"loss": 1.0})
            time.sleep(0.02)
        assert len(server.received) > before
    reporter.close()


@pytest.mark.parametrize(
    "harm",
    quick_only(
        ["refuses", "silent", "unknown authority", "no token", "no url"],
        ["refuses", "silent", "no token"],
    ),
)
def test_a_server_that_fails_does_not_hinder_a_training(
    server: StatusServer,
    small_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    harm: str,
) -> None:
    if harm == "refuses":
        server.token = "another"
    elif harm == "silent":
        server.delay = 600.0
        monkeypatch.setattr(trace, "STATUS_TIMEOUT", 0.2)
    elif harm == "unknown authority":
        (tmp_path / "other").mkdir()
        monkeypatch.setenv(trace.STATUS_AUTHORITY, str(certificate(tmp_path / "other")[1]))
    elif harm == "no token":
        (tmp_path / "token").unlink()
    else:
        monkeypatch.setenv(trace.STATUS_URL, "https://127.0.0.1:9/status")
    caplog.set_level(logging.WARNING, "lathe")
    run("pretrain", small_data, tmp_path / "out", overrides=("Engine.max_steps=2",))
    wait_for_no_reporter()
    assert (tmp_path / "out" / "lathe.json").exists() and server.received == []
    told = [line for line in caplog.messages if "cannot update the TrainJob's status" in line]
    assert len(told) == 1


def test_a_report_does_not_wait_for_the_server(server: StatusServer) -> None:
    server.delay = 2.0
    reporter = trace.open_status()
    assert reporter
    began = time.monotonic()
    for _ in range(1000):
        reporter.metrics({"loss": 1.0})
    reporter.close()
    assert time.monotonic() - began < server.delay


def test_a_process_ends_without_waiting_for_it(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    script = (
        "from pathlib import Path\nfrom lathe.train.trace import StatusReporter\n"
        f"reporter = StatusReporter('https://192.0.2.1/', Path(), Path({str(token)!r}))\n"
        "reporter.metrics({'loss': 1.0})\n"
    )
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("missing", [trace.STATUS_URL, trace.STATUS_AUTHORITY, trace.STATUS_TOKEN])
def test_nothing_happens_where_trainer_does_not_ask(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.delenv(missing)
    assert trace.open_status() is None and reporters() == []

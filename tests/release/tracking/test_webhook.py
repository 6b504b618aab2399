"""Notifications about runs, received by a web server on the loopback interface."""

import base64
import gzip
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kfp import dsl
from typer.testing import CliRunner

from components.notify.component import notify
from lathe_base.errors import Code
from lathe_base.storage import write_text
from lathe_base.tracking import webhook
from lathe_base.tracking.webhook import Notice, post
from pipelines.local import run
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.loopback import LoopbackServer, QuietHandler
from tests.support.silent import ANSWERS, server

RUN = "9fed934b-5541-4a0c-b6c8-b33c5ac2d5ab"
FIGURES = {"n_params": 2.59e6, "flops": 5.51e6, "n_bytes": 10.4e6, "perplexity": 180.0}
NOTICE = Notice("full", "20261123-101500", "succeeded")


@dataclass
class Listener:
    """A webhook.

    Attributes:
        address: URL, which contains a secret part.
        status: HTTP status of its responses.
    """

    address: str = ""
    status: int = 200
    received: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    state = Listener()

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            state.received.append(json.loads(body))
            self.reply(status=state.status)

    with LoopbackServer(Handler) as server:
        state.address = f"{server.url}/services/SECRET"
        monkeypatch.setenv("LATHE_WEBHOOK", state.address)
        yield state


@pytest.fixture
def in_a_pod(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KFP_RUN_ID", RUN)
    monkeypatch.setenv("LATHE_KFP_UI", "https://kubeflow.example.com/pipeline/")
    log = logging.getLogger("lathe")
    before = log.handlers, log.propagate, log.level
    yield
    log.handlers, log.propagate = before[:2]
    log.setLevel(before[2])


def run_notify(place: str, folder: Path, state: str, is_wanted: bool = True) -> str:
    """Run the step `notify` of a run with artifacts below `place`; returns its page."""
    uri = f"{place}/full/{RUN}/notify/1916f9ff-2cbb-49ff-b62c-c124d328123d"
    # In a pod, the path is derived from the address, below /s3.
    outputs = {name: SimpleNamespace(uri=f"{uri}/{name}", path=str(folder / name))
               for name in ("page", "notice")}  # fmt: skip
    status = dsl.PipelineTaskFinalStatus(
        state=state,
        pipeline_job_resource_name="full-x7k2p",
        pipeline_task_name="exit-handler-1",
        error_code=None,
        error_message=None,
    )
    notify.python_func(pipeline="full", is_wanted=is_wanted, **outputs, status=status)
    return (folder / "page").read_text()


def put(place: str, artifact: str, values: object) -> None:
    step, name = artifact.split("/", 1)
    execution = "0a16f9ff-2cbb-49ff-b62c-c124d328123d"
    text = values if isinstance(values, str) else json.dumps(values)
    write_text(f"{place}/full/{RUN}/{step}/{execution}/{name}", text)


@pytest.mark.usefixtures("in_a_pod")
def test_the_end_of_a_run_is_notified_with_verdict_table_and_links(
    s3: str, listener: Listener, tmp_path: Path
) -> None:
    metrics = {f"dense.{key}": value for key, value in FIGURES.items()}
    metrics |= {f"INT8.{key}": value for key, value in (FIGURES | {"n_bytes": 2.6e6}).items()}
    put(f"{s3}/v2", "report/metrics", metrics)
    put(f"{s3}/v2", "report/page", "<!doctype html>")
    put(f"{s3}/v2", "gate/verdict", {"verdict": "pass", "passed": True, "reasons": ["as good"]})
    assert run_notify(f"{s3}/v2", tmp_path, "COMPLETE") == "<!doctype html>"  # the report
    (received,) = listener.received
    assert received == json.loads((tmp_path / "notice").read_text())
    assert (received["pipeline"], received["run"]) == ("full", RUN)
    assert (received["state"], received["verdict"]) == ("succeeded", "passed")
    assert received["figures"]["INT8"]["n_bytes"] == 2.6e6
    page = f"https://kubeflow.example.com/pipeline/#/runs/details/{RUN}"
    assert received["links"]["run"] == page
    assert received["links"]["report"].startswith(f"{s3}/v2/full/{RUN}/report/")
    text = received["text"]
    assert text.startswith(f"lathe full {RUN}: succeeded, gate passed\nas good\n```\n")
    assert "2.60 MB 0.25x" in text and text.endswith(f"report: {received['links']['report']}")


@pytest.mark.usefixtures("in_a_pod")
@pytest.mark.parametrize(
    ("state", "word"), [("FAILED", "failed"), ("CANCELED", "cancelled"), ("RUNNING", "ended")]
)
def test_so_is_a_run_that_has_failed(
    s3: str, listener: Listener, tmp_path: Path, state: str, word: str
) -> None:
    page = run_notify(s3, tmp_path, state)
    assert f"<h1>full: {word}</h1>" in page and "https://kubeflow.example" in page
    (received,) = listener.received
    assert received["state"] == word and received["verdict"] == "" and received["figures"] == {}
    assert received["text"].startswith(f"lathe full {RUN}: {word}\nrun: https://kubeflow.example")


@pytest.mark.usefixtures("in_a_pod")
def test_a_run_that_notifies_nobody_has_a_page(s3: str, listener: Listener, tmp_path: Path) -> None:
    checkpoint = "pretrain/model/lathe.json"
    for artifact, text in ((checkpoint, "{}"), ("pretrain/page", "<html>loss</html>")):
        put(f"{s3}/v2", artifact, text)
    assert run_notify(f"{s3}/v2", tmp_path, "COMPLETE", is_wanted=False) == "<html>loss</html>"
    assert not listener.received and not (tmp_path / "notice").exists()


@pytest.mark.usefixtures("in_a_pod")
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("phase", "denied", "word"),
    [
        ("Succeeded", False, "succeeded"),  # a retry of the lost pod succeeded
        ("Failed", False, "failed"),
        ("Error", False, "failed"),
        ("Running", False, "ended"),
        ("Succeeded", True, "ended"),
    ],
)
def test_the_state_comes_from_argo_without_a_final_one_in_pipelines(
    s3: str,
    listener: Listener,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    denied: bool,
    word: str,
    compressed: bool,
) -> None:
    with FakeKubernetes() as kubernetes:
        monkeypatch.setenv("KUBECONFIG", str(kubernetes.kubeconfig(tmp_path)))
        nodes = {"exit-handler-1": phase, "notify": "Running", "prepare": "Failed"}
        listed = {name: {"displayName": name, "phase": is_in} for name, is_in in nodes.items()}
        status: dict[str, object] = {"nodes": listed}
        if compressed:  # as Argo does for large workflows
            packed = base64.b64encode(gzip.compress(json.dumps(listed).encode()))
            status = {"nodes": {}, "compressedNodes": packed.decode()}
        workflow = {"metadata": {"name": "full-x7k2p"}, "status": status}
        kubernetes.create("workflows.argoproj.io", workflow, "lathe")
        kubernetes.denied = {("get", "workflows")} if denied else set()
        run_notify(s3, tmp_path, "RUNNING")
    (received,) = listener.received
    assert received["state"] == word


@pytest.mark.usefixtures("in_a_pod")
def test_without_the_store_the_notification_has_no_metrics(
    s3: str, listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    run_notify(s3, tmp_path, "COMPLETE")
    (received,) = listener.received
    assert received["state"] == "succeeded" and "no metrics: s3://" in received["text"]


def test_nobody_is_notified_without_an_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("LATHE_WEBHOOK", raising=False)
    post(NOTICE)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://127.0.0.1:9/services/SECRET", "failed to send the notification: "),
        ("file:///services/SECRET", "the value of LATHE_WEBHOOK is not an http(s) address"),
        ("http://[::1/services/SECRET", "failed to send the notification: "),
        ("SECRET", "the value of LATHE_WEBHOOK is not an http(s) address"),
    ],
)
def test_an_address_that_does_not_answer_is_a_warning_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, address: str, said: str
) -> None:
    monkeypatch.setenv("LATHE_WEBHOOK", address)
    post(NOTICE)
    (message,) = caplog.messages
    assert said in message and "SECRET" not in message


def test_neither_does_one_that_refuses_or_never_answers_fail_a_run(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listener.status = 404
    post(NOTICE)
    monkeypatch.setattr(webhook, "SECONDS", 0.3)
    with server(ANSWERS["silent"]) as port:
        monkeypatch.setenv("LATHE_WEBHOOK", f"http://127.0.0.1:{port}/services/SECRET")
        post(NOTICE)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings[0] == "127.0.0.1 rejected the notification: 404 Not Found"
    assert "timed out" in warnings[1] and "SECRET" not in caplog.text


def test_a_failed_local_run_is_notified_with_its_reason(
    listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise run.StageFailed("prepare failed: the corpus is empty", Code.TOO_LITTLE_DATA)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "run", fails)
    result = CliRunner().invoke(run.app, ["pretrain", "--name", "mine"])
    assert result.exit_code == 1
    (received,) = listener.received
    assert (received["run"], received["state"]) == ("mine", "failed")
    assert received["reasons"] == ["prepare failed: the corpus is empty"]

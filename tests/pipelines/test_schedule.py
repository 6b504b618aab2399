"""`python -m pipelines.cluster.schedule`: one recurring run per pipeline, never two active."""

import json
import re
from datetime import UTC, datetime
from itertools import pairwise

import pytest
import yaml
from typer.testing import CliRunner

from components.images import PADDLE
from lathe_base.errors import Code
from pipelines.cluster.schedule import OWNER, app, stale_schedules
from pipelines.cluster.server import open_cluster
from tests.pipelines.test_golden import body
from tests.support.errors import raises
from tests.support.fake_kubernetes import FakeKubernetes

WEEKLY, DAILY = "0 0 3 * * 1", "0 30 4 * * *"


def schedule(*arguments: str):
    return CliRunner().invoke(app, [*arguments])


def test_made_updated_and_removed(kfp):
    corpus = ("--corpus", "s3://texts/new/", "--gpus", "2")
    result = schedule("set", "full", "--cron", WEEKLY, *corpus)
    assert result.exit_code == 0, result.output
    assert f"schedule lathe-full: created, {WEEKLY}" in result.output
    times = re.findall(r"  Mon (\S+ 03:00:00)\n", result.output)
    dates = [datetime.strptime(time, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC) for time in times]
    assert len(dates) == 3 and dates[0] > datetime.now(UTC)
    assert {(b - a).days for a, b in pairwise(dates)} == {7}

    (first,) = kfp.recurring_runs.values()
    assert first["display_name"] == "lathe-full" and first["mode"] == "ENABLE"
    assert first["trigger"] == {"cron_schedule": {"cron": WEEKLY}}
    assert first["no_catchup"] is True and first["max_concurrency"] == "1"
    assert first["service_account"] == "lathe-pipeline"
    parameters = first["runtime_config"]["parameters"]
    assert parameters["corpus"] == "s3://texts/new/"
    assert parameters["gpus"] == 2
    version = kfp.versions[first["pipeline_version_reference"]["pipeline_version_id"]]
    spec = next(yaml.safe_load_all(kfp.uploads[version["pipeline_version_id"]]))
    tasks = body(spec)
    assert "enableCache" not in tasks["inputs"]["cachingOptions"]  # every run must look them up
    read = tasks["prepare"]["inputs"]["parameters"]["contents"]["taskOutputParameter"]
    assert read == {"outputParameterKey": "text", "producerTask": "inputs"}

    result = schedule("set", "full", "--cron", DAILY, *corpus)
    assert f"schedule lathe-full: updated, {DAILY}" in result.output
    (second,) = kfp.recurring_runs.values()
    assert second["recurring_run_id"] != first["recurring_run_id"]
    assert second["trigger"] == {"cron_schedule": {"cron": DAILY}} and second["mode"] == "ENABLE"
    assert max(kfp.active) == 1

    result = schedule("remove", "full")
    assert (result.exit_code, result.output) == (0, "schedule lathe-full: removed\n")
    assert kfp.recurring_runs == {}
    result = schedule("remove", "full")
    assert (result.exit_code, result.output) == (0, "schedule lathe-full: there was none\n")


@pytest.mark.slow
def test_with_paddle(kfp):
    assert schedule("set", "full", "--cron", WEEKLY, "--engine", "paddle").exit_code == 0
    (run,) = kfp.recurring_runs.values()
    parameters = run["runtime_config"]["parameters"]
    assert "Compress.engine=paddle" in parameters["overrides"]
    assert parameters["prune_recipe"] == "tiny-prune-paddle"
    (version,) = kfp.versions.values()
    assert re.fullmatch("0123456789ab-[0-9a-f]{8}", version["display_name"])
    spec = next(yaml.safe_load_all(kfp.uploads[version["pipeline_version_id"]]))
    executors = spec["deploymentSpec"]["executors"]
    assert executors["exec-prune"]["container"]["image"] == PADDLE


@pytest.mark.slow
def test_other_pipelines_schedules_stay_and_many_of_a_name_become_one(kfp):
    for name in ("pretrain", "full"):
        assert schedule("set", name, "--cron", WEEKLY).exit_code == 0
    made = next(r for r in kfp.recurring_runs.values() if r["display_name"] == "lathe-pretrain")
    for n in range(3):  # more than one page
        kfp.recurring_runs[f"copy-{n}"] = made | {"recurring_run_id": f"copy-{n}"}
    assert schedule("set", "pretrain", "--cron", DAILY).exit_code == 0
    names = sorted(run["display_name"] for run in kfp.recurring_runs.values())
    assert names == ["lathe-full", "lathe-pretrain"]


@pytest.mark.parametrize("wait", [False, True])
def test_a_run_of_the_schedule_ends_before_the_schedule_goes(kfp, monkeypatch, wait):
    monkeypatch.setattr("pipelines.cluster.schedule.POLL_SECONDS", 0.01)
    assert schedule("set", "full", "--cron", WEEKLY).exit_code == 0
    (made,) = kfp.recurring_runs
    kfp.create_scheduled_run("another", *["RUNNING"] * 99)
    run = kfp.create_scheduled_run(made, "RUNNING", "RUNNING", "RUNNING", "SUCCEEDED")
    result = schedule("remove", "full", *(["--wait"] if wait else []))
    assert result.exit_code == 0, result.output
    assert ("waiting for lathe-1" if wait else "terminating lathe-1") in result.output
    assert f"#/runs/details/{run}" in result.output and "lathe-0" not in result.output
    assert kfp.runs[run]["state"] == ("SUCCEEDED" if wait else "FAILED")
    assert kfp.recurring_runs == {} and max(kfp.active) == 1
    assert kfp.active[-1] == 0  # disabled before it was deleted


def test_a_run_that_does_not_end_leaves_the_schedule_as_it_was(kfp, monkeypatch):
    monkeypatch.setattr("pipelines.cluster.schedule.POLL_SECONDS", 0.01)
    monkeypatch.setattr("pipelines.cluster.schedule.END_SECONDS", 0.1)
    assert schedule("set", "full", "--cron", WEEKLY).exit_code == 0
    (made,) = kfp.recurring_runs
    kfp.create_scheduled_run(made, *["RUNNING"] * 999)
    monkeypatch.setattr(type(kfp), "_terminate", lambda *_: {})
    result = schedule("remove", "full")
    assert result.exit_code == 1 and "error[timeout]: " in result.output
    assert list(kfp.recurring_runs) == [made]


@pytest.mark.slow
def test_an_update_does_not_stop_a_started_run(kfp):
    assert schedule("set", "full", "--cron", WEEKLY).exit_code == 0
    (old,) = kfp.recurring_runs
    kfp.create_scheduled_run(old, "RUNNING", "SUCCEEDED")
    assert schedule("set", "full", "--cron", DAILY).exit_code == 0
    assert kfp.recurring_runs[old]["mode"] == "DISABLE" and len(kfp.recurring_runs) == 2
    assert schedule("set", "full", "--cron", WEEKLY).exit_code == 0  # the old run has ended
    assert len(kfp.recurring_runs) == 1 and max(kfp.active) == 1


def test_a_schedule_that_cannot_be_replaced_is_active_as_before(kfp):
    schedule("set", "pretrain", "--cron", WEEKLY)
    (before,) = kfp.recurring_runs.values()
    kfp.refuse_recurring = True
    result = schedule("set", "pretrain", "--cron", DAILY)
    assert result.exit_code == 1
    assert result.output.endswith(
        f"error[server-error]: {kfp.url}: 400 the quota of schedules is used up\n"
    )
    assert list(kfp.recurring_runs.values()) == [before] and before["mode"] == "ENABLE"


@pytest.mark.parametrize(
    ("cron", "message"),
    [
        ("0 3 * * 1", '.*\n  hint: .*"0 0 3 \\* \\* 1"'),
        ("0 0 25 * * 1", "hour: '25' is not in 0-23"),
        ("@weekly", "1 fields"),
    ],
)
def test_a_wrong_cron_is_explained_and_nothing_is_sent(kfp, cron, message):
    result = schedule("set", "pretrain", "--cron", cron)
    assert result.exit_code == 2
    assert re.match(rf"error\[invalid-value\]: cron '{re.escape(cron)}': {message}", result.output)
    assert not kfp.requests


def test_a_schedule_of_another_pipelines_version_is_stale(tmp_path, monkeypatch):
    def resource(name: str, tag: str, created: str, **labels: str) -> dict:
        images = [f"ghcr.io/kubeflow/kfp-{part}:{tag}" for part in ("launcher", "driver")]
        templates = json.dumps({"templates": [{"container": {"image": one}} for one in images]})
        metadata = {"name": name, "labels": labels, "creationTimestamp": created}
        return {"metadata": metadata, "spec": {"workflow": {"spec": templates}}}

    with FakeKubernetes() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
        cluster = open_cluster("lathe")
        assert stale_schedules(cluster) == "none to compare"
        workflows, schedules = "workflows.argoproj.io", "scheduledworkflows.kubeflow.org"
        server.create(workflows, resource("old", "2.16.0", "2026-01-01T00:00:00Z"))
        server.create(workflows, resource("new", "2.17.2", "2026-02-01T00:00:00Z"))
        scheduled = resource("night", "2.16.0", "2026-03-01T00:00:00Z", **{OWNER: "nightly"})
        server.create(workflows, scheduled)
        api = {"apiVersion": "kubeflow.org/v1beta1", "kind": "ScheduledWorkflow", "status": {}}
        server.create(schedules, api | resource("weekly", "2.17.2", "2026-02-01T00:00:00Z"))
        assert stale_schedules(cluster) == "weekly"
        server.create(schedules, api | resource("nightly", "2.16.0", "2026-01-01T00:00:00Z"))
        with raises(Code.WRONG_VERSION, "nightly runs ", "kfp-driver:2.16.0") as raised:
            stale_schedules(cluster)
        assert "kfp-launcher:2.17.2" in raised.value.what
        assert "make schedule" in raised.value.hint

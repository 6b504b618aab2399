"""Listing, fetching and comparing results of cluster and local runs."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from components.artifacts import FIGURES
from lathe.report.results import Results, read_results
from lathe_base.storage import write_text
from lathe_launch.usage import Usage
from pipelines.cluster import follow, runs
from pipelines.cluster.runs import _cluster_run, comparison_table
from tests.support import fake_store
from tests.support.fake_kfp import frame
from tests.support.fake_kubernetes import FakeKubernetes

PAGE = '<!doctype html><meta name="generator" content="Lathe"><title>A run</title>'
RECORDED = Path(__file__).with_name("recorded")
EXECUTION = "1916f9ff-2cbb-49ff-b62c-c124d328123d"
BEGAN = "2026-01-05T03:00:00Z"
ROOT = "private-artifacts/lathe/v2"
DENSE = {"n_params": 2.59e6, "flops": 5.51e6, "n_bytes": 10.4e6, "decode_ms": 0.58}
INT8 = {"n_params": 2.10e6, "flops": 4.52e6, "n_bytes": 2.25e6, "decode_ms": 0.4}


def figures(perplexity: float) -> dict[str, float]:
    models = {
        "dense": DENSE | {"perplexity": 180.0, "perplexity_stderr": 4.5},
        "INT8": INT8 | {"perplexity": perplexity, "perplexity_stderr": 4.4},
    }
    return {f"{name}.{key}": v for name, model in models.items() for key, v in model.items()}


def verdict(word: str) -> dict[str, object]:
    return {"verdict": word, "passed": word == "pass", "reasons": ["passed: perplexity 180 -> 171"]}


class Cluster:
    """A server with runs whose artifacts are in a bucket."""

    def __init__(self, kfp, bucket: str) -> None:
        self.kfp, self.root = kfp, f"{bucket}/{ROOT}"
        kfp.experiments["mine"] = {"experiment_id": "mine", "display_name": "lathe"}

    def add(self, run: str, minute: int = 0, experiment: str = "mine", **more) -> None:
        self.kfp.runs[run] = {
            "run_id": run,
            "experiment_id": experiment,
            "display_name": f"full {run}",
            "state": "SUCCEEDED",
            "created_at": f"2026-01-05T03:{minute:02}:00Z",
            "finished_at": f"2026-01-05T04:{minute:02}:30Z",
            "runtime_config": {"parameters": {"recipe": "tiny", "overrides": []}},
        } | more

    def record(self, run: str, artifact: str, text: object, pipeline: str = "full") -> None:
        """Write an artifact, `step/name`, to where Pipelines' launcher would."""
        step, name = artifact.split("/")
        place = f"{self.root}/{pipeline}/{run}/{step}/{EXECUTION}/{name}"
        write_text(place, text if isinstance(text, str) else json.dumps(text))


@pytest.fixture
def cluster(kfp, s3, monkeypatch) -> Cluster:
    made = Cluster(kfp, s3)
    monkeypatch.setenv("LATHE_PIPELINE_ROOT", made.root)
    made.add("one")
    made.record("one", "report-2/metrics", figures(171.0))
    made.record("one", "report-2/page", PAGE)
    made.record("one", "gate/verdict", verdict("pass"))
    return made


def command(*arguments: str):
    return CliRunner().invoke(runs.app, [*arguments])


def find_line(output: str, word: str) -> str:
    (line,) = (line for line in output.splitlines() if word in line)
    return line


def test_a_followed_run_ends_with_its_table_verdict_and_report(cluster):
    cluster.kfp.script = [frame("SUCCEEDED")]
    result = CliRunner().invoke(follow.app, ["one"])
    assert result.exit_code == 0, result.output
    assert re.search(r"Perplexity +│ 180\.00 ± 4\.50 │ 171\.00 ± 4\.40", result.output)
    assert "2.25 MB 0.22x" in result.output
    assert "gate    passed\n    passed: perplexity 180 -> 171\n" in result.output
    assert f"report  {cluster.root}/full/one/report-2/" in result.output
    assert result.output.endswith("download it: make report RUN=one\nthe run has succeeded\n")


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("LATHE_PIPELINE_ROOT", "", "the server's artifact location is unknown: no kube conte"),
        ("LATHE_PIPELINE_ROOT", "gs://bucket/lathe", "gs://bucket/lathe: not on S3"),
        ("AWS_ACCESS_KEY_ID", "", "the store's keys are not set; set AWS_ACCESS_KEY_ID"),
        ("AWS_SECRET_ACCESS_KEY", "wrong", "and the policies of the keys and of the bucket"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9", "127.0.0.1:9"),
    ],
)
def test_figures_that_cannot_be_read_say_why_in_a_line(cluster, monkeypatch, variable, value, said):
    cluster.kfp.script = [frame("SUCCEEDED")]
    monkeypatch.setenv(variable, value)
    result = CliRunner().invoke(follow.app, ["one"])
    assert result.exit_code == 0, result.output
    assert said in find_line(result.output, "no metrics: ")
    assert "wrong" not in result.output


def test_a_run_whose_steps_were_all_reused_says_so(cluster):
    cluster.add("two")
    told = CliRunner().invoke(follow.app, ["two"]).output
    assert "Pipelines reused an earlier run's steps" in find_line(told, "no metrics: ")


def test_a_store_within_the_cluster_needs_an_address_from_here(cluster, monkeypatch):
    monkeypatch.setenv("LATHE_PIPELINE_ROOT", cluster.root.replace("s3://", "minio://"))
    assert "gate    passed" in CliRunner().invoke(follow.app, ["one"]).output
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    told = find_line(CliRunner().invoke(follow.app, ["one"]).output, "no metrics: ")
    assert "set AWS_ENDPOINT_URL; for the store of Pipelines: kubectl -n kubeflow port-for" in told


def test_the_namespace_says_where_artifacts_are_or_the_run_does(cluster, monkeypatch, tmp_path):
    monkeypatch.delenv("LATHE_PIPELINE_ROOT")
    monkeypatch.setenv("LATHE_KFP_NAMESPACE", "lathe")
    with FakeKubernetes() as kubernetes:
        path = str(kubernetes.kubeconfig(tmp_path))
        monkeypatch.setenv("KUBECONFIG", str(path))
        data = {"defaultPipelineRoot": f"{cluster.root}?region=here"}
        kubernetes.create("configmaps", {"metadata": {"name": "kfp-launcher"}, "data": data})
        assert "171.00" in CliRunner().invoke(follow.app, ["one"]).output
        kubernetes.denied.add(("get", "configmaps"))
        told = CliRunner().invoke(follow.app, ["one"]).output
        assert "the ConfigMap kfp-launcher cannot be read; set LATHE_PIPELINE_ROOT to" in told
    cluster.add("one", runtime_config={"pipeline_root": cluster.root, "parameters": {}})
    assert "171.00" in CliRunner().invoke(follow.app, ["one"]).output


def test_the_logs_have_the_figures_where_the_store_cannot_be_read(cluster, monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("LATHE_KFP_NAMESPACE", "lathe")
    ended = {"exitCode": 0, "startedAt": BEGAN, "finishedAt": BEGAN}
    main = {"name": "main", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    status = {"phase": "Succeeded", "containerStatuses": [main | {"state": {"terminated": ended}}]}
    logged = {"report": figures(171.0), "gate": {"passed": 1.0}}
    with FakeKubernetes() as kubernetes:
        path = str(kubernetes.kubeconfig(tmp_path))
        monkeypatch.setenv("KUBECONFIG", str(path))
        for step, found in logged.items():
            labels = {"pipeline/runid": "one", "lathe/stage": step}
            made = {"metadata": {"name": step, "labels": labels}, "status": status}
            kubernetes.create("pods", made | {"spec": {"containers": [{"name": "main"}]}})
            kubernetes.log(step, FIGURES + json.dumps(found))
        result = CliRunner().invoke(follow.app, ["one"])
    assert result.exit_code == 0, result.output
    assert "171.00 ± 4.40" in result.output and "gate    passed\n" in result.output
    assert "the store's keys are not set" in find_line(result.output, "no report: ")
    assert FIGURES not in result.output


@pytest.mark.parametrize("never", ["0001-01-01T00:00:00Z", "1970-01-01T00:00:00Z"])
def test_runs_are_listed_newest_first_with_their_figures(cluster, never):
    cluster.add("two", 5, state="FAILED")
    cluster.add("three", 9, state="RUNNING", finished_at=never)
    cluster.add("foreign", 7, experiment="other")
    cluster.record("two", "gate/verdict", verdict("fail"))
    result = command("list")
    assert result.exit_code == 0, result.output
    lines = [line.split("│")[1:-1] for line in result.output.splitlines() if "│ full" in line]
    cells = [[cell.strip() for cell in line] for line in lines]
    assert [line[0] for line in cells] == ["three", "two", "one"]
    assert [line[2] for line in cells] == ["RUNNING", "FAILED", "SUCCEEDED"]
    assert [line[4] for line in cells] == ["", "1:00:30", "1:00:30"]
    assert [line[5] for line in cells] == ["-", "failed", "passed"]
    assert cells[2][6:] == ["INT8", "171.00 0.95x", "2.25 MB 0.22x", "0.40 ms 0.69x"]
    assert "│ three" in command("list", "--limit", "1").output
    assert "│ one" not in command("list", "--limit", "1").output


def test_no_width_cuts_an_id_or_a_name(cluster, monkeypatch):
    """The listing is copied from, and read by scripts."""
    identity, name = "0" * 36, f"full {'x' * 150}"
    cluster.add(identity, 5, display_name=name)
    monkeypatch.setenv("COLUMNS", "80")
    output = command("list").output
    assert identity in output and name in output and "…" not in output


def test_recipes_given_as_text_are_compared_key_by_key():
    runs = [
        SimpleNamespace(
            run_id=name, display_name=name, state="SUCCEEDED", state_history=[],
            created_at=datetime(2026, 1, 5, tzinfo=UTC), finished_at=None,
            runtime_config=SimpleNamespace(
                parameters={"recipe": f"Engine:\n  max_steps: {steps}\nGlobal: {{seed: 1}}\n"}
            ),
            run_details=None,
        )
        for name, steps in (("a", 5), ("b", 6))
    ]  # fmt: skip
    reader = SimpleNamespace(read=lambda run: Results())
    parameters = [_cluster_run(reader, run, {}).parameters for run in runs]
    assert [one["Engine.max_steps"] for one in parameters] == ["5", "6"]
    table = comparison_table(["a", "b"], parameters, [Results(), Results()])
    assert [*table.columns[0].cells] == ["Engine.max_steps"]


def test_runs_are_listed_without_the_store_too(cluster, monkeypatch):
    cluster.add("two", 5)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    result = command("list")
    assert result.exit_code == 0 and "│ one" in result.output
    assert result.output.count("no metrics: ") == 1


def test_a_run_as_a_real_server_tells_it(cluster):
    told = json.loads((RECORDED / "full-succeeded.json").read_text())
    given = {"experiment_id": "mine", "runtime_config": {"parameters": {"recipe": "tiny"}}}
    cluster.kfp.runs = {told["run_id"]: told | given}
    cluster.record(told["run_id"], "report/metrics", figures(171.0))
    line = find_line(command("list").output, told["run_id"])
    assert "SUCCEEDED" in line and "INT8" in line and "0:17:30" in line


def test_a_run_that_was_terminated_is_listed_as_such(cluster):
    told = json.loads((RECORDED / "pretrain-terminated.json").read_text())
    cluster.kfp.runs = {told["run_id"]: told | {"experiment_id": "mine"}}
    assert "CANCELED" in find_line(command("list").output, told["run_id"])


def test_no_runs_yet(kfp):
    result = command("list")
    assert (result.exit_code, result.output) == (0, "no runs yet\n")
    assert not kfp.sent("POST", ".*")


def test_a_report_is_fetched_and_opened_where_there_is_a_display(cluster, monkeypatch, tmp_path):
    opened: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs.webbrowser, "open", opened.append)
    monkeypatch.setenv("DISPLAY", ":0")
    for _ in range(2):  # the second time replaces the file
        result = command("report", "one")
        assert (result.exit_code, result.output) == (0, "build/reports/one.html\n")
    path = tmp_path / "build" / "reports" / "one.html"
    assert path.read_text() == PAGE
    assert opened == [path.as_uri()] * 2
    assert command("report", "one", "--output", "here.html", "--no-open").exit_code == 0
    monkeypatch.delenv("DISPLAY")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert command("report", "one").exit_code == 0 and len(opened) == 2
    assert (tmp_path / "here.html").read_text() == PAGE


def test_a_file_that_is_not_a_report_is_kept(cluster, tmp_path):
    mine = tmp_path / "mine.html"
    mine.write_text("my own")
    result = command("report", "one", "--output", str(mine))
    assert result.exit_code == 2 and "mine.html" in result.output
    assert mine.read_text() == "my own"


def test_missing_runs(cluster, monkeypatch):
    cluster.add("two", 5)
    result = command("report", "two")
    assert result.exit_code == 2 and "error[not-found]: run two: " in result.output
    assert "404" in command("report", "three").output
    assert "error[missing-option]: " in command("report", "").output
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    result = command("report", "one")
    assert result.exit_code == 2 and "error[not-found]: run one: s3://" in result.output


def test_a_file_that_no_step_writes(cluster):
    cluster.record("one", "report-2/metrics", "[1, 2")
    result = command("report", "one", "--no-open")
    assert result.exit_code == 2
    assert "error[not-found]: " in result.output and "report-2/" in result.output


def test_runs_are_compared_by_what_differs_and_by_their_figures(cluster):
    given = {"recipe": "tiny", "corpus": "s3://new", "overrides": ["A.b=1", "A.b=2", "C.d=1"]}
    cluster.add("two", 5, runtime_config={"parameters": given})
    cluster.record("two", "report/metrics", figures(188.1))
    cluster.record("two", "gate/verdict", verdict("inconclusive"))
    result = command("compare", "one, two")
    assert result.exit_code == 0, result.output

    def shown(name: str) -> list[str]:
        return [cell.strip() for cell in find_line(result.output, f"│ {name} ").split("│")[2:-1]]

    assert shown("A.b") == ["-", "2"] and shown("corpus") == ["-", "s3://new"]
    assert "recipe" not in result.output
    assert shown("gate") == ["passed", "NOT PROVEN"]
    assert shown("INT8: File") == ["2.25 MB", "2.25 MB 1.00x"]
    assert shown("INT8: Perplexity") == ["171.00 ± 4.40", "188.10 ± 4.40 1.10x"]
    alone = command("compare", "one")
    assert alone.exit_code == 2 and "error[missing-option]: compare 'one'" in alone.output


def test_the_search_of_compress_has_figures_of_its_own(cluster, tmp_path):
    cluster.add("small", 3, display_name="lathe-compress-1")
    best = {"ratio": 0.25, "perplexity": 12.5, "latency": 0.4}
    cluster.record("small", "choose/metrics", best, "compress")
    cluster.record("small", "choose/page", PAGE, "compress")
    assert re.search(r"latency +│ 0\.4 ", CliRunner().invoke(follow.app, ["small"]).output)
    assert "chosen: ratio" in command("compare", "one,small").output
    page = tmp_path / "page.html"
    assert command("report", "small", "--output", str(page), "--no-open").exit_code == 0
    assert page.read_text() == PAGE


def test_runs_of_this_machine(monkeypatch, tmp_path):
    for name in ("LATHE_KFP_ENDPOINT", "KFP_ENDPOINT", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert command("list").output == "no runs yet in run/\n"
    for name, perplexity in (("first", 171.0), ("second", 180.0)):
        steps = tmp_path / "run" / name / "full-2026" / "judge"
        for step in ("report", "gate"):
            (steps / step).mkdir(parents=True)
        (steps / "report" / "metrics").write_text(json.dumps(figures(perplexity)))
        (steps / "report" / "page").write_text(PAGE)
        (steps / "gate" / "verdict").write_text(json.dumps(verdict("pass")))
        (tmp_path / "run" / name / "run.log").touch()
    result = command("list")
    assert re.search(r"first .* passed .* 171\.00 0\.95x", result.output)
    assert "INT8: Perplexity" in command("compare", "first,second").output
    assert command("report", "second", "--no-open").output == "build/reports/second.html\n"


TRAINING = {"step": 500.0, "loss": 3.25, "eval_loss": 3.3125, "tokens_per_second": 3494.4}
USED = {
    "prepare": Usage(0.25, 30.0, 0.0, 0.5, 2.0, 0.025),
    "pretrain": Usage(2.0, 600.0, 16.0, 3.5, 24.0, 40.175),
}


def test_a_training_without_a_report_says_what_it_made(cluster):
    cluster.add("trained", 3, display_name="pretrain trained")
    cluster.record("trained", "pretrain/metrics", TRAINING, "pretrain")
    cluster.record("trained", "pretrain/page", PAGE, "pretrain")
    cluster.record("trained", "evaluate-dense/metrics", {"n_params": 2590000.0, "n_bytes": 1e7}
                   | {"perplexity": 180.0, "perplexity_stderr": 4.5}, "pretrain")  # fmt: skip
    place = f"{cluster.root}/pretrain/trained/pretrain/{EXECUTION}"
    write_text(f"{place}/model/state/step_5/lathe.json", "{}")
    write_text(f"{place}/model/lathe.json", "{}")
    output = CliRunner().invoke(follow.app, ["trained"]).output
    assert "no metrics" not in output and re.search(r"Perplexity +│ 180\.00 ± 4\.50", output)
    made = "pretrain: step 500, training loss 3.25, validation loss 3.312, 3,494 tokens/s\n"
    assert f"{made}model   {place}/model\nreport  {place}/page\n" in output
    assert output.endswith("download it: make report RUN=trained\nthe run has succeeded\n")
    assert "180.00" in find_line(command("list").output, "│ trained")
    assert command("report", "trained", "--no-open").exit_code == 0


def test_what_the_steps_of_a_run_have_used(cluster):
    """GPUs in hours, memory at its peak, and the price that the steps have recorded."""
    for step, used in USED.items():
        cluster.record("one", f"{step}/metrics", {"loss": 1.0} | used.figures)
    cluster.record("one", "report-2/metrics", figures(171.0) | Usage(0.05).figures)
    cluster.kfp.script = [frame("SUCCEEDED")]
    told = find_line(CliRunner().invoke(follow.app, ["one"]).output, "used    ")
    assert told == (
        "used    16.00 GPU-hours, 4.00 CPU-hours, at most 24.00 GiB of memory (pretrain), "
        "10 min 30 s of waiting for nodes, price 40.20"
    )
    line = find_line(command("list").output, "│ one")
    cells = ["10 min 30 s", "16.00", "4.00", "24.00 GiB", "40.20"]
    assert [cell.strip() for cell in line.split("│")[-6:-1]] == cells
    table = command("list", "--name", "one").output
    cells = ["2 h 00 min", "10 min 00 s", "16.00", "3.50", "24.00 GiB", "40.17"]
    assert [c.strip() for c in find_line(table, "│ pretrain").split("│")[2:-1]] == cells
    assert "2 h 18 min" in find_line(table, "│ all")
    cluster.add("two", 5)
    compared = command("compare", "one,two").output
    shown = find_line(compared, "│ pretrain: GPU-hours")
    assert [c.strip() for c in shown.split("│")[2:-1]] == ["16.00", "-"]


def test_a_step_that_failed_is_known_from_its_pods_or_from_pipelines(
    cluster, monkeypatch, tmp_path
):
    told = json.loads((RECORDED / "pretrain-step-killed.json").read_text())
    run = told["run_id"]
    cluster.kfp.runs = {run: told | {"experiment_id": "mine"}}
    cluster.kfp.script = [{}]
    table = command("list", "--name", run).output
    assert "2 min 08 s" in find_line(table, "│ pretrain")  # 12:01:43 to 12:03:51
    monkeypatch.setenv("LATHE_KFP_NAMESPACE", "lathe")
    ended = {"exitCode": 137, "reason": "OOMKilled", "startedAt": "2026-11-22T12:01:45Z"}
    ended |= {"finishedAt": "2026-11-22T12:03:45Z"}
    main = {"name": "main", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    labels = {"pipeline/runid": run, "lathe/stage": "pretrain"}
    status = {"phase": "Failed", "containerStatuses": [main | {"state": {"terminated": ended}}]}
    limits = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
    pod = {"metadata": {"name": "p", "labels": labels}, "status": status}
    with FakeKubernetes() as kubernetes:
        monkeypatch.setenv("KUBECONFIG", str(kubernetes.kubeconfig(tmp_path)))
        spec = {"containers": [{"name": "main"} | limits]}
        kubernetes.create("pods", pod | {"spec": spec})
        later = {"name": "a", "labels": labels | {"lathe/stage": "evaluate"}}
        monkeypatch.setattr(fake_store, "now", lambda: "2100-01-01T00:00:00Z")
        kubernetes.create("pods", pod | {"spec": spec, "metadata": later})
        table = command("list", "--name", run).output
    line = find_line(table, "│ pretrain")
    assert table.index("│ pretrain") < table.index("│ evaluate")  # as they began
    assert [c.strip() for c in line.split("│")[2:-1]] == ["2 min 00 s", "0.27"]


def test_an_empty_record_has_no_result(tmp_path: Path):
    assert read_results(str(tmp_path)) == Results()

"""Requests and output of `pipelines.cluster.submit` with a fake Kubeflow Pipelines server."""

import re
import signal
import subprocess

import pytest
import yaml
from kfp import compiler
from typer.testing import CliRunner

from components.images import PADDLE, TRAIN
from lathe_base.config.recipe import load_recipe
from lathe_base.storage import list_uris, sha256
from pipelines.cluster.server import VARIABLES
from pipelines.cluster.submit import app, version_name
from pipelines.compiler.compile import build, code_digest
from pipelines.steps.resources import Variant
from tests.support import fake_kfp, warm
from tests.support.fake_kfp import frame, task
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.tls import certificate

MODEL = ("--model", "s3://models/gpt/", "--recipe", "tiny-qat")
PRETRAIN = ("pretrain", "--corpus", "s3://texts/new/")
ERROR = (
    "[lathe] error[too-little-data]: corpus.txt: contains no text\n"
    "[lathe] error[too-little-data]:   hint: give another\n"
)


def submit(*arguments: str):
    return CliRunner().invoke(app, [*arguments])


def test_the_submitted_request(kfp, tmp_path):
    root = ("--root", "gs://bucket/lathe")
    result = submit("qat", *MODEL, *root, "-o", "Engine.max_steps=7")
    assert result.exit_code == 0, result.output

    (upload_request,) = kfp.sent("POST", ".*/upload_version")
    (pipeline,) = kfp.pipelines.values()
    (version_id, version), *_ = kfp.versions.items()
    assert pipeline["display_name"] == "lathe-qat"
    assert version["display_name"] == "0123456789ab"
    assert version["name"] == "lathe-qat-0123456789ab"
    compiler.Compiler().compile(
        build("qat", Variant(code=code_digest())), str(tmp_path / "qat.yaml")
    )
    sent, plain = (
        list(yaml.safe_load_all(text))
        for text in (upload_request.body, (tmp_path / "qat.yaml").read_bytes())
    )
    named = {"name": "LATHE_PIPELINE", "value": f"qat@sha256:{sha256(tmp_path / 'qat.yaml')}"}
    for executor in sent[0]["deploymentSpec"]["executors"].values():
        if "container" in executor:
            executor["container"]["env"].remove(named)
    assert sent == plain

    (run,) = kfp.runs.values()
    (experiment,) = kfp.experiments.values()
    assert (experiment["display_name"], run["experiment_id"]) == (
        "lathe",
        experiment["experiment_id"],
    )
    assert run["pipeline_version_reference"]["pipeline_version_id"] == version_id
    assert run["service_account"] == "lathe-pipeline"
    assert run["runtime_config"] == {
        "pipeline_root": "gs://bucket/lathe",
        "parameters": {
            "model": "s3://models/gpt/",
            "recipe": "tiny-qat",
            "overrides": ["Engine.max_steps=7"],
            **dict.fromkeys(("corpus", "tokenizer", "cloze", "production"), ""),
            **{"gpus": 1, "nodes": 1, "cpus": 0, "memory": "", "node_pool": "gpu", "queue": ""},
            "notify": False,
        },
    }
    what = "Quantize a trained model to INT8, and deploy it if it passes the gate."
    assert pipeline["description"] == what and version["description"].startswith(f"{what} sha256:")
    assert f"{kfp.url}/#/runs/details/{run['run_id']}" in result.output
    assert "node pool gpu: not checked: no kube context" in result.output


def test_other_machines_are_other_parameters_of_the_same_version(kfp):
    assert "uploaded" in submit("qat", *MODEL).output
    assert "there already" in submit("qat", *MODEL).output
    machines = ("--nodes", "2", "--gpus", "8", "--node-pool", "a100", "--notify")
    assert "there already" in submit("qat", *MODEL, *machines).output
    assert len(kfp.sent("POST", ".*/upload_version")) == len(kfp.versions) == 1
    assert len(kfp.pipelines) == len(kfp.experiments) == 1 and len(kfp.runs) == 3
    given = list(kfp.runs.values())[-1]["runtime_config"]["parameters"]
    machines = {"nodes": 2, "gpus": 8, "node_pool": "a100", "notify": True}
    assert machines.items() <= given.items() and given["overrides"] == []
    assert submit("qat", *MODEL, "-o", "Launch.labels={team: a}").exit_code == 0
    version = list(kfp.versions.values())[-1]
    assert re.fullmatch("0123456789ab-[0-9a-f]{8}", version["display_name"])


def test_the_recipe_too_says_which_machines(kfp):
    launch = ("-o", "Launch.nodes=2", "-o", "Launch.gpus_per_node=4")
    assert submit(*PRETRAIN, *launch, "--gpus", "2").exit_code == 0
    (run,) = kfp.runs.values()
    parameters = run["runtime_config"]["parameters"]
    assert parameters["overrides"] == []
    assert (parameters["nodes"], parameters["gpus"]) == (2, 2)  # an option wins


def test_a_recipe_of_ones_own_is_sent_as_text(kfp, tmp_path):
    (tmp_path / "base.yaml").write_text("_base_: tiny\nEngine: {eval_freq: 7}\n")
    mine = tmp_path / "mine.yaml"
    mine.write_text("_base_: base.yaml\nEngine: {max_steps: 9}\n")
    result = submit("pretrain", "--recipe", str(mine), "-o", "Launch.gpus_per_node=0")
    assert result.exit_code == 0, result.output
    (run,) = kfp.runs.values()
    parameters = run["runtime_config"]["parameters"]
    assert parameters["recipe"].startswith("# mine.yaml\n")
    mine.unlink()
    sent = load_recipe(parameters["recipe"], parameters["overrides"])
    assert (sent.Engine.max_steps, sent.Engine.eval_freq) == (9, 7)
    assert sent.Model == load_recipe("tiny").Model and parameters["gpus"] == 0


def images(kfp) -> list[dict[str, str]]:
    """Images by stage, for every version on the server."""
    found = []
    for text in kfp.uploads.values():
        spec = next(yaml.safe_load_all(text))
        executors = spec["deploymentSpec"]["executors"]
        containers = {k: e["container"] for k, e in executors.items() if "container" in e}
        found.append({k.removeprefix("exec-"): c["image"] for k, c in containers.items()})
    return found


@pytest.mark.slow
def test_the_engine_comes_from_an_option_or_a_recipe(kfp):
    by_option = ("--engine", "paddle")
    by_override = ("-o", "Compress.engine=paddle")
    by_recipe = ("--prune-recipe", "tiny-prune-paddle")
    for given in ((), by_option, by_override, by_recipe):
        result = submit("full", *given)
        assert result.exit_code == 0
        assert (f"image {PADDLE}: not checked" in result.output) == bool(given)
    torch, paddle = images(kfp)  # three runs share one version
    assert {torch[stage] for stage in torch} == {TRAIN}
    assert {stage for stage, image in paddle.items() if image == PADDLE} == {
        *("prune", "analyze", "quantize", "evaluate-dense", "evaluate-pruned", "evaluate-int8"),
        *("export-dense", "export-pruned", "export-int8"),
    }
    names = [version["display_name"] for version in kfp.versions.values()]
    assert len(set(names)) == 2
    assert all(re.fullmatch("0123456789ab(-[0-9a-f]{8})?", name) for name in names)
    runs = [run["runtime_config"]["parameters"] for run in kfp.runs.values()]
    assert [run["prune_recipe"] for run in runs] == ["tiny-prune", *["tiny-prune-paddle"] * 3]
    engines = [[o for o in run["overrides"] if o.startswith("Compress.")] for run in runs]
    assert engines == [[], ["Compress.engine=paddle"], ["Compress.engine=paddle"], []]
    assert submit("full", *by_recipe, "--engine", "torch").exit_code == 0
    assert len(kfp.versions) == 2  # the option overrides the recipe's Paddle


def test_the_recipe_of_pruning_that_is_given_stays(kfp):
    recipe = ("--recipe", "prune-345m", "-o", "Compress.Distill.teacher=null")
    result = submit("prune", "--model", "s3://models/gpt/", *recipe, "--engine", "paddle")
    assert result.exit_code == 0, result.output
    (run,) = kfp.runs.values()
    assert run["runtime_config"]["parameters"]["recipe"] == "prune-345m"


def test_steps_that_paddle_does_not_support_are_reported_before(kfp):
    wrong = (
        *("-o", "Distributed.pp_degree=2", "-o", "Offline_Eval.dtype=bfloat16", "--gpus", "2"),
        *("--prune-recipe", "tiny-prune", "--engine", "paddle"),
        *("-o", "Global.micro_batch_size=4"),  # enough micro-batches for two stages
    )
    result = submit("full", *wrong)
    assert result.exit_code == 2 and not kfp.runs
    errors = re.findall(r"error\[.*?\]: (.*)\n  hint: (.+)", result.output)
    wanted = [
        "recipe tiny: Offline_Eval.dtype is bfloat16, but the Paddle engine evaluates in float32",
        "recipe tiny-prune: Compress.Prune.criterion is taylor: PaddleSlim's pruners support",
        "recipe tiny-qat: Distributed.pp_degree is 2, but the Paddle engine has no pipeline",
    ]
    assert [what[: len(want)] for want, (what, _) in zip(wanted, errors, strict=True)] == wanted
    assert all("Compress.engine=torch" in hint for _, hint in errors[1:])


def test_steps_that_paddle_runs_on_gpus_only_are_reported_without_gpus(kfp):
    given = ("--model", "s3://models/gpt/", "--recipe", "qat-345m-mp8", "--engine", "paddle")
    result = submit("qat", *given, "--gpus", "0")
    assert result.exit_code == 2 and not kfp.runs
    assert "recipe qat-345m-mp8: Distributed.mp_degree 8: Paddle 2.6 supports" in result.output


def test_no_such_engine(kfp):
    result = submit("full", "--engine", "padle")
    assert result.exit_code == 2
    assert re.search("Compress.engine.*padle|padle.*Compress.engine", result.output)


def test_a_version_of_the_same_name_with_another_content_stays(kfp, monkeypatch):
    monkeypatch.setattr("pipelines.cluster.submit.version_name", lambda *_: "0123456789ab")
    submit(*PRETRAIN)
    other = ("-o", "Launch.labels={team: a}")
    assert "uploaded" in submit(*PRETRAIN, *other).output
    assert "there already" in submit(*PRETRAIN, *other).output
    names = [version["display_name"] for version in kfp.versions.values()]
    assert names[0] == "0123456789ab" and re.fullmatch("0123456789ab-[0-9a-f]{8}", names[1])


def test_followed_to_its_success(kfp):
    drivers = task("prepare-driver", "SUCCEEDED"), task("pretrain-driver", "SUCCEEDED")
    prepare = task("prepare", "SUCCEEDED", "run-1")
    kfp.script = [
        frame("PENDING"),
        frame("RUNNING", task("root-driver", "SUCCEEDED"), *drivers, task("prepare", "RUNNING")),
        frame("RUNNING", *drivers, prepare, task("pretrain", "PENDING")),
        frame("SUCCEEDED", *drivers, prepare, task("pretrain", "SUCCEEDED", "run-2")),
    ]
    result = submit(*PRETRAIN, "--follow")
    assert result.exit_code == 0, result.output
    told = [line.split("  ", 1)[1] for line in result.output.splitlines() if line[2:3] == ":"]
    assert told == ["prepare", "prepare: done in 90 s", "pretrain", "pretrain: done in 90 s"]
    assert result.output.endswith("the run has succeeded\n")


@pytest.mark.parametrize("logs", ["logs", "ui_logs", "none"])
def test_a_failing_step_its_error_and_its_log(kfp, logs):
    pod, retried = "run-system-container-impl-77", "run-system-container-impl-78"
    kfp.script = [
        frame("RUNNING", task("prepare-driver", "SUCCEEDED"), task("prepare", "RUNNING", "run-5")),
        frame(
            "FAILED",
            task("prepare-driver", "SUCCEEDED"),
            task("root", "FAILED", "run-1", ("run-5",)),
            task("prepare", "FAILED", "run-5", ("run-6",)),
            task("executor", "FAILED", "run-6", ("run-77", "run-78")),
            task("executor(0)", "FAILED", pod),
            task("executor(1)", "FAILED", retried, error={"message": "exit code 2"}),
            error="the workflow has failed",
        ),
    ]
    if logs != "none":
        getattr(kfp, logs)[retried] = "[KFP Executor 1]: hello\n" + ERROR
    result = submit(*PRETRAIN, "--follow")
    assert result.exit_code == 1
    assert "prepare: failed after 90 s" in result.output
    assert "error[failed]: the workflow has failed" in result.output
    said = "error[too-little-data]: prepare: corpus.txt: contains no text\n  hint: give another"
    assert (said in result.output) == (logs != "none")
    told = re.search(
        r"kubectl -n kubeflow logs -l pipeline/runid=\S+,lathe/stage=prepare", result.output
    )
    assert bool(told) == (logs == "none")


@pytest.mark.parametrize("status", [503, 401])  # 401: a token that is being renewed
def test_a_briefly_unreachable_server_is_retried(kfp, status):
    class Script(list):
        def pop(self, index: int):
            kfp.failures = [status, status]
            return super().pop(index)

    kfp.script = Script([frame("RUNNING"), frame("SUCCEEDED")])
    assert submit(*PRETRAIN, "--follow").exit_code == 0
    assert len(kfp.sent("GET", ".*/runs/[^/]+")) == 5  # the last one reads its results


def test_a_token_a_session_and_their_absence(kfp, monkeypatch, tmp_path):
    kfp.token = "right-token"
    result = submit(*PRETRAIN)
    assert (result.exit_code, kfp.runs) == (2, {})
    refused = r"error\[unauthorized\]: .*\(401\): Unauthenticated\n  hint: .* LATHE_KFP_TOKEN_FILE"
    assert re.search(refused, result.output)
    assert result.output.count("error[") == 1

    token = tmp_path / "token"
    monkeypatch.setenv("LATHE_KFP_TOKEN_FILE", str(token))
    assert f"error[not-found]: LATHE_KFP_TOKEN_FILE={token}" in submit(*PRETRAIN).output
    token.write_text("")
    assert f"error[unauthorized]: LATHE_KFP_TOKEN_FILE={token}" in submit(*PRETRAIN).output
    for text, status in (("wrong-token", 2), ("right-token", 0)):
        token.write_text(text)
        result = submit(*PRETRAIN)
        assert result.exit_code == status
        assert text not in result.output

    kfp.token, kfp.cookie = "", "authservice_session=right-cookie"
    monkeypatch.delenv("LATHE_KFP_TOKEN_FILE")
    monkeypatch.setenv("LATHE_KFP_COOKIES", "authservice_session=right-cookie")
    result = submit(*PRETRAIN)
    assert result.exit_code == 0 and "right-cookie" not in result.output


def test_a_kube_context_that_is_not_yaml(kfp, monkeypatch, tmp_path):
    (tmp_path / "config").write_text("clusters: [\n- {")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    for name in ("LATHE_KFP_ENDPOINT", "KFP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    result = submit(*PRETRAIN)
    assert result.exit_code != 0
    assert f"error[unauthorized]: no kube context: {tmp_path / 'config'}: " in result.output


def test_a_certificate_of_ones_own_authority(kfp, monkeypatch, tmp_path):
    pem, authority = certificate(tmp_path)
    with fake_kfp.serve(certificate=pem) as server:
        monkeypatch.setenv("LATHE_KFP_ENDPOINT", server.url)
        result = submit(*PRETRAIN)
        assert result.exit_code == 2 and "hint: set LATHE_KFP_CA" in result.output
        monkeypatch.setenv("LATHE_KFP_CA", str(authority))
        result = submit(*PRETRAIN)
        assert result.exit_code == 0, result.output
        assert len(server.runs) == 1


def test_a_server_in_multi_user_mode_needs_the_users_namespace(kfp, monkeypatch):
    kfp.multi_user = True
    result = submit(*PRETRAIN)
    assert (result.exit_code, kfp.runs) == (2, {})
    ((what, hint),) = re.findall(r"error\[missing-option\]: (.*)\n  hint: (.+)", result.output)
    assert kfp.url in what and "LATHE_KFP_NAMESPACE" in what and "LATHE_KFP_NAMESPACE" in hint
    monkeypatch.setenv("LATHE_KFP_NAMESPACE", "lathe")
    assert submit(*PRETRAIN).exit_code == 0
    (pipeline,), (experiment,) = kfp.pipelines.values(), kfp.experiments.values()
    assert pipeline["namespace"] == experiment["namespace"] == "lathe"


@pytest.mark.parametrize("namespace", ["", "pipelines"])
def test_to_a_server_in_single_user_mode_no_request_names_one(kfp, monkeypatch, namespace):
    monkeypatch.setenv("LATHE_KFP_NAMESPACE", namespace)
    prepare = task("prepare-driver", "SUCCEEDED"), task("prepare", "FAILED", "run-5")
    kfp.script = [frame("FAILED", *prepare, error="it has failed")]
    result = submit(*PRETRAIN, "--follow")
    assert not any("namespace" in r.query for r in kfp.requests)
    assert not any("namespace" in r.body for r in kfp.requests if isinstance(r.body, dict))
    assert f"its log: kubectl -n {namespace or 'kubeflow'} logs" in result.output


def test_a_sign_in_page_is_not_a_server(kfp):
    kfp.is_a_login_page = True
    result = submit(*PRETRAIN)
    assert result.exit_code == 2
    assert f"error[server-error]: {kfp.url}: " in result.output


def test_a_server_that_is_broken_is_one_of_the_problems(kfp):
    kfp.failures = [500]
    result = submit(*PRETRAIN, "--cloze", "here.jsonl")
    assert result.exit_code == 2
    assert f"error[server-error]: {kfp.url}: 500 try again\n  hint: " in result.output
    assert "error[bad-path]: cloze here.jsonl" in result.output


def test_through_the_kube_context(kfp, monkeypatch, tmp_path):
    kfp.token = "of-the-context"
    monkeypatch.delenv("LATHE_KFP_ENDPOINT")
    config = {
        "current-context": "other",
        "clusters": [{"name": "c", "cluster": {"server": kfp.url}}],
        "users": [{"name": "u", "user": {"token": "of-the-context"}}],
        "contexts": [{"name": "mine", "context": {"cluster": "c", "user": "u"}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("LATHE_KFP_CONTEXT", "mine")
    monkeypatch.setenv("LATHE_KFP_UI", "https://pipelines.example/")
    result = submit(*PRETRAIN)
    assert result.exit_code == 0, result.output
    (run,) = kfp.runs
    assert f"https://pipelines.example/#/runs/details/{run}\n" in result.output
    assert "node pool gpu: not checked: the cluster does not list its nodes" in result.output


def test_the_store_must_be_writable(kfp, monkeypatch, s3):
    result = submit(*PRETRAIN, "--root", f"{s3}/runs")
    assert result.exit_code == 0, result.output
    assert list_uris(f"{s3}/runs/") == []
    result = submit(*PRETRAIN, "--root", "s3://no-such-bucket/runs")
    assert result.exit_code == 2 and "error[not-found]: " in result.output
    assert "no-such-bucket" in result.output
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    result = submit(*PRETRAIN, "--root", f"{s3}/runs")
    assert result.exit_code == 2 and "error[unauthorized]: " in result.output
    assert "AWS_SECRET_ACCESS_KEY" in result.output
    assert "wrong-secret" not in result.output
    assert len(kfp.runs) == 1


def test_help_names_every_variable():
    text = re.sub(r"\s+", " ", submit("--help").output)
    assert all(f"{name}: " in text for name in VARIABLES)
    assert "LATHE_PIPELINE_ROOT" in text


def test_all_mistakes_are_reported_at_once(kfp, monkeypatch, tmp_path):
    monkeypatch.setenv("LATHE_KFP_ENDPOINT", "http://127.0.0.1:9")
    local = tmp_path / "mine.yaml"
    local.write_text(
        "_base_: gpt-1.3b-dp8\nPrepare: {source: mine.txt}\nProduction: {keys: [signing.pub]}\n"
    )
    result = submit(
        "full", "--tokenizer", "tokenizer.json", "--cloze", "/data/cloze.jsonl",
        "--budget", "all=1", "--recipe", str(local), "--gpus", "4", "--qat-recipe", "tiny-qta",
        "--task", "exact_match=sums.jsonl", "--task", "json_schema=s3://data/replies.jsonl",
    )  # fmt: skip
    assert result.exit_code == 2
    errors = re.findall(r"error\[(.*\n  hint: .+)", result.output)
    wanted = [
        r"unreachable\]: http://127.0.0.1:9: ",
        r"unknown-key\]: pipeline full has no budget",
        r"bad-path\]: tokenizer tokenizer.json: ",
        r"bad-path\]: cloze /data/cloze.jsonl: ",
        r"bad-path\]: corpus mine.txt: ",
        r"bad-path\]: Offline_Eval.tasks sums.jsonl: ",
        r"unsupported\]: recipe .*mine.yaml: Production.keys .* signing.pub",
        r"layout\]: recipe .*mine.yaml with NODES=1 GPUS=4: ",
        r"not-found\]: .*'tiny-qta'",
    ]
    assert len(errors) == len(wanted), result.output
    assert not [(w, e) for w, e in zip(wanted, errors, strict=True) if not re.match(w, e)]
    assert " tiny-qat?" in result.output
    assert not kfp.requests


@pytest.mark.slow
def test_as_a_user_runs_it_and_ends_following(kfp):
    """Ctrl-C ends the process, but not the run."""
    prepare = task("prepare-driver", "SUCCEEDED"), task("prepare", "RUNNING", "run-1")
    kfp.script = [frame("RUNNING", *prepare)]
    command = [*warm.python(), "-m", "pipelines.cluster.submit", *PRETRAIN, "--follow"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, preexec_fn=_default_interrupt
    )
    for line in process.stdout:
        if line.endswith("  prepare\n"):
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    (run,) = kfp.runs
    page = f"{kfp.url}/#/runs/details/{run}"
    back = f"come back: make follow RUN={run}"
    assert err == f"stopped following; the run continues: {page}\n{back}\n"
    assert not kfp.sent("POST", ".*:terminate") and not kfp.sent("DELETE", ".*")


def _default_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it


def test_the_version_names_the_commit_and_what_differs_from_it(tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    monkeypatch.setattr("pipelines.cluster.submit.REPOSITORY", tmp_path)
    assert version_name(Variant()) == "unversioned"
    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "--short=12", "HEAD").strip()
    assert version_name(Variant()) == commit
    assert version_name(Variant(code="0" * 64)) == commit
    names = set()
    for file, text in (("a", "2"), ("a", "3"), ("b", "new"), ("b", "newer")):
        (tmp_path / file).write_text(text)
        names.add(version_name(Variant()))
    names.add(version_name(Variant(engine="paddle")))
    assert len(names) == 5
    assert all(re.fullmatch(commit + "-dirty-[0-9a-f]{8}(-[0-9a-f]{8})?", n) for n in names)


@pytest.mark.parametrize(
    ("model", "sent"),
    [
        ("s3://models/private/gpt", "minio://models/private/gpt"),
        ("minio://models/private/gpt", "minio://models/private/gpt"),
        ("s3://others/gpt", "s3://others/gpt"),
    ],
)
def test_a_model_beside_the_artifacts_is_imported_as_they_are(kfp, monkeypatch, model, sent):
    """Pipelines 2.17 would import another scheme or bucket from http://BUCKET.ENDPOINT."""
    monkeypatch.setenv("LATHE_PIPELINE_ROOT", "minio://models/v2/artifacts")
    result = submit("qat", "--model", model, "--recipe", "tiny-qat")
    assert result.exit_code == 0, result.output
    (run,) = kfp.runs.values()
    assert run["runtime_config"]["parameters"]["model"] == sent


def test_the_servers_own_store_is_looked_at_with_the_keys_that_are_here(
    kfp, s3, monkeypatch, tmp_path
):
    monkeypatch.setenv("LATHE_KFP_NAMESPACE", "lathe")
    with FakeKubernetes() as kubernetes:
        path = str(kubernetes.kubeconfig(tmp_path))
        monkeypatch.setenv("KUBECONFIG", str(path))
        data = {"defaultPipelineRoot": f"{s3}/runs"}
        kubernetes.create("configmaps", {"metadata": {"name": "kfp-launcher"}, "data": data})
        assert "object store" not in submit("qat", *MODEL).output
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        result = submit("qat", *MODEL)
    assert result.exit_code == 0, result.output
    assert f"object store: not checked: {s3}" in result.output

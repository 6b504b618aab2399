"""Checks of a local run's inputs: all problems are reported together before anything is written."""

import json
import os
import re
import socket
import time
from pathlib import Path

import pytest

from lathe.backends import paddle_process as paddle_start
from lathe.data.tokenizer import train_tokenizer
from lathe.model.checkpoint import save_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT
from lathe_base.config.settings import Recipe
from lathe_base.errors import UserError, coded
from lathe_serving import environment
from pipelines.commands import inputs
from pipelines.local.run import check
from tests.pipelines.test_run import start


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model(tmp_path):
    net = GPT(GPTConfig(300, 64, 32, 16, (2,), (64,)))
    net.initialize(0.02, seed=1)
    tokenizer = train_tokenizer(["one two three"], 257)
    save_checkpoint(tmp_path / "model", net, tokenizer, "pretrain", Recipe())
    return tmp_path / "model"


def problems(name: str, arguments: dict, folder: str = "run/one") -> list[UserError]:
    """Problems that the check reports."""
    try:
        check(name, Path(folder), {"overrides": []} | arguments)
    except ExceptionGroup as group:
        assert all(isinstance(error, UserError) and error.hint for error in group.exceptions)
        return list(group.exceptions)
    return []


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("ful", {}, "unknown-name.* ful\n.*pretrain, prune, qat, compress, full"),
        ("qat", {}, "missing-option.*hint: give --model .*PIPELINE=pretrain"),
        ("qat", {"model": "m", "prune_recipe": "x"}, "unknown-key.* qat .*prune_recipe"),
        ("qat", {"model": "nowhere"}, "not-found.* model: .*nowhere"),
        (
            "qat",
            {"model": "empty"},
            "(incomplete|wrong-kind|not-found).* model empty: .*config.json",
        ),
        ("qat", {"model": "x" * 300}, "bad-path.*xxx"),
        ("qat", {"model": "file"}, "(not-found|wrong-kind).* model file: "),
        ("full", {"cloze": "nowhere.jsonl"}, "not-found.* cloze: .*nowhere.jsonl"),
        ("full", {"cloze": "file"}, "malformed.* cloze file:2: "),
        ("full", {"cloze": "empty"}, "wrong-kind.* cloze empty"),
        *(
            ("full", {"overrides": [f"Offline_Eval.tasks=[{task}]"]}, message)
            for task, message in (
                ("exact_match=nowhere", "not-found.* Offline_Eval.tasks: .*nowhere"),
                ("exact=file", "unknown-name.*'exact'.*hint: .*Offline_Eval.tasks"),
                ("json_schema=file", "Offline_Eval.tasks file:1: "),
                ("cloze=file", "malformed.* Offline_Eval.tasks file:2: "),
                ("multiple_choice=empty", "wrong-kind.* Offline_Eval.tasks empty: "),
            )
        ),
        ("full", {"corpus": "nowhere"}, "not-found.* corpus: .*nowhere"),
        ("full", {"corpus": "blank.txt"}, "too-little-data.* corpus blank.txt: "),
        ("full", {"corpus": "pipe"}, "wrong-kind.* corpus pipe: "),
        ("full", {"corpus": "newest:nowhere"}, "not-found.* .*newest:nowhere: "),
        ("full", {"corpus": "newest:empty"}, "not-found.* .*newest:empty: "),
        ("full", {"corpus": "file.gz"}, "(malformed|corrupt).* corpus file.gz: "),
        ("full", {"corpus": "data::dev"}, "unknown-name.* corpus data: .*'dev' .*'train', 'test'"),
        ("full", {"corpus": "a\udcff"}, "bad-path.* corpus "),
        ("full", {"tokenizer": "nowhere"}, "not-found.* tokenizer: .*nowhere"),
        ("full", {"tokenizer": "file"}, "(malformed|wrong-kind).* tokenizer file: "),
        ("full", {"production": "releases"}, "invalid-value.*Production.releases is releases"),
        ("full", {"recipe": "nowhere"}, "not-found.*nowhere"),
        (
            "full",
            {"overrides": ["Engine.max_step=1"]},
            r"unknown-key.*Engine\.max_step\b.*Engine\.max_steps",
        ),
        (
            "compress",
            {"model": "nowhere", "target": "speed=2"},
            "invalid-value.* --target speed=2: ",
        ),
        (
            "compress",
            {"model": "nowhere", "budget": "5"},
            "invalid-value.* --budget 5: ",
        ),
        (
            "full",
            {"overrides": ["Launch.steps.evaluat.cpus=2"]},
            "unknown-name.*'evaluat'.*hint: there are analyze, .*rehearse.*, janitor",
        ),
        (
            "compress",
            {"model": "nowhere", "overrides": ["Compress.engine=paddle"]},
            "unsupported.* hint: use Compress.engine=torch",
        ),
    ],
)
def test_a_wrong_argument_is_found(name, arguments, message):
    Path("empty").mkdir()
    Path("file").write_text('{"text": "one two"}\nx\n')
    Path("file.gz").write_text("no gzip")
    Path("blank.txt").write_text("\n \n")
    Path("data").mkdir()
    for split in ("train", "test"):
        Path(f"data/{split}.jsonl").write_text('{"text": "one two"}\n')
    os.mkfifo("pipe")
    found = "\n".join(map(coded, problems(name, arguments)))
    assert re.search(message, found, re.S), found
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("override", "arguments", "message"),
    [
        ("Compress.pretrained=m", {}, "takes its model from MODEL=.*hint: give MODEL=m"),
        ("Engine.save_load.ckpt_dir=m", {}, "Engine.save_load.ckpt_dir is m, .*MODEL="),
        ("Data.Train.dataset.input_dir=d", {}, "input_dir is d, but .* from a corpus.*CORPUS="),
        ("Data.Train.dataset.input_dir=d", {"corpus": "file"}, None),
    ],
)
def test_a_path_in_the_recipe_that_a_pipeline_would_not_use_is_reported(
    override, arguments, message
):
    Path("file").write_text("one two three\n" * 9)
    found = problems("full", {"overrides": [override]} | arguments)
    texts = [str(error) for error in found if "MODEL=" in str(error) or "CORPUS=" in str(error)]
    assert bool(texts) == bool(message)
    assert message is None or re.search(message, texts[0], re.DOTALL), texts


def test_right_arguments_pass(model, corpus):
    Path("cloze.jsonl").write_text(json.dumps({"text": "one two three"}) + "\n")
    given = {"model": str(model), "cloze": "cloze.jsonl", "corpus": str(corpus)}
    assert problems("pretrain", given | {"tokenizer": str(model)}) == []
    assert problems("pretrain", given | {"corpus": f"newest:{corpus.parent}"}) == []
    for split in ("train", "test"):
        Path("data").mkdir(exist_ok=True)
        Path(f"data/{split}.jsonl").write_text('{"text": "one two three"}\n')
    assert problems("pretrain", given | {"corpus": "data::test"}) == []


@pytest.mark.parametrize("file", ["tokenizer.json", "model.safetensors", "lathe.json"])
def test_a_model_that_is_not_whole_is_found(model, file):
    (model / file).unlink()
    (problem,) = problems("pretrain", {"model": str(model)})
    assert str(model) in problem.what


def test_all_mistakes_are_reported_at_once_and_nothing_is_written(tmp_path, recipe):
    wrong = {"--corpus": "c", "--tokenizer": "t", "--cloze": "z", "--name": "../up"}
    options = [part for pair in wrong.items() for part in pair]
    run = start(tmp_path, "full", "--recipe", recipe, "--production", "p", *options)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (2, "")
    assert err.count("error[") == err.count("  hint: ") == 5 and "Traceback" not in err
    assert [p.name for p in tmp_path.iterdir()] == [recipe.name]


def test_a_missing_environment_is_found(monkeypatch):
    monkeypatch.setenv(environment.PYTHON_VARIABLE, "nowhere")
    monkeypatch.setenv(paddle_start.PYTHON_VARIABLE, "nowhere")
    found = problems("full", {"overrides": ["Compress.engine=paddle"]})
    assert [e.what.split(": ")[-1] for e in found] == [
        "Triton needs its own environment",
        "Paddle needs its own environment",
    ]
    assert problems("pretrain", {}) == []


def silent_socket() -> socket.socket:
    """A socket that accepts connections and never responds."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    return listening


def test_an_unresponsive_store_is_reported_in_time(monkeypatch):
    monkeypatch.setattr(inputs, "STORE_SECONDS", 0.3)
    with silent_socket() as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        found = problems(
            "full", {"production": "s3://bucket/releases", "corpus": "s3://bucket/corpus"}
        )
    assert time.monotonic() - began < 15
    assert [error.what for error in found] == [
        "s3://bucket/corpus: no answer within 0.3 s",
        "s3://bucket/releases/gpt: no answer within 0.3 s",
    ]


def test_an_address_with_nothing_there_is_found(s3):
    assert problems("full", {"production": f"{s3}/releases"}) == []
    (problem,) = problems("full", {"corpus": f"{s3}/nowhere"})
    assert problem.what == f"corpus {s3}/nowhere: not found"


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("run/.", "--name: 'run' is not a valid run folder"),
        ("run/..", "--name: 'run/..' is not a valid run folder"),
        ("run/../up", "--name: 'run/../up' is not a valid run folder"),
        ("run/a/b", "--name: 'run/a/b' is not a valid run folder"),
        ("/elsewhere", "--name: '/elsewhere' is not a valid run folder"),
        ("run/deployed", "--name: 'run/deployed' is not a valid run folder"),
        (f"run/{'x' * 300}", "bad-path.*xxx"),
        ("run/file", "run/file: not a folder"),
        ("run/dangling", "run/dangling: not a folder"),
        ("run/mine", "run/mine: not a run folder: it contains photo.jpg, report.html"),
        ("run/locked", "run/locked/run.lock: not written by a run"),
        ("run/logged", "run/logged/run.log: not written by a run"),
        ("run/cached", "run/cached/cache: not written by a run"),
    ],
)
def test_a_run_folder_that_is_something_else_is_refused(folder, message):
    for name in ("mine", "locked", "logged", "cached"):
        Path("run", name).mkdir(parents=True)
    Path("run/file").touch()
    Path("run/dangling").symlink_to("nowhere")
    for file in ("mine/photo.jpg", "mine/report.html", "locked/run.lock", "cached/cache"):
        Path("run", file).write_text("the user's own")
    Path("run/cached/run.log").touch()
    Path("run/logged/run.log").symlink_to("../mine/photo.jpg")
    before = sorted(Path().rglob("*"))
    found = "\n".join(map(coded, problems("pretrain", {}, folder)))
    assert re.search(message, found, re.S), found
    assert sorted(Path().rglob("*")) == before


def test_a_file_in_place_of_the_deployment_link_is_reported(monkeypatch):
    Path("run").mkdir()
    Path("run/deployed").write_text("the user's own")
    (problem,) = problems("full", {})
    assert problem.what == "run/deployed: not a link created by a run"


def test_a_run_resumes_in_its_own_folder():
    folder = Path("run/one")
    (folder / "cache").mkdir(parents=True)
    (folder / "run.log").touch()
    (folder / "run.lock").write_text("123\n")
    (folder / "notes.txt").write_text("the user's own")
    assert problems("pretrain", {}) == []

"""Scores by a live endpoint match those of the served file; unsupported requests fail clearly."""

import json
from pathlib import Path

import numpy as np
import pytest
import requests
from numpy.typing import NDArray
from typer.testing import CliRunner

from lathe.cli import app
from lathe.evaluate.evaluate import evaluate
from lathe.evaluate.evaluation_folder import read_evaluation
from lathe.model.checkpoint import Checkpoint
from lathe_base.config.settings import OfflineEvalSettings, Recipe
from lathe_base.config.settings.quality import AnswerSettings
from lathe_base.errors import Code
from lathe_base.storage import sha256
from lathe_serving.client import Client
from lathe_serving.server import TritonServer
from tests.support.errors import raises

SENTENCE = "All that glitters is not gold; often have you heard {}"
ANSWERS = {"*": AnswerSettings(max_tokens=12, stop=["e"])}
RECIPE = Recipe(
    Offline_Eval=OfflineEvalSettings(overlapping_eval=64, max_seq_len=128, answers=ANSWERS)
)


@pytest.fixture(scope="module")
def cloze(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cloze") / "cloze.jsonl"
    lines = [{"text": SENTENCE.format("that " * i + "told")} for i in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_endpoint_scores_as_the_file_and_the_checkpoint_do(
    server: TritonServer, exported: Path, checkpoint: Checkpoint, cloze: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(SENTENCE * 20)
    questions = tmp_path / "questions.jsonl"
    line = {"ctx": "All that glitters", "endings": ["is not gold", "told"], "label": 0}
    questions.write_text(json.dumps(line) + "\n")
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": SENTENCE[: 9 + i], "answer": "no"} for i in range(12)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tasks = [("multiple_choice", questions), ("exact_match", prompts)]
    folders = {name: tmp_path / name for name in ("served", "file", "checkpoint")}
    evaluate(RECIPE, exported, folders["served"], None, cloze, text, server.state.grpc, tasks)
    evaluate(RECIPE, exported, folders["file"], None, cloze, text, None, tasks)
    evaluate(RECIPE, checkpoint.folder, folders["checkpoint"], None, cloze, text, None, tasks)
    served = read_evaluation(folders["served"])
    for name, rtol in (("file", 1e-6), ("checkpoint", 1e-5)):
        other = read_evaluation(folders[name])
        for task, column in (("text", "loss"), ("cloze", "correct"), ("questions", "correct_norm")):
            ours, theirs = (x.units[task].column(column) for x in (served, other))
            np.testing.assert_allclose(ours, theirs, rtol=rtol)
        rows = zip(served.units["prompts"].rows, other.units["prompts"].rows, strict=True)
        assert all(ours["answer"] == theirs["answer"] for ours, theirs in rows)
    assert served.units["prompts"].rows[0]["how"] == "the server, 8 at a time"
    assert served.units["prompts"].noise_floor("flexible") == 0


def test_the_command_scores_a_server(
    server: TritonServer, exported: Path, cloze: Path, tmp_path: Path
) -> None:
    endpoint = ["--endpoint", server.state.grpc, "--cloze", str(cloze)]
    output = tmp_path / "eval"
    arguments = ["evaluate", str(exported), *endpoint, "--output", str(output)]
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 0, run.output
    assert read_evaluation(output).metrics["cloze"]["examples"] == 12


def test_another_model_than_the_served_one_is_refused(
    server: TritonServer, exported: Path, cloze: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in exported.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    with (other / "model.onnx").open("ab") as file:
        file.write(b"\x72\x00")  # an empty doc string changes the file, not the model
    metadata = json.loads((other / "export.json").read_text())
    metadata["sha256"] = metadata["files"]["model.onnx"]["sha256"] = sha256(other / "model.onnx")
    (other / "export.json").write_text(json.dumps(metadata))
    with raises(Code.MISMATCH, server.state.grpc, "gpt"):
        evaluate(RECIPE, other, tmp_path / "out", cloze=cloze, endpoint=server.state.grpc)
    unknown = RECIPE.model_copy(
        update={"Serving": RECIPE.Serving.model_copy(update={"model_name": "x"})}
    )
    with raises(Code.NOT_FOUND, server.state.grpc, "x"):
        evaluate(unknown, exported, tmp_path / "out", cloze=cloze, endpoint=server.state.grpc)
    with raises(Code.UNREACHABLE, "127.0.0.1:1"):
        evaluate(RECIPE, exported, tmp_path / "out", cloze=cloze, endpoint="127.0.0.1:1")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tokens", "index", "targets", "text"),
    [
        ([[1, 2]], [[1, 0]], [[3]], "((1, 2), (1, 2), (1, 1))"),
        ([[1, -2]], [[1]], [[3]], "token -2"),
        ([[1, 2]], [[2]], [[3]], "index 2"),
        ([[1, 2]], [[1]], [[384]], "target 384"),
        ([[]], [[0]], [[1]], "((1, 0), (1, 1), (1, 1))"),
        ([[1] * 1025], [[0]], [[1]], "length 1025"),
    ],
)
def test_unscorable_texts_are_rejected(
    client: Client, tokens: object, index: object, targets: object, text: str
) -> None:
    def array(values: object) -> NDArray[np.int64]:
        return np.array(values, np.int64)

    with raises(Code.INVALID_VALUE, text):
        client.score(array(tokens), array(index), array(targets))
    likelihood, _ = client.score(array([[1, 2]]), array([[0, 1]]), array([[2, 3]]))
    assert likelihood.shape == (1, 2) and (likelihood < 0).all()


def test_over_http(server: TritonServer, client: Client) -> None:
    values = {"tokens": [1, 2, 3], "index": [0, 1], "targets": [2, 3]}
    body = {
        "inputs": [
            {"name": name, "datatype": "INT64", "shape": [1, len(data)], "data": data}
            for name, data in values.items()
        ]
    }
    url = f"http://{server.state.http}/v2/models/gpt-score/infer"
    outputs = {
        o["name"]: o["data"] for o in requests.post(url, json=body, timeout=30).json()["outputs"]
    }
    expected, _ = client.score(*(np.array([data]) for data in values.values()))
    np.testing.assert_allclose(outputs["log_likelihood"], expected[0])


def test_text_scores_as_its_tokens_do(
    server: TritonServer, client: Client, checkpoint: Checkpoint
) -> None:
    text, continuation = "All that glitters", " is naïve"
    likelihoods, is_greedy = client.score_text(text, continuation)
    before, after = (checkpoint.tokenizer.encode(part).ids for part in (text, continuation))
    tokens = np.array([[*before, *after]])
    index = np.arange(len(before) - 1, len(before) + len(after) - 1)[None]
    expected = client.score(tokens, index, np.array([after]))
    np.testing.assert_allclose(likelihoods, expected[0], rtol=1e-6)
    np.testing.assert_array_equal(is_greedy, expected[1])
    generated = client.generate(text, max_tokens=6, decode_strategy="greedy_search")
    assert client.score_text(text, generated.text)[1].all() or "\ufffd" in generated.text
    options = ["--url", server.state.grpc, "--score", continuation]
    run = CliRunner().invoke(app, ["client", text, *options])
    assert run.output.splitlines()[0] == f"log likelihood: {likelihoods.sum():.4g}"
    with raises(Code.INVALID_VALUE, "continuation"):
        client.score_text(text, "")

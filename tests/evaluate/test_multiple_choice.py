"""Multiple choice in the formats of HellaSwag and ARC: reading, scoring as in lm-eval, gating."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from typer.testing import CliRunner

from lathe.cli import app
from lathe.evaluate.evaluate import evaluate
from lathe.evaluate.evaluation_folder import read_evaluation
from lathe.evaluate.gate import gate
from lathe.evaluate.measure_model import task_files
from lathe.evaluate.tasks.multiple_choice import read_questions
from lathe_base.config.settings import GateSettings, Recipe
from lathe_base.errors import Code, UserError
from tests.evaluate.conftest import SENTENCES
from tests.support.errors import raises
from tests.support.small_export import UNIFORM, make_model, write_unproven

Lines = list[dict[str, Any]]


def hellaswag(n: int, seed: int = 0) -> Lines:
    draw = random.Random(seed)
    words = " ".join(SENTENCES).split()

    def text(least: int, most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(least, most)))

    return [
        {
            "activity_label": "Counting steps",
            "ctx_a": (a := text(2, 5)),
            "ctx_b": (b := text(1, 3)),
            "ctx": f"{a} {b}",
            "endings": [f"[step] {text(1, 4)} [title] {text(1, 3)}" for _ in range(4)],
            "label": str(draw.randrange(4)),
        }
        for _ in range(n)
    ]


def arc(n: int) -> Lines:
    return [
        {
            "question": line["ctx"],
            "choices": {
                "text": [e.replace("[step] ", "").replace(" [title]", "") for e in line["endings"]],
                "label": ["A", "B", "C", "D"],
            },
            "answerKey": "ABCD"[int(line["label"])],
        }
        for line in hellaswag(n, seed=1)
    ]


def write(path: Path, lines: Lines) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_prompts_and_endings_are_those_of_lm_eval(tmp_path: Path, tokenizer: Tokenizer) -> None:
    swag = {"endings": ["he [x] counted [title] steps", "b"], "label": 1}
    lines = [
        swag | {"ctx": "the night  he"},
        swag | {"ctx": "", "ctx_a": "The night.", "ctx_b": "he", "activity_label": "Steps"},
        {
            "question": "Why?",
            "choices": {"text": ["a", "b"], "label": ["1", "2"]},
            "answerKey": "2",
        },
    ]
    prompts = ("the night he", "Steps: The night. He", "Question: Why?\nAnswer:")
    questions = read_questions(write(tmp_path / "q.jsonl", lines), tokenizer)
    for question, prompt in zip(questions, prompts, strict=True):
        whole = tokenizer.encode(f"{prompt} b").ids
        last = question.requests[1]
        assert list(last.tokens) == whole
        assert list(last.tokens[: -last.scored]) == tokenizer.encode(prompt).ids
        assert question.right == 1
    assert questions[0].characters == [len("he counted. steps"), 1]


@pytest.mark.parametrize("form", [hellaswag, arc])
def test_both_accuracies_are_recomputed_with_transformers(
    form: Callable[[int], Lines],
    tmp_path: Path,
    recipe: Recipe,
    model_folder: Path,
    tokenizer: Tokenizer,
    reference_logits: Callable[[list[int]], torch.Tensor],
) -> None:
    path = write(tmp_path / "questions.jsonl", form(40))
    tasks = [("multiple_choice", path)]
    result = evaluate(recipe, model_folder, tmp_path / "out", tasks=tasks)
    hits, hits_norm = [], []
    for question in read_questions(path, tokenizer):
        sums = []
        for request in question.requests:
            tokens = list(request.tokens)[-33:]
            log_probabilities = reference_logits(tokens[:-1]).log_softmax(-1)
            picked = log_probabilities[range(len(tokens) - 1), tokens[1:]]
            sums.append(float(picked[-request.scored :].sum()))
        hits.append(np.argmax(sums) == question.right)
        hits_norm.append(np.argmax(np.array(sums) / question.characters) == question.right)
    evaluation = read_evaluation(tmp_path / "out")
    figures = evaluation.measured["questions"].figures
    assert result.figures["questions.acc"] == figures["acc"]
    assert figures["acc"] == pytest.approx(np.mean(hits))
    assert figures["acc_norm"] == pytest.approx(np.mean(hits_norm))
    assert figures["acc_stderr"] == pytest.approx(np.std(hits, ddof=1) / 40**0.5)
    assert hits != hits_norm and figures["truncated"] > 0
    units = evaluation.units["questions"]
    assert units.column("correct_norm").tolist() == hits_norm


def test_an_export_scores_every_choice_as_its_checkpoint(
    recipe: Recipe, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    folder = tmp_path / "onnx"
    write_unproven(make_model(UNIFORM), byte_tokenizer, folder)
    short = [line | {"ctx": "steps", "endings": ["a b", "cc"], "label": 0} for line in hellaswag(3)]
    tasks = [("multiple_choice", write(tmp_path / "q.jsonl", short))]
    units = [
        read_evaluation(evaluate(recipe, model, tmp_path / name, tasks=tasks).folder).units["q"]
        for name, model in (("a", folder), ("b", folder / "checkpoint"))
    ]
    ours, theirs = ([row["log_likelihoods"] for row in unit.rows] for unit in units)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        ("{", Code.MALFORMED, ""),
        ("[1]", Code.MALFORMED, "[1]"),
        ('{"ctx": "a", "endings": ["b", "c"]}', Code.MALFORMED, "label: "),
        ('{"ctx": "a", "endings": ["b", "c"], "label": ""}', Code.MALFORMED, "found ''"),
        ('{"ctx": "a", "endings": ["b", "c"], "label": 2}', Code.INVALID_VALUE, "label 2 of 2"),
        ('{"ctx": "a", "endings": ["b"], "label": 0}', Code.INVALID_VALUE, "two choices"),
        ('{"ctx": "a", "endings": ["b", "[c]"], "label": 0}', Code.INVALID_VALUE, "empty"),
        ('{"ctx": "a", "endings": "bc", "label": 0}', Code.MALFORMED, "endings: "),
        (
            '{"question": "a", "choices": {"text": ["b", "c"], "label": ["A", "B"]}, '
            '"answerKey": "C"}',
            Code.INVALID_VALUE,
            "answerKey 'C' with 2 choices labeled ['A', 'B']",
        ),
    ],
)
def test_a_broken_line_is_one_error_with_its_number(
    line: str, code: Code, text: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = write(tmp_path / "q.jsonl", hellaswag(1))
    path.write_text(path.read_text() + line + "\n")
    with raises(code, f"{path}:2: ", text, "a line is "):
        read_questions(path, tokenizer)


def test_a_choice_that_the_model_cannot_read_is_named(
    tmp_path: Path, recipe: Recipe, model_folder: Path
) -> None:
    long = {"ctx": "a", "endings": ["the light " * 40, "b"], "label": 0}
    path = write(tmp_path / "q.jsonl", [long])
    with raises(Code.TOO_LONG, f"{path}:1: "):
        evaluate(recipe, model_folder, tmp_path / "out", tasks=[("multiple_choice", path)])
    assert not (tmp_path / "out").exists()


def test_files_of_tasks_name_the_results() -> None:
    swag, text = ("multiple_choice", Path("a/swag.jsonl")), ("text", Path("words.txt"))
    assert [file.name for file in task_files([swag, text])] == ["swag", "text"]
    for given, code, texts in (
        (
            [swag, ("multiple_choice", Path("b/swag.jsonl"))],
            Code.DUPLICATE,
            ("b/swag.jsonl", "swag"),
        ),
        ([("multiple_choice", Path("text.jsonl"))], Code.DUPLICATE, ("text.jsonl",)),
        ([("multiple_choice", Path("a b.jsonl"))], Code.INVALID_VALUE, ("a b.jsonl",)),
        (
            [("quiz", Path("a.jsonl"))],
            Code.UNKNOWN_NAME,
            ("'quiz'", "text, cloze, multiple_choice"),
        ),
    ):
        with raises(code, *texts):
            task_files(given)


def write_evaluation(folder: Path, right: int, digest: str = "a" * 64, n: int = 1000) -> Path:
    """Write an evaluation of one task in which the first `right` of `n` answers are correct."""
    rows = [
        {"correct": i < right, "correct_norm": i < right, "log_likelihoods": [-1.0] * 4}
        for i in range(n)
    ]
    (folder / "tasks").mkdir(parents=True)
    write(folder / "tasks" / "swag.jsonl", rows)
    figures = {"examples": n, "acc": right / n, "acc_norm": right / n}
    swag = {"task": "multiple_choice", "source": "swag.jsonl", "sha256": digest, "figures": figures}
    metrics = {
        "model": {"n_params": 1, "bytes": 4},
        "cloze": None,
        "text": None,
        "tasks": {"swag": swag},
        "protocol": {},
        "sources": {},
        "digests": {"tokenizer": "k" * 64},
        "seconds": 1.0,
    }
    (folder / "metrics.json").write_text(json.dumps(metrics))
    return folder


def test_the_gate_judges_both_accuracies_by_their_margin(tmp_path: Path) -> None:
    before = write_evaluation(tmp_path / "a", 600)
    after = write_evaluation(tmp_path / "b", 550)
    failed = gate(Recipe(), before, after)
    assert [check.measure for check in failed.checks] == ["swag acc", "swag acc_norm"]
    assert [check.lost for check in failed.checks] == [50, 50]
    assert failed.verdict == "fail"
    wide = Recipe(Gate=GateSettings(max_task_accuracy_drop=0.1))
    assert gate(wide, before, after).verdict == "pass"
    with raises(Code.MISMATCH, "swag", 12 * "b"):
        gate(Recipe(), before, write_evaluation(tmp_path / "c", 600, digest="b" * 64))


def test_figures_that_are_missing_are_named(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "a", 600)
    metrics = json.loads((folder / "metrics.json").read_text())
    for key, value, code, text in (
        ("figures", {"examples": 1000, "acc": 0.6}, Code.INCOMPLETE, "tasks.swag.figures.acc_norm"),
        ("task", "quiz", Code.UNKNOWN_NAME, "'quiz'"),
    ):
        changed = metrics["tasks"]["swag"] | {key: value}
        (folder / "metrics.json").write_text(json.dumps(metrics | {"tasks": {"swag": changed}}))
        with raises(code, text):
            read_evaluation(folder)


def test_the_command_measures_a_task(tmp_path: Path, model_folder: Path) -> None:
    path, output = write(tmp_path / "swag.jsonl", hellaswag(5)), tmp_path / "out"
    command = ["evaluate", str(model_folder), "--output", str(output), "--task"]
    done = CliRunner().invoke(app, [*command, f"multiple_choice={path}"])
    assert done.exit_code == 0, done.output
    assert "swag.acc norm: " in done.stdout
    assert len((output / "tasks/swag.jsonl").read_text().splitlines()) == 5
    wrong = CliRunner().invoke(app, [*command, str(path)])
    assert isinstance(wrong.exception, UserError)
    assert wrong.exception.code is Code.INVALID_VALUE and f"--task {path}" in wrong.exception.what

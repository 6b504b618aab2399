"""Generative tasks: files, generation, scores, and the noise floor in the gate."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from lathe.data.chat_template import TEMPLATE
from lathe.evaluate.evaluate import evaluate, graph_answerer, onnx_scorer, torch_answerer
from lathe.evaluate.evaluation_folder import read_evaluation
from lathe.evaluate.gate import gate, verdict_table
from lathe.evaluate.scoring import AnswerRequest
from lathe.evaluate.tasks import TASKS
from lathe.evaluate.tasks.exact_match import ExactMatch
from lathe.evaluate.tasks.json_schema import JsonSchema
from lathe.evaluate.tasks.task import Reader
from lathe.model.checkpoint import load_checkpoint
from lathe.report.report import report
from lathe.report.summary import Candidate
from lathe_base.config.settings import GateSettings, OfflineEvalSettings, Recipe
from lathe_base.config.settings.quality import AnswerSettings
from lathe_base.errors import Code
from lathe_base.provenance import bundle
from lathe_base.storage import sha256
from tests.evaluate.conftest import SENTENCES
from tests.support.errors import raises
from tests.support.small_export import write_unproven

Rows = list[dict[str, Any]]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT = [{"role": "user", "content": "the keeper"}]
SHORT = {"*": AnswerSettings(max_tokens=6)}


def write(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("expected", "answer", "strict", "flexible"),
    [
        ("so 3 * 4 = 12 #### 12", "3 * 4 = 12\n#### 12", True, True),
        ("#### 1,200", "#### 1200.", True, True),
        ("#### 1200", "He pays $1,200.", False, True),
        ("#### 12", "#### 13, no: 12", False, True),
        ("#### 12", "12 of 13", False, False),
        ("#### -3", "#### -3 degrees", True, True),
        ("#### 12", "", False, False),
        ("12", "#### 12", True, True),
        ("Paris", " Paris\n", True, True),
        ("Paris", "the Paris.", False, True),
        ("Paris", "Paris, France", False, False),
    ],
)
def test_exact_match(expected: str, answer: str, strict: bool, flexible: bool) -> None:
    found = ExactMatch().judge(answer, ExactMatch().parse({"answer": expected}, "here"))
    assert found == {"strict": strict, "flexible": flexible}


@pytest.mark.parametrize(
    ("answer", "expected", "valid", "correct"),
    [
        ('{"city": "Paris"}\n', {"city": "Paris"}, True, True),
        ('{"city": "Paris", "more": 1}', {"city": "Paris"}, True, True),
        ('{"city": "Rome"}', {"city": "Paris"}, True, False),
        ('{"city": "Paris"}', {}, True, True),
        ('{"city": "Paris", "n": true}', {"n": 1}, True, False),
        ('{"city": "Paris", "n": 1.0}', {"n": 1}, True, True),
        ('{"city": "Paris", "to": [{"a": 1, "b": 2}]}', {"to": [{"a": 1}]}, True, True),
        ('{"city": "Paris", "to": [1, 2]}', {"to": [1]}, True, False),
        ('{"city": 1}', {}, False, False),
        ('```json\n{"city": "Paris"}\n```', {}, False, False),
        ('{"city": "Paris"', {}, False, False),
        ('{"city": "Paris", "n": NaN}', {}, False, False),
        ("[" * 100_000, {}, False, False),
        ("", {}, False, False),
    ],
)
def test_json_of_a_schema(answer: str, expected: Any, valid: bool, correct: bool) -> None:
    row = {"schema": CITY, "expected": expected}
    found = JsonSchema().judge(answer, JsonSchema().parse(row, "here"))
    assert found == {"valid": valid, "correct": correct}


def test_a_schema_may_refer_to_its_own_parts_only() -> None:
    schema = {"$defs": {"list": {"type": "array", "items": {"$ref": "#/$defs/list"}}}}
    task = JsonSchema()
    expected = task.parse({"schema": schema | {"$ref": "#/$defs/list"}}, "here")
    assert task.judge("[[], [[]]]", expected)["valid"]
    assert not task.judge("[[1]]", expected)["valid"]
    assert not task.judge("[" * 400 + "1" + "]" * 400, expected)["valid"]


HEAD = {"prompt": "say"}
BAD: list[tuple[str, Any, Code, tuple[str, ...]]] = [
    ("exact_match", "{", Code.MALFORMED, ()),
    ("exact_match", [1], Code.MALFORMED, ("object",)),
    ("exact_match", {"answer": "1"}, Code.MALFORMED, ("messages", "prompt")),
    ("exact_match", {"prompt": " ", "answer": "1"}, Code.MALFORMED, ("messages", "prompt")),
    ("exact_match", {"prompt": 3, "answer": "1"}, Code.MALFORMED, ("messages", "prompt")),
    ("exact_match", HEAD, Code.MALFORMED, ("answer None",)),
    ("exact_match", HEAD | {"answer": " "}, Code.MALFORMED, ("answer ' '",)),
    ("exact_match", HEAD | {"answer": True}, Code.MALFORMED, ("answer True",)),
    ("exact_match", {"messages": [], "answer": 1}, Code.MALFORMED, ("messages is",)),
    ("exact_match", {"messages": [{"role": "x"}], "answer": 1}, Code.INCOMPLETE, ("message 1 is",)),
    (
        "exact_match",
        {"messages": [{"role": "x", "content": "a"}], "answer": 1},
        Code.MALFORMED,
        ("message 1: role",),
    ),
    (
        "exact_match",
        {"messages": [*CHAT, {"role": "assistant", "content": "a"}], "answer": 1},
        Code.INVALID_VALUE,
        ("assistant",),
    ),
    ("json_schema", HEAD, Code.MALFORMED, ("schema is",)),
    ("json_schema", HEAD | {"schema": {"type": "obj"}}, Code.MALFORMED, ("'obj'",)),
    ("json_schema", HEAD | {"schema": {}, "expected": [1]}, Code.MALFORMED, ("expected is",)),
    ("json_schema", HEAD | {"schema": {"$ref": "#/a"}}, Code.UNKNOWN_NAME, ("'#/a'",)),
    (
        "json_schema",
        HEAD | {"schema": {"$ref": "http://localhost:1/a"}},
        Code.UNKNOWN_NAME,
        ("'http://localhost:1/a'",),
    ),
    ("instructions", HEAD, Code.MALFORMED, ("instruction_id_list",)),
    (
        "instructions",
        HEAD | {"instruction_id_list": ["punctuation:no_comma"], "kwargs": []},
        Code.MALFORMED,
        ("kwargs is", "1"),
    ),
    (
        "instructions",
        HEAD | {"instruction_id_list": ["a:b"], "kwargs": [{}]},
        Code.UNKNOWN_NAME,
        ("'a:b'",),
    ),
    (
        "instructions",
        HEAD | {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"n": 1}]},
        Code.MALFORMED,
        ("punctuation:no_comma: n",),
    ),
    (
        "instructions",
        HEAD | {"instruction_id_list": ["startend:end_checker"], "kwargs": [{"end_phrase": None}]},
        Code.MALFORMED,
        ("startend:end_checker: end_phrase",),
    ),
    (
        "instructions",
        HEAD | {"instruction_id_list": ["punctuation:no_comma"], "kwargs": ["a"]},
        Code.MALFORMED,
        ("punctuation:no_comma: kwargs is",),
    ),
]


@pytest.mark.parametrize(("task", "row", "code", "texts"), BAD)
def test_malformed_rows_are_named(
    task: str, row: Any, code: Code, texts: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text("\n" + (row if isinstance(row, str) else json.dumps(row)) + "\n")
    with raises(code, f"{path}:2: ", *texts):
        TASKS[task].check(path)
    with raises(Code.TOO_LITTLE_DATA, path):
        TASKS[task].check(write(path, []))


@pytest.fixture(scope="module")
def questions() -> Rows:
    words = " ".join(SENTENCES).split()
    return [
        {"prompt": " ".join(words[i : i + 1 + i % 5]), "answer": words[i + 5], "document": i % 3}
        for i in range(20)
    ]


def test_answers_are_the_most_likely_tokens(
    model_folder: Path,
    tokenizer: Tokenizer,
    reference_logits: Callable[[list[int]], torch.Tensor],
    questions: Rows,
    tmp_path: Path,
) -> None:
    end = tokenizer.token_to_id("<|endoftext|>")
    path = write(tmp_path / "words.jsonl", questions)
    settings = OfflineEvalSettings(answers=SHORT, batch_size=3)
    result = evaluate(
        Recipe(Offline_Eval=settings), model_folder, tmp_path / "out", tasks=[("exact_match", path)]
    )
    rows = read_evaluation(tmp_path / "out").units["words"].rows
    assert result.figures["words_examples"] == len(rows) == 20
    for row, question in zip(rows, questions, strict=True):
        prompt = tokenizer.encode(question["prompt"]).ids
        ids = list(prompt)
        while ids[-1] != end and len(ids) < len(prompt) + 6:
            ids.append(int(reference_logits(ids)[-1].argmax()))
        assert row["answer"] == tokenizer.decode(ids[len(prompt) :])
        assert (row["prompt"], row["expected"]) == (question["prompt"], question["answer"])
        assert (row["how"], row["document"]) == ("onnxruntime, 3 at a time", question["document"])
        assert row["how_again"] == "torch on cpu, 1 at a time, in reverse order"
        assert row["answer_again"] == row["answer"]
    metrics = json.loads((tmp_path / "out/metrics.json").read_text())
    figures = metrics["tasks"]["words"]["figures"]
    assert (figures["strict_floor"], figures["flexible_floor"]) == (0, 0)
    assert metrics["protocol"]["answers"]["words"]["max_tokens"] == 6


def test_a_killed_evaluation_continues_with_the_next_answer(
    model_folder: Path,
    questions: Rows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write(tmp_path / "words.jsonl", questions)
    recipe = Recipe(Offline_Eval=OfflineEvalSettings(answers=SHORT))
    task = ("exact_match", path)
    evaluate(recipe, model_folder, tmp_path / "whole", tasks=[task])
    with monkeypatch.context() as killed:
        killed.setattr(ExactMatch, "judge", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            evaluate(recipe, model_folder, tmp_path / "out", tasks=[task])
    with caplog.at_level(logging.INFO, logger="lathe"):
        evaluate(recipe, model_folder, tmp_path / "out", tasks=[task])
    assert "resuming with 20 results" in caplog.text
    name = "tasks/words.jsonl"
    assert (tmp_path / "out" / name).read_text() == (tmp_path / "whole" / name).read_text()


def test_runtimes_and_batches_answer_alike(
    model_folder: Path, tokenizer: Tokenizer, questions: Rows, tmp_path: Path
) -> None:
    checkpoint = load_checkpoint(model_folder)
    write_unproven(checkpoint.model, tokenizer, tmp_path / "onnx")
    graph, net = onnx_scorer(tmp_path / "onnx").model, checkpoint.model
    ends = sorted(checkpoint.end_ids)
    requests = [AnswerRequest(tokenizer.encode(q["prompt"]).ids, 9, ("night",)) for q in questions]
    found = [
        dict(answerer.generate(requests))
        for rows in (1, 4, 64)
        for is_reversed in (False, True)
        for answerer in (
            graph_answerer(graph, tokenizer, rows, is_reversed),
            torch_answerer(net, ends, rows, is_reversed=is_reversed),
        )
    ]
    texts = [[tokenizer.decode(one[i]).partition("night")[0] for i in range(20)] for one in found]
    assert all(text == texts[0] for text in texts)
    assert any(len(ids) == 9 for ids in found[0].values())


def test_tasks_of_the_recipe_are_evaluated_and_attested(
    model_folder: Path, questions: Rows, tmp_path: Path
) -> None:
    path = write(tmp_path / "words.jsonl", questions[:3])
    settings = OfflineEvalSettings(answers=SHORT, noise_floor=False, tasks=[f"exact_match={path}"])
    result = evaluate(Recipe(Offline_Eval=settings), model_folder, tmp_path / "out")
    assert result.figures["words_examples"] == 3
    assert read_evaluation(tmp_path / "out").units["words"].noise_floor("strict") is None
    attested = bundle.read(tmp_path / "out")[0].statement.predicate.build_definition
    materials = {one.name: one.digest for one in attested.resolved_dependencies}
    digest = materials["eval_tasks"]
    assert digest is not None and digest.sha256 == sha256(path)


def reader(model_folder: Path, tokenizer: Tokenizer, **settings: Any) -> Reader:
    return Reader(tokenizer, model_folder, 32, AnswerSettings(max_tokens=8, **settings))


def test_stop_texts_end_an_answer(model_folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "one.jsonl", [{"prompt": "the", "answer": "no"}])
    (prompt,) = ExactMatch().read(path, reader(model_folder, tokenizer, stop=["\n", "light"]))
    ids = tokenizer.encode(" keeper of the light\n").ids
    assert prompt.answer(ids) == (" keeper of the ", False)
    (prompt,) = ExactMatch().read(path, reader(model_folder, tokenizer))
    assert prompt.answer(ids[:8]) == (tokenizer.decode(ids[:8]), True)


TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TURNS += "{% if add_generation_prompt %}[assistant]{% endif %}"


def test_messages_are_rendered_by_the_models_template(
    model_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    messages = {"messages": CHAT, "answer": "no"}
    path = write(tmp_path / "chats.jsonl", [messages, {"prompt": "the keeper", "answer": "no"}])
    (tmp_path / TEMPLATE).write_text(TURNS)
    chat, plain = ExactMatch().read(path, reader(tmp_path, tokenizer))
    assert tokenizer.decode(chat.request.prompt) == "[user]the keeper[assistant]"
    assert tokenizer.decode(plain.request.prompt) == "the keeper"
    assert (chat.text, plain.text) == ("user: the keeper", "the keeper")
    same, other = ExactMatch().read(path, reader(tmp_path, tokenizer, chat=True))
    assert same.request == other.request == chat.request
    with raises(Code.NOT_FOUND, model_folder):
        ExactMatch().read(path, reader(model_folder, tokenizer))
    long = [{"role": "user", "content": "a b " * 40}]
    path = write(tmp_path / "long.jsonl", [messages, {"messages": long, "answer": "no"}])
    with raises(Code.TOO_LONG, f"{path}:2: "):
        ExactMatch().read(path, reader(tmp_path, tokenizer))


def test_long_prompts_lose_their_beginning(
    model_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    text = " ".join(SENTENCES)
    path = write(tmp_path / "long.jsonl", [{"prompt": text, "answer": "no"}])
    (prompt,) = ExactMatch().read(path, reader(model_folder, tokenizer))
    ids = tokenizer.encode(text).ids
    assert prompt.request.prompt == ids[-24:]
    assert prompt.truncated == len(ids) - 24


@pytest.fixture(scope="module")
def evaluations(
    model_folder: Path, questions: Rows, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with an evaluation `a` of 100 answers."""
    folder = tmp_path_factory.mktemp("evaluations")
    path = write(folder / "words.jsonl", questions * 5)
    recipe = Recipe(Offline_Eval=OfflineEvalSettings(answers={"*": AnswerSettings(max_tokens=1)}))
    evaluate(recipe, model_folder, folder / "a", tasks=[("exact_match", path)])
    return folder


def changed(folder: Path, output: Path, change: Callable[[int, dict[str, Any]], Any]) -> Path:
    """A copy of an evaluation with other rows."""
    shutil.copytree(folder, output)
    file = output / "tasks/words.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for i, row in enumerate(rows):
        row |= {"document": None, "strict": True, "strict_again": True}
        row |= change(i, row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = output / "metrics.json"
    values = json.loads(metrics.read_text())
    values.pop("files", None)
    metrics.write_text(json.dumps(values))
    return output


@pytest.mark.parametrize(
    ("lost", "floor", "verdict", "phrase"),
    [
        (30, 0, "fail", "disagrees with itself on 0 of 100"),
        (30, 29, "fail", "disagrees with itself on 29 of 100"),
        (30, 30, "inconclusive", "30 of 100, so a net loss of 30 is no evidence of a worse model"),
        (0, 30, "pass", "disagrees with itself on 30 of 100"),
        (30, None, "fail", "30 lost, 0 gained"),
    ],
)
def test_a_drop_within_the_noise_floor_proves_nothing(
    lost: int, floor: int | None, verdict: str, phrase: str, evaluations: Path, tmp_path: Path
) -> None:
    def baseline(i: int, row: dict[str, Any]) -> Any:
        return {} if floor is None else {"strict_again": i >= floor}

    def unmeasured(i: int, row: dict[str, Any]) -> Any:
        for name in [name for name in row if name.endswith("_again")]:
            del row[name]
        return {}

    before = changed(evaluations / "a", tmp_path / "a", unmeasured if floor is None else baseline)
    after = changed(evaluations / "a", tmp_path / "b", lambda i, row: {"strict": i >= lost})
    settings = GateSettings(margins={"words flexible match": None}, max_task_accuracy_drop=0.05)
    result = gate(Recipe(Gate=settings), before, after, tmp_path / "gate.json")
    (check,) = result.checks
    assert (check.verdict, check.noise_floor) == (verdict, floor)
    assert phrase in "; ".join(result.reasons)
    written = json.loads((tmp_path / "gate.json").read_text())["checks"][0]
    assert written["noise_floor"] == floor
    assert bool(result.notes) == (floor is None)
    assert any("noise floor" in figure.measure for figure in result.shown) == (floor is not None)
    cells = [cell for column in verdict_table(result).columns for cell in column.cells]
    assert ("noise floor" in cells) == (f"{floor} of 100 examples" in cells) == (floor is not None)


def test_models_must_be_answered_alike(
    evaluations: Path, model_folder: Path, tmp_path: Path
) -> None:
    settings = OfflineEvalSettings(answers={"words": AnswerSettings(max_tokens=5)})
    task = ("exact_match", evaluations / "words.jsonl")
    evaluate(Recipe(Offline_Eval=settings), model_folder, tmp_path / "c", tasks=[task])
    with raises(Code.MISMATCH, evaluations / "a", tmp_path / "c", "protocol"):
        gate(Recipe(), evaluations / "a", tmp_path / "c")


def test_the_report_shows_lost_answers_first(
    evaluations: Path, model_folder: Path, tmp_path: Path
) -> None:
    def after(i: int, row: dict[str, Any]) -> Any:
        return {"strict": i != 70, "answer": "<lost>" if i == 70 else "kept"}

    before = changed(
        evaluations / "a", tmp_path / "a", lambda i, row: {"strict_again": i >= 7, "answer": "had"}
    )
    models = [
        Candidate("dense", model_folder, before),
        Candidate("int8", model_folder, changed(evaluations / "a", tmp_path / "b", after)),
    ]
    report(tmp_path / "page.html", models)
    page = (tmp_path / "page.html").read_text()
    section = page[page.index("<h2>Answers</h2>") :]
    assert "exact match: 7 of 100" in section
    assert "torch on cpu, 4 at a time, in reverse order" in section
    assert section.index("had") < section.index("&lt;lost&gt;") < section.index("kept")
    assert "<lost>" not in page

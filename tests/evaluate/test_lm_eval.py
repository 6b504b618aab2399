"""Accuracy and perplexity equal those of lm-evaluation-harness, example by example.

lm-eval is not a dependency of Lathe: `pip install 'lm-eval==0.4.*'` in a scratch environment.
"""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.evaluate import TASK, by_lathe, by_lm_eval
from lathe.data.tokenizer import load_tokenizer
from lathe.evaluate.evaluate import evaluate
from lathe.evaluate.evaluation_folder import read_evaluation
from lathe.evaluate.gate import gate
from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT
from lathe_base.config.settings import GateSettings, OfflineEvalSettings, Recipe
from lathe_base.config.settings.quality import AnswerSettings
from tests.evaluate.conftest import SENTENCES
from tests.evaluate.test_multiple_choice import arc, hellaswag, write

pytest.importorskip("lm_eval", reason="lm-eval is not installed")


def test_every_example_of_a_small_model(model_folder: Path, tmp_path: Path) -> None:
    words = sorted({w for s in SENTENCES for w in s.split() if w.isalpha()})
    draw = random.Random(1)
    texts = [" ".join(draw.choices(words, k=draw.randint(2, 12))) for _ in range(400)]
    cloze = tmp_path / "cloze.jsonl"
    cloze.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = OfflineEvalSettings()
    ours, theirs = by_lathe(model_folder, cloze, settings), by_lm_eval(model_folder, cloze, 16)
    assert ours.correct.tolist() == theirs.correct.tolist()
    assert {True, False} == set(ours.correct.tolist())
    assert ours.log_likelihood == pytest.approx(theirs.log_likelihood, abs=1e-4)
    stage = evaluate(Recipe(Offline_Eval=settings), model_folder, tmp_path / "out", cloze=cloze)
    assert stage.figures["cloze_accuracy"] == pytest.approx(theirs.correct.mean())
    metrics = json.loads((tmp_path / "out/metrics.json").read_text())
    expected = math.exp(-theirs.log_likelihood.mean())
    assert metrics["cloze"]["target_perplexity"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.shared
def test_lambada_is_read_and_split_alike(shared: Path, tmp_path: Path) -> None:
    tokenizer: Tokenizer = load_tokenizer(shared / "gpt2")
    model = GPT(GPTConfig(tokenizer.get_vocab_size(), 256, 16, 8, n_head=(2,), n_inner=(16,)))
    model.initialize(std=0.4, seed=5)
    save_checkpoint(tmp_path / "model", model, tokenizer, "pretrain", Recipe())
    lines = (shared / "lambada_test.jsonl").read_text().splitlines(keepends=True)
    cloze = tmp_path / "cloze.jsonl"
    breaks = [line for line in lines if "\n" in json.loads(line)["text"].rsplit(" ", 1)[1]]
    cloze.write_text("".join(lines[::50] + breaks))
    ours = by_lathe(tmp_path / "model", cloze, OfflineEvalSettings())
    theirs = by_lm_eval(tmp_path / "model", cloze, 16)
    assert len(ours.correct) == 104 + 7
    assert ours.correct.tolist() == theirs.correct.tolist()
    assert ours.log_likelihood == pytest.approx(theirs.log_likelihood, abs=1e-3)


@pytest.mark.parametrize("form", ["hellaswag", "arc"])
def test_multiple_choice_is_counted_alike(form: str, model_folder: Path, tmp_path: Path) -> None:
    from lm_eval.tasks.hellaswag.utils import process_docs  # type: ignore[import-not-found]

    path = tmp_path / "questions.jsonl"
    write(path, hellaswag(60) if form == "hellaswag" else arc(60))
    kwargs: dict[str, Any] = {"dataset_kwargs": {"data_files": {"test": str(path)}}}
    if form == "hellaswag":
        kwargs |= {"process_docs": process_docs, "doc_to_text": "{{query}}"}
        kwargs |= {"doc_to_target": "{{label}}", "doc_to_choice": "choices"}
    else:
        kwargs |= {"doc_to_text": "Question: {{question}}\nAnswer:"}
        kwargs |= {"doc_to_target": "{{choices.label.index(answerKey)}}"}
        kwargs |= {"doc_to_choice": "{{choices.text}}"}
    task = {"task": form, "dataset_path": "json", "test_split": "test"}
    task |= {"output_type": "multiple_choice", "metric_list": [{"metric": "acc"}]}
    task["metric_list"] += [{"metric": "acc_norm"}]
    found = simple_evaluate_folder(model_folder, task | kwargs)
    ours = evaluate(Recipe(), model_folder, tmp_path / "out", tasks=[("multiple_choice", path)])
    acc, acc_norm = (ours.figures[f"questions.{key}"] for key in ("acc", "acc_norm"))
    assert acc == pytest.approx(found[form]["acc,none"])
    assert acc_norm == pytest.approx(found[form]["acc_norm,none"])
    assert acc != acc_norm


GSM8K = {
    "task": "gsm8k",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["Question:", "rocks"], "do_sample": False},
    "metric_list": [
        {
            "metric": "exact_match",
            "aggregation": "mean",
            "higher_is_better": True,
            "ignore_case": True,
            "ignore_punctuation": False,
            "regexes_to_ignore": [",", "\\$", "(?s).*#### ", "\\.$"],
        }
    ],
    "filter_list": [
        {
            "name": "strict-match",
            "filter": [
                {"function": "regex", "regex_pattern": "#### (\\-?[0-9\\.\\,]+)"},
                {"function": "take_first"},
            ],
        },
        {
            "name": "flexible-extract",
            "filter": [
                {
                    "function": "regex",
                    "group_select": -1,
                    "regex_pattern": "(-?[$0-9.,]{2,})|(-?[0-9]+)",
                },
                {"function": "take_first"},
            ],
        },
    ],
}
"""As in lm-eval's own file, but for the stop texts."""


@pytest.mark.slow
def test_answers_are_generated_and_judged_alike(
    model_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """On a model that says numbers, of which some are right."""
    checkpoint = load_checkpoint(model_folder)
    with torch.no_grad():
        for token in (" 1", " 200", "####", "#", " "):
            for i in tokenizer.encode(token).ids:
                checkpoint.model.embedding.weight[i] *= 1.5
    save_checkpoint(tmp_path / "model", checkpoint.model, tokenizer, "pretrain", Recipe())
    draw = random.Random(3)
    words = " ".join(SENTENCES).split()
    rows = [
        {
            "question": " ".join(draw.choices(words, k=draw.randint(1, 4))),
            "answer": f"it is so #### {draw.choice(['1', '200', '20', '0', '1,200'])}",
        }
        for _ in range(200)
    ]
    write(tmp_path / "gsm8k.jsonl", rows)
    task = GSM8K | {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "gsm8k.jsonl")}}}
    stop = GSM8K["generation_kwargs"]["until"]  # type: ignore[index]
    task["generation_kwargs"] = {"until": stop, "do_sample": False, "max_gen_toks": 10}
    found = evaluate_folder(tmp_path / "model", task)
    answers = AnswerSettings(max_tokens=10, stop=stop)
    settings = OfflineEvalSettings(answers={"gsm8k": answers}, noise_floor=False)
    ours = evaluate(
        Recipe(Offline_Eval=settings),
        tmp_path / "model",
        tmp_path / "out",
        tasks=[("exact_match", tmp_path / "gsm8k.jsonl")],
    )
    units = read_evaluation(tmp_path / "out").units["gsm8k"].rows
    for name, column in (("strict-match", "strict"), ("flexible-extract", "flexible")):
        logged = sorted(
            (one for one in found["samples"]["gsm8k"] if one["filter"] == name),
            key=lambda one: one["doc_id"],
        )
        assert [one["resps"][0][0] for one in logged] == [unit["answer"] for unit in units]
        assert [bool(one["exact_match"]) for one in logged] == [unit[column] for unit in units]
        theirs = found["results"]["gsm8k"]
        assert ours.figures[f"gsm8k.{column}"] == theirs[f"exact_match,{name}"]
    assert 0 < ours.figures["gsm8k.flexible"] < 1
    assert any(unit["cut"] for unit in units) and not all(unit["cut"] for unit in units)


def test_the_gate_reads_what_lm_eval_logs(
    model_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The gate's verdict on lm-eval's logs of two models equals that on Lathe's evaluations."""
    from lm_eval.loggers import EvaluationTracker  # type: ignore[import-not-found]

    other, generator = load_checkpoint(model_folder), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in other.model.parameters():
            weight += 0.2 * torch.randn(weight.shape, generator=generator)
    save_checkpoint(tmp_path / "other", other.model, tokenizer, "pretrain", Recipe())
    words = sorted({w for s in SENTENCES for w in s.split() if w.isalpha()})
    draw = random.Random(1)
    texts = [" ".join(draw.choices(words, k=draw.randint(2, 12))) for _ in range(400)]
    cloze = tmp_path / "cloze.jsonl"
    cloze.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    task = TASK | {"dataset_kwargs": {"data_files": {"test": str(cloze)}}}
    pairs: dict[str, list[Path]] = {"logged": [], "own": []}
    for name, folder in (("a", model_folder), ("b", tmp_path / "other")):
        tracker = EvaluationTracker(output_path=str(tmp_path / "logged" / name))
        tracker.general_config_tracker.model_name_sanitized = name
        found = evaluate_folder(folder, task)
        samples = found.pop("samples")
        tracker.save_results_aggregated(found, samples)
        tracker.save_results_samples("lambada_file", samples["lambada_file"])
        pairs["logged"].append(tmp_path / "logged" / name)
        evaluate(Recipe(), folder, tmp_path / "own" / name, cloze=cloze)
        pairs["own"].append(tmp_path / "own" / name)
    wide = GateSettings(margins={"*perplexity": 9.0})
    logged, own = (gate(Recipe(Gate=wide), *pairs[kind]) for kind in ("logged", "own"))
    checks = {check.measure: check for check in logged.checks}
    ours = {check.measure: check for check in own.checks}
    accuracy = ours["cloze accuracy"]
    assert (accuracy.lost, accuracy.gained) != (0, 0)
    assert checks["lambada_file acc"].low == accuracy.low
    assert (checks["lambada_file acc"].lost, checks["lambada_file acc"].gained) == (
        accuracy.lost,
        accuracy.gained,
    )
    theirs, words_ = checks["lambada_file perplexity"], ours["cloze word perplexity"]
    assert (theirs.change, theirs.low) == pytest.approx((words_.change, words_.low), rel=1e-3)
    assert logged.notes == ()


def simple_evaluate_folder(folder: Path, task: dict[str, Any]) -> dict[str, Any]:
    """Metrics of one task computed by lm-eval."""
    results: dict[str, Any] = evaluate_folder(folder, task)["results"]
    return results


def evaluate_folder(folder: Path, task: dict[str, Any]) -> dict[str, Any]:
    """Evaluate one task with lm-eval; returns results with samples."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    model = HFLM(pretrained=str(folder), tokenizer=tokenizer, device="cpu", dtype="float32")
    found: dict[str, Any] = simple_evaluate(
        model, tasks=[task], bootstrap_iters=0, log_samples=True
    )
    return found

import json
import math
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from lathe.data.prepare import prepare
from lathe.evaluate.evaluate import EvalResult, evaluate
from lathe.evaluate.evaluation_folder import read_evaluation
from lathe.evaluate.gate import gate
from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT
from lathe.model.quantization import QuantizationPlan
from lathe_base.config.settings import OfflineEvalSettings, Recipe
from lathe_base.errors import Code
from tests.evaluate.conftest import SENTENCES
from tests.support.errors import raises
from tests.support.small_export import UNIFORM, make_model, write_unproven


@pytest.fixture
def data(tmp_path: Path, tokenizer: Tokenizer, prose: str) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    words = prose.split()
    lines = [json.dumps({"text": " ".join(words[i : i + 9])}) for i in range(0, 110, 5)]
    (folder / "cloze.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "heldout.txt").write_text(prose)
    return folder


def read_metrics(result: EvalResult) -> dict:
    return json.loads((result.folder / "metrics.json").read_text())


def test_data_folder_is_measured_and_recorded(
    recipe: Recipe, model_folder: Path, data: Path, tmp_path: Path
) -> None:
    result = evaluate(recipe, model_folder, tmp_path / "out", data)
    metrics = read_metrics(result)
    lines = (tmp_path / "out/examples.jsonl").read_text().splitlines()
    examples = [json.loads(line) for line in lines]
    assert result.figures["cloze_examples"] == len(examples) == 22
    hits = sum(e["correct"] for e in examples)
    assert (
        result.figures["cloze_accuracy"] == metrics["cloze"]["accuracy"] == pytest.approx(hits / 22)
    )
    last_hits = sum(e["last_token_correct"] for e in examples)
    assert result.figures["last_token_accuracy"] == pytest.approx(last_hits / 22)
    nats = -sum(e["log_likelihood"] for e in examples) / 22
    assert result.figures["word_perplexity"] == pytest.approx(math.exp(nats))
    assert result.figures["perplexity"] == metrics["text"]["perplexity"]
    assert metrics["model"]["n_params"] == load_checkpoint(model_folder).model.config.n_params
    assert metrics["model"]["bytes"] == (model_folder / "model.safetensors").stat().st_size
    expected = {"max_seq_len": 32, "overlapping_eval": 8, "dtype": "float32"}
    assert metrics["protocol"] == expected
    blocks = [json.loads(line) for line in (tmp_path / "out/blocks.jsonl").read_text().splitlines()]
    assert sum(b["tokens"] for b in blocks) == metrics["text"]["tokens"] - 1
    loss = sum(b["loss"] for b in blocks) / sum(b["tokens"] for b in blocks)
    assert result.figures["perplexity"] == pytest.approx(math.exp(loss))
    assert metrics["sources"] == {"cloze": "cloze.jsonl", "text": "heldout.txt"}
    assert all(len(digest) == 64 for digest in metrics["digests"].values())


def test_samples_continue_held_out_prompts(
    recipe: Recipe, model_folder: Path, data: Path, tmp_path: Path
) -> None:
    (data / "heldout.txt").write_text(
        "short\n" + 3 * ("the keeper of the light climbed " * 4 + "\n")
    )
    evaluate(recipe, model_folder, tmp_path / "out", data)
    samples = json.loads((tmp_path / "out/samples.json").read_text())
    assert len(samples) == 3
    assert all("light climbed" in sample["prompt"] and sample["text"] for sample in samples)


def test_running_again_gives_the_same_figures(
    recipe: Recipe, model_folder: Path, data: Path, tmp_path: Path
) -> None:
    first = read_metrics(evaluate(recipe, model_folder, tmp_path / "out", data))
    second = read_metrics(evaluate(recipe, model_folder, tmp_path / "out", data))
    assert first | {"seconds": 0} == second | {"seconds": 0}


def test_files_given_win_over_the_recipe_and_the_recipe_over_the_data(
    recipe: Recipe, model_folder: Path, data: Path, tmp_path: Path
) -> None:
    mine, named = tmp_path / "mine.jsonl", tmp_path / "named.jsonl"
    mine.write_text('{"text": "he counted the steps"}\n' * 3)
    named.write_text('{"text": "he counted the steps"}\n' * 2)
    settings = OfflineEvalSettings(eval_path=str(named), overlapping_eval=8)
    by_recipe = recipe.model_copy(update={"Offline_Eval": settings})
    for name, given, n in (("a", {}, 2), ("b", {"cloze": mine}, 3)):
        found = evaluate(by_recipe, model_folder, tmp_path / name, data, **given)
        assert found.figures["cloze_examples"] == n
    alone = evaluate(recipe, model_folder, tmp_path / "c", text=data / "heldout.txt")
    assert "cloze_accuracy" not in alone.figures and "perplexity" in alone.figures


def test_one_example_has_no_standard_error(
    recipe: Recipe, model_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text('{"text": "he counted the steps"}\n')
    result = evaluate(recipe, model_folder, tmp_path / "out", cloze=path)
    assert "cloze_accuracy_stderr" not in result.figures


def test_pruned_and_quantized_checkpoints_are_measured(
    recipe: Recipe, tokenizer: Tokenizer, data: Path, tmp_path: Path
) -> None:
    vocab_size = tokenizer.get_vocab_size()
    config = GPTConfig(vocab_size, 32, n_embd=24, head_dim=8, n_head=(2, 1), n_inner=(40, 56))
    pruned = GPT(config)
    pruned.initialize(std=0.4, seed=5)
    save_checkpoint(tmp_path / "pruned", pruned, tokenizer, "prune", recipe)
    scales = dict.fromkeys([*pruned.config.linear_names(), "lm_head"], 0.05)
    plan = QuantizationPlan.w8a8(scales)
    quantized = GPT(config.with_quantization(plan))
    quantized.load_state_dict(pruned.state_dict())
    save_checkpoint(tmp_path / "int8", quantized, tokenizer, "quantize", recipe)

    float_result = evaluate(recipe, tmp_path / "pruned", tmp_path / "a", data)
    int8_result = evaluate(recipe, tmp_path / "int8", tmp_path / "b", data)
    assert read_metrics(int8_result)["model"]["quantized"]
    assert int8_result.figures["perplexity"] != float_result.figures["perplexity"]
    assert int8_result.figures["perplexity"] == pytest.approx(
        float_result.figures["perplexity"], rel=0.2
    )


@pytest.mark.parametrize("int8", [False, True])
def test_an_exported_file_is_measured_as_its_checkpoint_is(
    recipe: Recipe, tmp_path: Path, byte_tokenizer: Tokenizer, int8: bool
) -> None:
    folder = tmp_path / "onnx"
    write_unproven(make_model(UNIFORM, int8), byte_tokenizer, folder)
    cloze, text = tmp_path / "cloze.jsonl", tmp_path / "text"
    cloze.write_text("".join(f'{{"text": "{i} turns take {i * i} strokes"}}\n' for i in range(40)))
    text.write_text("".join(f"{i} turns of the chuck take {i * i} strokes.\n" for i in range(40)))
    inputs = {"cloze": cloze, "text": text}
    theirs = evaluate(recipe, folder / "checkpoint", tmp_path / "a", **inputs)
    ours = evaluate(recipe, folder, tmp_path / "b", **inputs)
    assert ours.figures["perplexity"] == pytest.approx(
        theirs.figures["perplexity"], rel=2e-3 if int8 else 1e-5
    )
    assert read_metrics(ours)["model"] == {
        "stage": "export",
        "engine": "onnxruntime",
        "n_params": theirs.n_params,
        "bytes": (folder / "model.onnx").stat().st_size,
        "quantized": int8,
    }
    measures = ("cloze", "text", "tokenizer")
    assert [read_metrics(ours)["digests"][m] for m in measures] == [
        read_metrics(theirs)["digests"][m] for m in measures
    ]
    assert gate(recipe, theirs.folder, ours.folder).checks[-1].verdict == "pass"


def test_bfloat16_is_for_float_checkpoints_alone(
    recipe: Recipe, model_folder: Path, data: Path, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    settings = recipe.Offline_Eval.model_copy(update={"dtype": "bfloat16"})
    half = recipe.model_copy(update={"Offline_Eval": settings})
    rounded = evaluate(half, model_folder, tmp_path / "a", data)
    exact = evaluate(recipe, model_folder, tmp_path / "b", data)
    assert rounded.figures["perplexity"] != exact.figures["perplexity"]
    assert rounded.figures["perplexity"] == pytest.approx(exact.figures["perplexity"], rel=0.05)
    with raises(Code.MISMATCH, exact.folder, rounded.folder, "protocol"):
        gate(recipe, exact.folder, rounded.folder)
    folder = tmp_path / "onnx"
    write_unproven(make_model(UNIFORM, int8=True), byte_tokenizer, folder)
    for refused in (folder, folder / "checkpoint"):
        with raises(Code.UNSUPPORTED, "Offline_Eval.dtype is bfloat16"):
            evaluate(half, refused, tmp_path / "c", text=data / "heldout.txt")


def test_another_vocabulary_is_refused_and_nothing_written(
    recipe: Recipe, model_folder: Path, data: Path, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    byte_tokenizer.save(str(data / "tokenizer.json"))
    with raises(Code.WRONG_TOKENIZER, "257"):
        evaluate(recipe, model_folder, tmp_path / "out", data)
    assert not (tmp_path / "out").exists()


def test_a_broken_line_writes_nothing(recipe: Recipe, model_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "he counted the steps"}\n{"text": \n')
    with raises(Code.MALFORMED, f"{broken}:2: "):
        evaluate(recipe, model_folder, tmp_path / "out", cloze=broken)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken.jsonl"]


def test_nothing_to_measure_is_refused(
    recipe: Recipe, model_folder: Path, data: Path, tmp_path: Path
) -> None:
    (data / "cloze.jsonl").write_text("")
    (data / "heldout.txt").unlink()
    with raises(Code.MISSING_OPTION):
        evaluate(recipe, model_folder, tmp_path / "out", data)


def test_a_diverged_model_is_refused(
    recipe: Recipe, tokenizer: Tokenizer, data: Path, tmp_path: Path
) -> None:
    model = GPT(GPTConfig(tokenizer.get_vocab_size(), 32, 24, 8, n_head=(3,), n_inner=(8,)))
    model.initialize(std=1.0, seed=0)
    with torch.no_grad():
        model.ln_f.weight.fill_(3e38)  # finite, but overflows in the forward pass
    save_checkpoint(tmp_path / "model", model, tokenizer, "pretrain", recipe)
    with raises(Code.NOT_FINITE, tmp_path / "model"):
        evaluate(recipe, tmp_path / "model", tmp_path / "out", data)


def test_examples_keep_the_document_that_they_are_from(
    model_folder: Path, recipe: Recipe, tmp_path: Path
) -> None:
    texts = ["the keeper of the light climbed the stair", "she asked, will you count them again"]
    passages = [{"text": texts[i % 2], "document": i // 2} for i in range(30)]
    (tmp_path / "cloze.jsonl").write_text("".join(json.dumps(p) + "\n" for p in passages))
    questions = [
        {"ctx": text, "endings": ["night", "steps"], "label": 0, "document": f"page {i}"}
        for i, text in enumerate(texts)
    ]
    (tmp_path / "pages.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    tasks = [("multiple_choice", tmp_path / "pages.jsonl")]
    evaluate(recipe, model_folder, tmp_path / "out", cloze=tmp_path / "cloze.jsonl", tasks=tasks)
    found = read_evaluation(tmp_path / "out", "document").units
    clusters = found["cloze"].clusters()
    assert clusters is not None and clusters.tolist() == [i // 2 for i in range(30)]
    assert [row["document"] for row in found["pages"].rows] == ["page 0", "page 1"]
    assert found["pages"].clusters() is None  # each example is its own document
    assert read_evaluation(tmp_path / "out").units["cloze"].clusters() is None
    checks = gate(recipe, tmp_path / "out", tmp_path / "out").checks
    methods = {check.measure: check.method for check in checks}
    assert "15 documents" in methods["cloze accuracy"]
    assert methods["pages acc"] == "Tango's score interval"


def test_examples_of_the_training_text_are_marked(
    recipe: Recipe, model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng, words = random.Random(1), " ".join(SENTENCES).split()
    texts = [" ".join(rng.choices(words, k=150)) for _ in range(20)]
    corpus, cloze = tmp_path / "corpus.jsonl", tmp_path / "cloze.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    passages = [" ".join(text.split()[40:100]) for text in (texts[2], texts[17], texts[5])]
    cloze.write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    changes = {"Data": {"Train": {"dataset": {"split": [8, 1, 1], "max_seq_len": 32}}}}
    settings = Recipe.model_validate(recipe.model_dump() | changes)
    data = prepare(settings, tmp_path / "data", str(corpus), str(model_folder)).folder

    result = evaluate(settings, model_folder, tmp_path / "out", data, cloze)
    rows = [json.loads(line) for line in (tmp_path / "out/examples.jsonl").open()]
    assert all(row["contaminated"] and row["overlap"] > 0.9 for row in rows[::2])
    assert not rows[1]["contaminated"] and rows[1]["overlap"] < 0.1
    found = read_metrics(result)["contamination"]
    assert (found["cloze"]["contaminated"], found["text"]["contaminated"]) == (2, 0)
    assert found["cloze"]["by_chance"] < 0.01
    said = "cloze: not held out: the training text contains 2 of its 3 units"
    assert len(result.not_held_out) == 1 and result.not_held_out[0].startswith(said)
    assert said in caplog.text

    again = Recipe.model_validate(settings.model_dump())
    again.Offline_Eval.training_data = str(data)
    result = evaluate(again, model_folder, tmp_path / "named", cloze=cloze)
    assert result.not_held_out[0].startswith(said)
    assert evaluate(settings, model_folder, tmp_path / "no", cloze=cloze).not_held_out == ()

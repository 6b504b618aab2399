"""Scores are the same in torch and in onnxruntime with the exported model."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from lathe.evaluate import evaluate as opened
from lathe.evaluate.evaluate import TorchScorer, onnx_scorer, open_model
from lathe.evaluate.measure_model import EvaluatedModel
from lathe.evaluate.scoring import AnswerRequest, Targets
from lathe.evaluate.tasks.cloze import ClozeExample, score_cloze
from lathe.evaluate.tasks.text import token_losses, windows
from lathe.export.export import export
from lathe.model.checkpoint import load_checkpoint
from lathe_base.config.settings import ExportSettings, OfflineEvalSettings, Recipe
from lathe_base.errors import Code
from lathe_serving.runtime.exported_model import pad
from tests.support.errors import raises
from tests.support.small_export import (
    PRUNED,
    UNIFORM,
    make_model,
    save,
    write_held_out,
    write_unproven,
)


def ragged(n: int, longest: int, seed: int = 0) -> list[ClozeExample]:
    rng = np.random.default_rng(seed)
    return [
        ClozeExample(
            rng.integers(0, UNIFORM.vocab_size, rng.integers(1, longest)).tolist(),
            rng.integers(0, UNIFORM.vocab_size, rng.integers(1, 5)).tolist(),
        )
        for _ in range(n)
    ]


@pytest.fixture(params=[UNIFORM, PRUNED], ids=["uniform", "pruned"])
def exported(request: pytest.FixtureRequest, tmp_path: Path, byte_tokenizer: Tokenizer) -> Path:
    write_unproven(make_model(request.param), byte_tokenizer, tmp_path)
    return tmp_path


def test_torch_scores_are_the_log_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(UNIFORM)
    tokens = np.arange(40).reshape(2, 20)
    rows, columns = np.repeat(np.arange(2), 20), np.tile(np.arange(20), 2)
    targets = np.arange(40) + 1
    monkeypatch.setattr(opened, "LOGIT_ROWS", 7)
    scores, greedy = TorchScorer(model).score(Targets(tokens, rows, columns, targets))
    with torch.inference_mode():
        logits = model(torch.from_numpy(tokens)).view(40, -1)
    expected = torch.log_softmax(logits, -1)[torch.arange(40), targets]
    np.testing.assert_allclose(scores, expected.numpy(), atol=1e-5)
    np.testing.assert_array_equal(greedy, logits.argmax(-1).numpy() == targets)


def test_a_float_file_scores_every_example_as_torch_does(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = TorchScorer(load_checkpoint(exported / "checkpoint").model)
    file = onnx_scorer(exported)
    examples = ragged(60, 60)
    hits = checkpoint.model(torch.tensor([examples[0].context]))[0, -1].argmax()
    examples[0] = ClozeExample(examples[0].context, [int(hits)])
    expected = score_cloze(checkpoint, examples, 64, token_budget=300)
    for at_a_time in (1024, 10):  # a whole batch at once, or a few rows
        monkeypatch.setattr(opened, "LOGIT_ROWS", at_a_time)
        scores = score_cloze(file, examples, 64, token_budget=300)
        for ours, theirs in zip(scores, expected, strict=True):
            assert ours.log_likelihood == pytest.approx(theirs.log_likelihood, abs=1e-4)
            assert ours.correct == theirs.correct
            assert ours.last_token_correct == theirs.last_token_correct
    assert expected[0].correct


@pytest.mark.parametrize("overlap", [16, 64])
def test_a_float_file_scores_every_token_as_torch_does(exported: Path, overlap: int) -> None:
    tokens = np.random.default_rng(1).integers(0, UNIFORM.vocab_size, 400).tolist()
    checkpoint = TorchScorer(load_checkpoint(exported / "checkpoint").model)
    expected = token_losses(checkpoint, windows(tokens, 64, overlap), 64, token_budget=200)
    losses = token_losses(onnx_scorer(exported), windows(tokens, 64, overlap), 64, token_budget=200)
    np.testing.assert_allclose(losses, expected, atol=1e-4)


def test_an_int8_file_scores_as_the_fake_quantized_checkpoint(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    """Activations halfway between two levels may round either way, which changes single scores, but
    their mean changes by only a small part of the effect of quantization."""
    write_unproven(make_model(UNIFORM, int8=True), byte_tokenizer, tmp_path)
    fake = TorchScorer(load_checkpoint(tmp_path / "checkpoint").model)
    tokens, _ = pad([e.context for e in ragged(60, 60)])
    rows, columns = (x.ravel() for x in np.indices(tokens.shape))
    targets = np.random.default_rng(2).integers(0, UNIFORM.vocab_size, len(rows))
    expected, _ = fake.score(Targets(tokens, rows, columns, targets))
    scores, _ = onnx_scorer(tmp_path).score(Targets(tokens, rows, columns, targets))
    in_float, _ = TorchScorer(make_model(UNIFORM)).score(Targets(tokens, rows, columns, targets))
    error, quantization = abs(scores - expected), abs(in_float - expected)
    assert error.mean() < 0.1 * quantization.mean()


@pytest.mark.parametrize("how", ["onnxruntime", "simulated"])
def test_a_quantized_checkpoint_is_computed_as_its_export_by_default(
    how: Literal["onnxruntime", "simulated"], tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    write_unproven(make_model(UNIFORM, int8=True), byte_tokenizer, tmp_path)
    checkpoint = load_checkpoint(tmp_path / "checkpoint")
    recipe = Recipe(Offline_Eval=OfflineEvalSettings(quantized=how))
    subject = open_model(checkpoint.folder, recipe)
    same = onnx_scorer(tmp_path) if how == "onnxruntime" else TorchScorer(checkpoint.model)
    batch = Targets(np.arange(40).reshape(2, 20), np.arange(2), np.array([3, 9]), np.array([5, 6]))
    assert np.array_equal(subject.scorer.score(batch)[0], same.score(batch)[0])
    assert subject.digest == checkpoint.digest
    engine = {"onnxruntime": "onnxruntime", "simulated": "torch, fake quantization"}[how]
    assert subject.metadata()["engine"] == engine
    first, second = ways(subject)
    name = {"onnxruntime": "onnxruntime", "simulated": "torch on cpu"}[how]
    assert (first, second) == (f"{name}, 8 at a time", f"{name}, 4 at a time, in reverse order")
    (tmp_path / "float").mkdir()
    write_unproven(make_model(UNIFORM), byte_tokenizer, tmp_path / "float")
    in_float = open_model(tmp_path / "float" / "checkpoint", recipe)
    assert in_float.metadata()["engine"] == "torch"
    assert ways(in_float) == (
        "onnxruntime, 8 at a time",
        "torch on cpu, 4 at a time, in reverse order",
    )


def ways(subject: EvaluatedModel) -> tuple[str, str]:
    """How a model answers; both ways say the same."""
    assert subject.answerers is not None
    first, second = subject.answerers()
    requests = [AnswerRequest(list(range(1, 2 + i)), 6) for i in range(10)]
    assert dict(first.generate(requests)) == dict(second.generate(requests))
    return first.how, second.how


def test_an_export_is_evaluated_with_openvino_if_it_agrees(
    tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    model = make_model(UNIFORM, int8=True, group_size=32)
    source = save(model, byte_tokenizer, tmp_path / "checkpoint")
    exporting = Recipe(Export=ExportSettings(prompts=4, new_tokens=8))
    folder = export(exporting, source, write_held_out(tmp_path / "data"), tmp_path / "onnx").folder
    recipe = Recipe(Offline_Eval=OfflineEvalSettings(runtime="openvino"))
    subject = open_model(folder, recipe)
    assert subject.metadata()["engine"] == "openvino"
    tokens, _ = pad([e.context for e in ragged(20, 60)])
    rows, columns = (x.ravel() for x in np.indices(tokens.shape))
    targets = np.random.default_rng(2).integers(0, UNIFORM.vocab_size, len(rows))
    batch = Targets(tokens, rows, columns, targets)
    scores, expected = subject.scorer.score(batch)[0], onnx_scorer(folder).score(batch)[0]
    assert abs(scores - expected).mean() < 0.02 * abs(expected).mean()
    write_unproven(model, byte_tokenizer, tmp_path / "unproven")
    with raises(Code.INCOMPLETE, tmp_path / "unproven", "OpenVINO"):
        open_model(tmp_path / "unproven", recipe)

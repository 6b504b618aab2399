"""Another precision than float32 is used if the first batch is close to float32."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from lathe.evaluate import evaluate as evaluation
from lathe.evaluate.evaluate import TorchScorer, evaluate, in_precision, open_model
from lathe.evaluate.gate import gate
from lathe.evaluate.scoring import AnswerRequest, ResumableScorer, Targets
from lathe.model.checkpoint import load_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT
from lathe.train.room import BY_BLOCK
from lathe_base.artifacts.journal import Journal
from lathe_base.config.settings import Recipe
from lathe_base.config.settings.types import Precision
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.pretend_gpu import GPU, pretend_gpu


def in_dtype(recipe: Recipe, dtype: Precision) -> Recipe:
    settings = recipe.Offline_Eval.model_copy(update={"dtype": dtype})
    return recipe.model_copy(update={"Offline_Eval": settings})


def recorded(folder: Path) -> str:
    metrics = json.loads((folder / "metrics.json").read_text())
    return str(metrics["protocol"]["dtype"])


@pytest.fixture
def text(tmp_path: Path, prose: str) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(prose * 2)
    return path


def test_a_close_precision_is_used_and_recorded(
    recipe: Recipe, model_folder: Path, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lathe")
    half = evaluate(in_dtype(recipe, "bfloat16"), model_folder, tmp_path / "a", text=text)
    exact = evaluate(recipe, model_folder, tmp_path / "b", text=text)
    assert half.figures["perplexity"] != exact.figures["perplexity"]
    assert (recorded(half.folder), recorded(exact.folder)) == ("bfloat16", "float32")
    (line,) = [x for x in caplog.messages if "first batch" in x]
    assert line.startswith("bfloat16: ") and "(limit 0.03)" in line


def test_a_precision_that_is_not_close_is_not_used(
    recipe: Recipe,
    model_folder: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(evaluation, "MAX_DIFFERENCE", 1e-9)
    asked = evaluate(in_dtype(recipe, "bfloat16"), model_folder, tmp_path / "a", text=text)
    exact = evaluate(recipe, model_folder, tmp_path / "b", text=text)
    assert asked.figures == exact.figures
    assert recorded(asked.folder) == "float32"
    assert any(x.startswith("evaluating in float32, because bfloat16") for x in caplog.messages)
    gate(recipe, exact.folder, asked.folder)  # compares them


def test_the_gate_refuses_different_precisions(
    recipe: Recipe, model_folder: Path, text: Path, tmp_path: Path
) -> None:
    half = evaluate(in_dtype(recipe, "bfloat16"), model_folder, tmp_path / "a", text=text)
    exact = evaluate(recipe, model_folder, tmp_path / "b", text=text)
    with raises(Code.MISMATCH, "Offline_Eval.dtype=float32", "bfloat16"):
        gate(recipe, exact.folder, half.folder)


def test_a_cpu_has_no_tf32(
    recipe: Recipe, model_folder: Path, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = evaluate(in_dtype(recipe, "tf32"), model_folder, tmp_path / "a", text=text)
    assert recorded(found.folder) == "float32"
    assert "evaluating in float32: only GPUs have TF32" in caplog.messages


def test_tf32_is_for_the_blocks_alone() -> None:
    with in_precision("tf32", torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"


def targets() -> Targets:
    tokens = np.random.default_rng(0).integers(0, 100, (3, 12))
    rows, columns = np.repeat(np.arange(3), 11), np.tile(np.arange(11), 3)
    return Targets(tokens[:, :-1].copy(), rows, columns, tokens[:, 1:].flatten())


@pytest.mark.parametrize("close", [True, False])
def test_a_killed_evaluation_continues_in_its_precision(
    close: bool, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the first batch is that it still has to score."""
    path, model = tmp_path / "journal", load_checkpoint(model_folder).model
    limit = evaluation.MAX_DIFFERENCE if close else 0.0
    monkeypatch.setattr(evaluation, "MAX_DIFFERENCE", limit)
    for later_limit in (limit, 0.0 if close else 1.0):
        monkeypatch.setattr(evaluation, "MAX_DIFFERENCE", later_limit)
        scorer = TorchScorer(model, precision="bfloat16")
        ResumableScorer(scorer, Journal(path, {})).score(targets())
        assert scorer.precision == ("bfloat16" if close else "float32")


def test_answers_alone_are_tested_on_their_prompts(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe
) -> None:
    subject = open_model(model_folder, in_dtype(recipe, "bfloat16"))
    monkeypatch.setattr(evaluation, "MAX_DIFFERENCE", 0.0)
    journal = Journal(tmp_path / "journal", {})
    scorer = ResumableScorer(subject.scorer, journal, answerers=subject.answerers)
    scorer.answers([AnswerRequest([3, 4, 5], 2), AnswerRequest([6], 2)], "words")
    assert subject.precision() == "float32"


def test_scores_on_a_gpu_with_room_for_a_block_are_those_of_the_whole_model(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_checkpoint(model_folder).model
    expected = TorchScorer(model)
    batch = targets()
    with pretend_gpu(monkeypatch, model):
        scorer = TorchScorer(model, GPU)
        found, logits = scorer.score(batch), scorer.logits(batch)
    for ours, theirs in zip(found, expected.score(batch), strict=True):
        assert np.array_equal(ours, theirs)
    assert np.array_equal(logits, expected.logits(batch))


def test_the_memory_of_scoring_does_not_grow_with_the_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peaks = []
    for layers in (2, 4):
        model = GPT(GPTConfig(100, 32, 24, 8, (3,) * layers, (96,) * layers)).eval()
        with pretend_gpu(monkeypatch, model) as gpu:
            TorchScorer(model, GPU, "bfloat16").score(targets())
        peaks.append(gpu.peak)
    assert peaks[0] == peaks[1]


def test_a_model_without_room_stays_on_the_host(
    recipe: Recipe,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(evaluation, "choose_device", lambda _: cuda)
    monkeypatch.setattr(evaluation, "device_with_room", lambda *_: (cuda, BY_BLOCK))
    subject = open_model(model_folder, recipe)
    assert isinstance(subject.scorer, TorchScorer)
    assert subject.scorer.device == cuda and not subject.on_cpu
    assert subject.scorer.model.embedding.weight.device.type == "cpu"
    assert "evaluation: text is generated on the CPU" in caplog.messages

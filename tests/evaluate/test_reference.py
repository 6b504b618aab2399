"""Agreement with and divergence from a reference: against torch and scipy, and in the gate."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import rel_entr, softmax
from tokenizers import Tokenizer
from typer.testing import CliRunner

from lathe.cli import app
from lathe.evaluate.evaluate import evaluate
from lathe.evaluate.evaluation_folder import read_evaluation
from lathe.evaluate.gate import gate
from lathe.evaluate.tasks import text as reference
from lathe.model.checkpoint import load_checkpoint
from lathe.model.gpt import GPT
from lathe_base.config.settings import OfflineEvalSettings, Recipe
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.small_export import UNIFORM, make_model, save, write_unproven

RECIPE = Recipe(Offline_Eval=OfflineEvalSettings(overlapping_eval=16))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    words = np.random.default_rng(0).choice(["the", "keeper", "of", "a", "light", "sea"], 300)
    path = tmp_path / "text.txt"
    path.write_text(" ".join(words))
    return path


@pytest.fixture
def models(tmp_path: Path, byte_tokenizer: Tokenizer) -> tuple[Path, Path]:
    """A model, and a copy with slightly perturbed weights."""
    first = make_model(UNIFORM)
    second = GPT(UNIFORM)
    second.load_state_dict(first.state_dict())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in second.parameters():
            weight += 0.03 * torch.randn(weight.shape, generator=generator)
    a, b = tmp_path / "first", tmp_path / "second"
    return save(first, byte_tokenizer, a), save(second, byte_tokenizer, b)


def test_every_block_is_what_whole_distributions_say(
    models: tuple[Path, Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "POSITIONS", 40)
    evaluate(RECIPE, models[1], tmp_path / "out", text=text, reference=models[0])
    found = read_evaluation(tmp_path / "out").units["text"]
    first, second = (load_checkpoint(folder) for folder in models)
    ids = first.tokenizer.encode(text.read_text(), add_special_tokens=False).ids
    length, agreed, divergence = UNIFORM.n_positions, [], []
    for start in range(0, max(len(ids) - 1 - length, 0) + 16, 16):
        window = torch.tensor([ids[start : start + length + 1][:-1]])
        known = length - 16 if start else 0
        with torch.inference_mode():
            p, q = (
                softmax(m.model(window)[0, known:].double().numpy(), 1) for m in (first, second)
            )
        agreed += (p.argmax(1) == q.argmax(1)).tolist()
        divergence += rel_entr(p, q).sum(1).tolist()
    assert len(agreed) == len(ids) - 1 == found.column("tokens").sum()
    ends = found.column("tokens").cumsum().astype(int)[:-1]
    sums = [part.sum() for part in np.split(np.array(divergence), ends)]
    assert found.column("divergence") == pytest.approx(sums, rel=1e-4)
    hits = [part.sum() for part in np.split(np.array(agreed), ends)]
    assert found.column("agreed").tolist() == hits
    assert 0 < found.figures["agreement"] < 1
    assert found.figures["divergence"] == pytest.approx(np.mean(divergence), rel=1e-4)


def test_the_gate_shows_what_was_measured_beside_its_baseline(
    models: tuple[Path, Path], text: Path, tmp_path: Path
) -> None:
    evaluate(RECIPE, models[0], tmp_path / "a", text=text)
    beside = {"text": text, "reference": models[0]}
    evaluate(RECIPE, models[1], tmp_path / "b", **beside)
    result = gate(RECIPE, tmp_path / "a", tmp_path / "b")
    agreement, divergence = result.shown
    assert agreement.measure == "top-1 agreement" and divergence.measure.startswith("KL")
    assert agreement.low < agreement.value < agreement.high
    assert 0 < divergence.low < divergence.value < divergence.high
    assert [check.measure for check in result.checks] == ["perplexity"]
    assert gate(RECIPE, tmp_path / "b", tmp_path / "b").shown == ()  # a different baseline
    same = evaluate(RECIPE, models[0], tmp_path / "c", **beside)
    figures = read_evaluation(same.folder).units["text"].figures
    assert figures["agreement"] == 1 and figures["divergence"] == pytest.approx(0, abs=1e-9)


def test_an_export_beside_its_checkpoint_agrees_by_the_command(
    text: Path, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    onnx = tmp_path / "onnx"
    write_unproven(make_model(UNIFORM), byte_tokenizer, onnx)
    options = ["--text", text, "--reference", onnx / "checkpoint", "--output", tmp_path / "out"]
    done = CliRunner().invoke(app, ["evaluate", str(onnx), *map(str, options)])
    assert done.exit_code == 0, done.output
    figures = read_evaluation(tmp_path / "out").units["text"].figures
    assert figures["agreement"] > 0.99 and figures["divergence"] < 1e-6


def test_a_reference_has_to_read_the_same_tokens_and_a_text_has_to_be_given(
    models: tuple[Path, Path], model_folder: Path, text: Path, tmp_path: Path
) -> None:
    with raises(Code.MISMATCH, models[0], model_folder):
        evaluate(RECIPE, models[0], tmp_path / "out", text=text, reference=model_folder)
    cloze = tmp_path / "cloze.jsonl"
    cloze.write_text('{"text": "the keeper of the light"}\n' * 3)
    with raises(Code.MISSING_OPTION, models[0], models[1]):
        evaluate(RECIPE, models[0], tmp_path / "out", cloze=cloze, reference=models[1])

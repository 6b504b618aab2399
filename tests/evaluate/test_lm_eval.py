"""The same accuracy and perplexity as lm-evaluation-harness, example by example.

It is not among Lathe's requirements: `pip install 'lm-eval==0.4.*'` in a scratch environment.
"""

import json
import math
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.evaluate import by_lathe, by_lm_eval
from lathe.config.settings import OfflineEvalSettings, Recipe
from lathe.data.tokenizer import load_tokenizer
from lathe.evaluate.evaluate import evaluate
from lathe.model.checkpoint import save_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.gpt import GPT
from tests.evaluate.conftest import SENTENCES

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
    assert stage.cloze_accuracy == pytest.approx(theirs.correct.mean())
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

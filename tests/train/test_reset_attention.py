"""Training without attention across documents, against computing every document alone."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from lathe.data.prepare import prepare
from lathe.data.tokens import TokenDataset
from lathe.train import trainer
from lathe.train.batch import Batch
from lathe.train.batches import EvalBatches, TrainBatches
from lathe.train.pretrain import new_model, pretrain
from lathe.train.shape import model_config
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import UserError
from tests.support.small_run import SMALL, records, run_layouts
from tests.train.test_layouts import BASE, DP, MP, PP, SP, sharding

RESET = "Data.reset_attention=True"
LLAMA = ("Model.architecture=llama", "Model.num_key_value_heads=2")


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Path:
    """Documents of 1 to 60 tokens; most samples contain two or three."""
    folder = tmp_path_factory.mktemp("short")
    byte_tokenizer.save(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(0)
    texts = ("".join(rng.choice(list("abcd ef"), rng.integers(1, 60))) for _ in range(600))
    lines = "".join(json.dumps({"text": f"{text}."}) + "\n" for text in texts)
    (folder / "corpus.jsonl").write_text(lines)
    recipe = load_recipe("tiny", (*SMALL, "Prepare.keep_heldout_apart=False"))
    tokenizer = str(folder / "tokenizer.json")
    prepare(recipe, folder / "tokens", str(folder / "corpus.jsonl"), tokenizer)
    return folder / "tokens"


def document_spans(tokens: Tensor, eos_id: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of the documents in a sample's input, by its end-of-text tokens."""
    edges = [0, *((tokens[:-1] == eos_id).nonzero()[:, 0] + 1).tolist(), len(tokens) - 1]
    yield from ((a, b) for a, b in pairwise(edges) if a < b)


@pytest.mark.parametrize("shape", [(), LLAMA], ids=["gpt2", "llama"])
def test_the_first_losses_are_those_of_documents_alone(
    shape: tuple[str, ...], short_documents: Path, tmp_path: Path
) -> None:
    recipe = load_recipe("tiny", (*SMALL, *shape, RESET, "Engine.max_steps=1"))
    pretrain(recipe, short_documents, tmp_path / "run")
    data = TokenDataset.open(short_documents)
    model = new_model(model_config(recipe, 257), recipe.Model).eval()
    model.initialize(0.02, recipe.Global.seed)

    @torch.inference_mode()
    def loss(tokens: Tensor) -> float:
        spans = list(document_spans(tokens, data.eos_id))
        logits = torch.cat([model(tokens[None, a:b])[0] for a, b in spans])
        return float(F.cross_entropy(logits, tokens[1:]))

    batches = TrainBatches(recipe, data, Batch(8, 8, 8, 1), 0)
    expected = [loss(row) for row in torch.from_numpy(batches(0, 0))]
    assert records(tmp_path / "run", "loss")[0] == pytest.approx(np.mean(expected), abs=1e-6)
    validation = EvalBatches(recipe, data, 8, 2)
    rows = [row for i in range(len(validation)) for row in torch.from_numpy(validation[i])]
    found = records(tmp_path / "run", "eval_loss")[0]
    assert found == pytest.approx(np.mean([loss(row) for row in rows]), abs=1e-6)
    others = load_recipe("tiny", (*SMALL, *shape, "Engine.max_steps=1"))
    pretrain(others, short_documents, tmp_path / "attends")
    assert abs(records(tmp_path / "attends", "loss")[0] - np.mean(expected)) > 1e-5


def test_a_terminated_run_resumes_bit_identically(
    short_documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("tiny", (*SMALL, RESET, "Engine.max_steps=6", "Model.use_recompute=True"))
    pretrain(recipe, short_documents, tmp_path / "whole")
    update = trainer.Trainer.update

    def end_at_five(self: trainer.Trainer, rate: float) -> None:
        if self.at.step == 5:
            raise KeyboardInterrupt
        update(self, rate)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "update", end_at_five)
        with pytest.raises(KeyboardInterrupt):
            pretrain(recipe, short_documents, tmp_path / "ended")
    pretrain(recipe, short_documents, tmp_path / "ended")
    files = [tmp_path / name / "model.safetensors" for name in ("whole", "ended")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_unsupported_combinations_are_rejected(short_documents: Path, tmp_path: Path) -> None:
    recipe = load_recipe("tiny", (*SMALL, RESET, "Engine.compile=True"))
    with pytest.raises(UserError, match=r"reset_attention.*Engine\.compile"):
        pretrain(recipe, short_documents, tmp_path / "run")


TWO = {
    "mp2-sequence-parallel": (MP, SP),
    "pp2-interleaved": (PP, "Model.virtual_pp_degree=2"),
    "sharding2-stage3-recompute": (*sharding(3), "Model.use_recompute=True"),
}
FOUR = {"dp2-pp2": (DP, PP), "mp2-pp2-sequence-parallel": (MP, PP, SP)}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), LLAMA], ids=["gpt2", "llama"])
def test_layouts_trace_the_losses_of_one_process(
    shape: tuple[str, ...], short_documents: Path, tmp_path: Path
) -> None:
    given = (*BASE, *shape, RESET)
    pretrain(load_recipe("tiny", given), short_documents, tmp_path / "alone")
    for workers, layouts in ((2, TWO), (4, FOUR)):
        runs = {tmp_path / name: ("tiny", *given, *o) for name, o in layouts.items()}
        run_layouts(short_documents, runs, workers)
    for name in (*TWO, *FOUR):
        for key in ("loss", "eval_loss", "grad_norm"):
            found, expected = (records(tmp_path / run, key) for run in (name, "alone"))
            np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=name)

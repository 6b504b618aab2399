"""Training without attention across documents, against computing every document alone."""

import json
from collections.abc import Iterator
from dataclasses import replace
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
from lathe.model.block import Attention
from lathe.train import trainer
from lathe.train.batches import Batch, EvalBatches, TrainBatches
from lathe.train.pretrain import new_model, pretrain
from lathe.train.shape import model_config
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.small_export import UNIFORM
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


@pytest.mark.slow
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
    with raises(Code.CONFLICTING_OPTIONS, "Data.reset_attention", "Engine.compile"):
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


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    bounds_k: Tensor,
    longest: int,
    longest_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What `torch.nn.attention.varlen.varlen_attn`, which runs on GPUs only, is documented to do,
    as sums over positions."""
    assert torch.equal(bounds, bounds_k) and longest == longest_k == int(bounds.diff().max())
    assert enable_gqa == (k.shape[1] != q.shape[1]) and window_size[1] == 0
    per_group, out = q.shape[1] // k.shape[1], torch.zeros_like(q)
    for begin, end in pairwise(bounds.tolist()):
        for head in range(q.shape[1]):
            keys, values = (x[begin:end, head // per_group] for x in (k, v))
            for t in range(end - begin):
                first = 0 if window_size[0] < 0 else max(0, t - window_size[0])
                scores = keys[first : t + 1] @ q[begin + t, head]
                scores = scores * (q.shape[2] ** -0.5 if scale is None else scale)
                out[begin + t, head] = scores.softmax(0) @ values[first : t + 1]
    return out


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("groups", [4, 2])
def test_one_kernel_for_all_documents_or_a_window_is_given_what_others_are(
    window: int | None, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = Attention(replace(UNIFORM, n_head=(4, 4), head_dim=8, n_embd=32), 0, 0.0)
    attention.window, attention.per_group = window, 4 // groups
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 9, 8, generator=generator) for n in (4, groups, groups))
    sizes = (4, 5, 9)
    documents, rows = (attention._core(q, k, v, mask, None) for mask in (sizes, None))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    monkeypatch.setattr("lathe.model.block.runs_varlen", lambda *_: True)
    torch.testing.assert_close(attention._core(q, k, v, sizes, None), documents)
    if window:  # a whole row, too, instead of a mask
        monkeypatch.setattr(F, "scaled_dot_product_attention", None)
    torch.testing.assert_close(attention._core(q, k, v, None, None), rows)

"""The distillation loss against torch's on whole logits, and training a student."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lathe.compress.prune import prune
from lathe.model.gpt import GPT
from lathe.train import distill
from lathe.train import loss as loss_module
from lathe.train.distill import Guidance, Teacher, distillation_loss
from lathe.train.pretrain import pretrain
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import DistillSettings
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.small_run import SMALL, records, run

B, T, C, V = 2, 7, 8, 31


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    pair = [normal(B, T, C).requires_grad_(), normal(V, C).requires_grad_()]
    return [*pair, normal(B, T, C), normal(V, C)]


@pytest.mark.parametrize(("chunk_elements", "block_elements"), [(2**26, 2**20), (200, 70)])
@pytest.mark.parametrize(
    "values",
    [
        {"alpha": 1.0},
        {"alpha": 0.0},
        {"alpha": 0.3, "temperature": 2.0},
        {"alpha": 0.5, "hidden": 0.7},
    ],
)
def test_loss_and_gradients_equal_torchs(
    values: dict[str, float],
    chunk_elements: int,
    block_elements: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", chunk_elements)
    monkeypatch.setattr(distill, "BLOCK_ELEMENTS", block_elements)
    hidden, weight, teacher_hidden, teacher_weight = tensors(0)
    targets = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(1))
    settings = DistillSettings(**values)
    guide = Guidance(teacher_hidden, teacher_weight, settings)
    found = distillation_loss(hidden, weight, targets, guide)
    grads = torch.autograd.grad(found * 3, [hidden, weight])

    logits = (hidden @ weight.T).flatten(0, 1)
    wanted = (teacher_hidden @ teacher_weight.T).flatten(0, 1)
    alpha, t = settings.alpha, settings.temperature
    both = F.log_softmax(logits / t, 1), F.log_softmax(wanted / t, 1)
    soft = t**2 * F.kl_div(*both, reduction="batchmean", log_target=True)
    expected = (1 - alpha) * F.cross_entropy(logits, targets.flatten()) + alpha * soft
    if settings.hidden:
        ones = torch.ones(B * T)
        flat = hidden.flatten(0, 1).float(), teacher_hidden.flatten(0, 1).float()
        expected = expected + settings.hidden * F.cosine_embedding_loss(*flat, ones)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    independent = torch.autograd.grad(expected * 3, [hidden, weight])
    for ours, theirs in zip(grads, independent, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def test_teacher_must_know_the_tokens(small_gpt: GPT) -> None:
    teacher = Teacher(small_gpt, DistillSettings(hidden=1.0))
    config = small_gpt.config
    with raises(Code.MISMATCH, f"{config.vocab_size} ids", config.vocab_size + 128):
        teacher.check(dataclasses.replace(config, vocab_size=config.vocab_size + 128))
    with raises(Code.MISMATCH, config.n_embd, config.n_embd * 2, "Compress.Distill.hidden"):
        teacher.check(dataclasses.replace(config, n_embd=config.n_embd * 2))


DISTILL = (
    *SMALL,
    "Compress.Prune.ratio=0.5",
    "Compress.Prune.criterion=taylor",
    "Compress.Prune.scope=global",
    "Compress.Distill.teacher=parent",
    "Compress.Distill.alpha=1.0",
    "Global.global_batch_size=8",
    "Global.local_batch_size=",
)


@pytest.mark.slow
def test_pruned_model_learns_from_the_dense_one(small_data: Path, tmp_path: Path) -> None:
    """With alpha 1, the training loss is only the divergence; validation still uses the text."""
    long = ("Engine.max_steps=80", "Optimizer.lr.max_lr=1e-2")
    small_dense = tmp_path / "dense"
    pretrain(load_recipe("tiny", (*SMALL, *long)), small_data, small_dense)
    # So much that fitting what stays leaves something to learn.
    distill = (*DISTILL, "Compress.Prune.ratio=0.8")
    result = prune(load_recipe("tiny", distill), small_dense, small_data, tmp_path / "p")
    losses = records(tmp_path / "p", "loss")
    assert losses[-1] < 0.7 * losses[0]
    assert result.eval_loss < result.first_eval_loss
    sharded = ("Distributed.sharding.sharding_degree=2", "Distributed.sharding.sharding_stage=3")
    run(
        *("prune", small_dense, small_data, tmp_path / "two"),
        overrides=(*distill, *sharded),
        workers=2,
    )
    assert records(tmp_path / "two", "loss") == pytest.approx(losses, rel=1e-4)


@pytest.mark.slow
def test_rounds_reach_the_ratio(small_dense: Path, small_data: Path, tmp_path: Path) -> None:
    rounds = ("Compress.Prune.rounds=2", "Engine.max_steps=6", "Optimizer.lr.warmup_rate=0.0")
    result = prune(
        load_recipe("tiny", (*DISTILL, "Compress.Prune.scope=uniform", *rounds)),
        *(small_dense, small_data, tmp_path / "p"),
    )
    once = prune(
        load_recipe("tiny", (*DISTILL, "Compress.Prune.scope=uniform", "Engine.max_steps=3")),
        *(small_dense, small_data, tmp_path / "once"),
    )
    assert result.n_params == pytest.approx(once.n_params, rel=0.01)
    assert result.step == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["once", "p"]

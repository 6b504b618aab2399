"""Importance scores of heads and channels against direct computations of their definitions."""

from typing import get_args

import pytest
import torch

from lathe.compress.criteria import CRITERIA, importance
from lathe.model.gpt import GPT
from lathe.train.loss import next_token_loss
from lathe_base.config.settings import PruneSettings

BATCHES = list(
    torch.randint(0, 40, (6, 17), generator=torch.Generator().manual_seed(0)).split([3, 3])
)
HEAD_DIM = 12


def test_every_criterion_can_be_named_in_a_recipe() -> None:
    assert get_args(PruneSettings.model_fields["criterion"].annotation) == tuple(CRITERIA)


def without(model: GPT, layer: int, kind: str, unit: int) -> GPT:
    """Zero the output of one unit in place; returns the model."""
    block = model.h[layer]
    with torch.no_grad():
        if kind == "head":
            block.attn.c_proj.weight[:, unit * HEAD_DIM : (unit + 1) * HEAD_DIM] = 0
        else:
            block.mlp.c_proj.weight[:, unit] = 0
    return model


def test_fpgm_is_the_mean_distance_to_the_others(small_gpt: GPT) -> None:
    rows = small_gpt.h[1].mlp.c_fc.weight.detach()
    expected = torch.stack([(rows - row).square().sum(1).sqrt().sum() for row in rows]) / len(rows)
    torch.testing.assert_close(importance(small_gpt, "fpgm", []).channels[1], expected)


def test_activation_is_the_mean_over_tokens(small_gpt: GPT) -> None:
    found = importance(small_gpt, "activation", BATCHES)
    small_gpt.eval()
    seen: dict[str, list[torch.Tensor]] = {"attn": [], "mlp": []}
    block = small_gpt.h[1]
    hooks = [
        getattr(block, name).c_proj.register_forward_hook(
            lambda m, inputs, out, name=name: seen[name].append(inputs[0].detach())
        )
        for name in seen
    ]
    for batch in BATCHES:
        small_gpt(batch[:, :-1])
    for hook in hooks:
        hook.remove()
    channels = torch.cat(seen["mlp"]).flatten(0, 1)
    torch.testing.assert_close(found.channels[1], channels.abs().mean(0))
    outputs = torch.cat(seen["attn"]).flatten(0, 1)
    for head in range(4):
        part = outputs[:, head * HEAD_DIM : (head + 1) * HEAD_DIM]
        torch.testing.assert_close(found.heads[1][head], part.square().sum(1).sqrt().mean())


@pytest.mark.parametrize(("kind", "unit"), [("head", 2), ("channel", 5)])
def test_taylor_is_the_squared_slope_along_a_gate(small_gpt: GPT, kind: str, unit: int) -> None:
    """Reference: central differences, scaling the unit's output weights by 1 +- epsilon."""
    model = small_gpt.double()
    found = importance(model, "taylor", BATCHES)
    weight = (model.h[1].attn if kind == "head" else model.h[1].mlp).c_proj.weight
    width = HEAD_DIM if kind == "head" else 1
    columns = slice(unit * width, (unit + 1) * width)
    whole, squares, little = weight.detach().clone(), [], 1e-4
    for sequence in torch.cat(BATCHES):
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                weight.copy_(whole)
                weight[:, columns] *= 1 + sign * little
                losses.append(float(next_token_loss(model, sequence[None])))
        squares.append(((losses[0] - losses[1]) / (2 * little)) ** 2)
    scores = found.heads[1] if kind == "head" else found.channels[1]
    assert float(scores[unit]) == pytest.approx(sum(squares) / len(squares), rel=1e-3)


@pytest.mark.parametrize("criterion", ["activation", "taylor"])
def test_the_model_is_left_as_it_was(small_gpt: GPT, criterion: str) -> None:
    small_gpt.train()
    importance(small_gpt, criterion, BATCHES)
    assert small_gpt.training
    assert not any(m._forward_pre_hooks for m in small_gpt.modules())
    assert all(p.grad is None for p in small_gpt.parameters())


@pytest.mark.parametrize("criterion", ["l1_norm", "l2_norm", "activation", "taylor"])
def test_a_dead_unit_is_the_least_important(small_gpt: GPT, criterion: str) -> None:
    block = small_gpt.h[0]
    with torch.no_grad():
        for linear, rows in ((block.attn.c_attn, slice(36, 72)), (block.mlp.c_fc, slice(7, 8))):
            linear.weight[rows] = 0
            linear.bias[rows] = 0
    found = importance(without(small_gpt, 0, "channel", 7), criterion, BATCHES)
    assert int(found.heads[0].argmin()) == 1
    assert int(found.channels[0].argmin()) == 7

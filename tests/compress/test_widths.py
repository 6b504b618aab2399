"""Pruning against an independent statement of it: zeroing what is removed changes nothing more."""

import numpy as np
import pytest
import torch

from lathe.compress.widths import Kept, choose_uniform, shrink
from lathe.model.gpt import GPT

TOKENS = torch.arange(40).view(2, 20)


def test_choice_is_the_lowest_mean_magnitude(small_gpt: GPT) -> None:
    kept = choose_uniform(small_gpt, "l1_norm", 0.25)
    for block, layer in zip(small_gpt.h, kept, strict=True):
        qkv = block.attn.c_attn.weight.detach().numpy()  # rows: q, k, v of a head
        scores = [abs(qkv[h * 36 : (h + 1) * 36]).mean() for h in range(4)]
        assert layer.heads.tolist() == sorted(np.argsort(scores)[1:].tolist())
        channels = abs(block.mlp.c_fc.weight.detach().numpy()).mean(1)
        assert layer.channels.tolist() == sorted(np.argsort(channels)[24:].tolist())


def test_l2_ranks_by_energy(small_gpt: GPT) -> None:
    weight = small_gpt.h[0].mlp.c_fc.weight.detach()
    weight[0] = 0.0
    weight[0, 0] = 5.0  # small mean, much energy
    assert 0 not in choose_uniform(small_gpt, "l1_norm", 0.5)[0].channels
    assert 0 in choose_uniform(small_gpt, "l2_norm", 0.5)[0].channels


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.9])
def test_shrunk_logits_equal_zeroed_ones(small_gpt: GPT, ratio: float) -> None:
    kept = choose_uniform(small_gpt, "l1_norm", ratio)
    pruned = shrink(small_gpt, kept).eval()
    assert all(len(layer.heads) >= 1 for layer in kept)
    with torch.inference_mode():
        after = pruned(TOKENS)
        for block, layer in zip(small_gpt.h, kept, strict=True):
            gone = [h for h in range(4) if h not in layer.heads.tolist()]
            for h in gone:
                block.attn.c_proj.weight[:, h * 12 : (h + 1) * 12] = 0
            off = torch.ones(96, dtype=torch.bool)
            off[layer.channels] = False
            block.mlp.c_proj.weight[:, off] = 0
        torch.testing.assert_close(small_gpt(TOKENS), after, atol=1e-5, rtol=1e-5)
    assert pruned.config.n_params() == sum(p.numel() for p in pruned.parameters())


def test_layers_may_differ(small_gpt: GPT) -> None:
    kept = [
        Kept(torch.tensor([1]), torch.arange(10)),
        Kept(torch.tensor([0, 3]), torch.arange(96)),
    ]
    pruned = shrink(small_gpt, kept)
    assert (pruned.config.n_head, pruned.config.n_inner) == ((1, 2), (10, 96))
    assert pruned(TOKENS).isfinite().all()

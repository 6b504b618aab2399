"""Pruning against a reference: zeroing the removed units, which must give the same outputs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lathe.compress.criteria import Importance, importance
from lathe.compress.widths import (
    Cost,
    KeptUnits,
    choose_global,
    choose_layers,
    choose_uniform,
    keep_layers,
    shrink,
)
from lathe.model.gpt import GPT
from lathe.train.loss import batch_losses
from tests.support.small_models import small_config

TOKENS = torch.arange(40).view(2, 20)


def test_choice_is_the_lowest_mean_magnitude(small_gpt: GPT) -> None:
    kept = choose_uniform(importance(small_gpt, "l1_norm", []), 0.25)
    for block, layer in zip(small_gpt.h, kept, strict=True):
        qkv = block.attn.c_attn.weight.detach().numpy()  # rows: q, k, v per head
        scores = [abs(qkv[h * 36 : (h + 1) * 36]).mean() for h in range(4)]
        assert layer.heads.tolist() == sorted(np.argsort(scores)[1:].tolist())
        channels = abs(block.mlp.c_fc.weight.detach().numpy()).mean(1)
        assert layer.channels.tolist() == sorted(np.argsort(channels)[24:].tolist())


def test_l2_ranks_by_energy(small_gpt: GPT) -> None:
    weight = small_gpt.h[0].mlp.c_fc.weight.detach()
    weight[0] = 0.0
    weight[0, 0] = 5.0  # small mean, large energy
    assert 0 not in choose_uniform(importance(small_gpt, "l1_norm", []), 0.5)[0].channels
    assert 0 in choose_uniform(importance(small_gpt, "l2_norm", []), 0.5)[0].channels


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.9])
def test_shrunk_logits_equal_zeroed_ones(small_gpt: GPT, ratio: float) -> None:
    kept = choose_uniform(importance(small_gpt, "l1_norm", []), ratio)
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
    assert pruned.config.n_params == sum(p.numel() for p in pruned.parameters())


def test_layers_may_differ(small_gpt: GPT) -> None:
    kept = [
        KeptUnits(torch.tensor([1]), torch.arange(10)),
        KeptUnits(torch.tensor([0, 3]), torch.arange(96)),
    ]
    pruned = shrink(small_gpt, kept)
    assert (pruned.config.n_head, pruned.config.n_inner) == ((1, 2), (10, 96))
    assert pruned(TOKENS).isfinite().all()


def scores(seed: int, layers: int = 3) -> Importance:
    generator = torch.Generator().manual_seed(seed)
    return Importance(
        [torch.rand(4, generator=generator) for _ in range(layers)],
        [torch.rand(96, generator=generator) for _ in range(layers)],
    )


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    ratio=st.floats(0, 0.95),
    multiple=st.sampled_from([1, 8, 32]),
    comparable=st.booleans(),
)
def test_global_removes_the_budget_and_nothing_better(
    seed: int, ratio: float, multiple: int, comparable: bool
) -> None:
    given_scores, cost = scores(seed), Cost(head=50.0, channel=2.0)
    kept = choose_global(given_scores, cost, ratio, multiple, comparable)
    wanted, removed = ratio * 3 * (4 * cost.head + 96 * cost.channel), 0.0
    for heads, channels, layer in zip(given_scores.heads, given_scores.channels, kept, strict=True):
        assert len(layer.heads) >= 1 and len(layer.channels) >= multiple
        assert len(layer.channels) % multiple == 0
        for values, stay in ((heads, layer.heads), (channels, layer.channels)):
            gone = [i for i in range(len(values)) if i not in set(stay.tolist())]
            if gone:  # no kept unit scores below a removed one of its layer
                assert float(values[stay].min()) >= float(values[gone].max())
        removed += (len(heads) - len(layer.heads)) * cost.head
        removed += (len(channels) - len(layer.channels)) * cost.channel
    largest = 3 * cost.head + max(
        cost.head, multiple * cost.channel
    )  # the last head of a layer is always kept
    assert abs(removed - wanted) <= largest + 3 * multiple * cost.channel


def test_global_removes_the_share_where_no_layer_could_round_to_it() -> None:
    """An eighth of three heads is none, of all parameters as many as asked for."""
    given_scores, cost = scores(0), Cost(head=50.0, channel=2.0)
    few = Importance([x[:3] for x in given_scores.heads], given_scores.channels)
    kept = choose_global(few, cost, 0.125, comparable=True)
    removed = sum(
        (3 - len(layer.heads)) * cost.head + (96 - len(layer.channels)) * cost.channel
        for layer in kept
    )
    assert removed == pytest.approx(0.125 * 3 * (3 * 50 + 96 * 2), abs=cost.head / 2)


def test_global_takes_from_the_layer_that_matters_least() -> None:
    given_scores = scores(0, layers=2)
    weak = Importance(
        [given_scores.heads[0], given_scores.heads[1] * 1e-3],
        [given_scores.channels[0], given_scores.channels[1] * 1e-3],
    )
    first, second = choose_global(weak, Cost(50.0, 2.0), 0.4, 8, comparable=True)
    assert len(first.heads) == 4 and len(first.channels) == 96
    assert len(second.heads) == 1 and len(second.channels) < 40


def test_channels_stay_in_multiples() -> None:
    for layer in choose_uniform(scores(1), 0.3, multiple=16):
        assert len(layer.channels) == 80  # 67.2 rounded up


def test_layers_go_where_the_loss_is_least() -> None:
    """The loss is that of models without one layer each."""
    model = GPT(small_config(n_head=(4,) * 4, n_inner=(96,) * 4))
    model.initialize(0.3, 1)
    batches = [*torch.randint(384, (2, 2, 25), generator=torch.Generator().manual_seed(1))]
    kept = list(range(4))
    for removed in (1, 2):
        parts = [[i for i in kept if i != gone] for gone in kept]
        losses = [sum(batch_losses(keep_layers(model, part).eval(), batches)) for part in parts]
        kept = parts[int(np.argmin(losses))]
        assert choose_layers(model, batches, removed) == kept
    assert len(choose_layers(model, batches, 9)) == 1


def test_kept_layers_compute_what_they_did(small_gpt: GPT) -> None:
    part = keep_layers(small_gpt, [1]).eval()
    small_gpt.eval()
    with torch.inference_mode():
        expected = small_gpt.head(small_gpt.ln_f(small_gpt.h[1](small_gpt.embed(TOKENS))))
        torch.testing.assert_close(part(TOKENS), expected)
    assert part.config.n_layer == 1

"""The recipes of Ascend's GPT-2 for Megatron-DeepSpeed, against the flags of its scripts."""

from typing import Any

import pytest

from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings import Recipe

# model size: (TP, PP, DP), hidden, layers, heads, sequence, global and micro batch, lr, min lr.
SIZES: dict[str, tuple[tuple[int, int, int], int, int, int, int, int, int, float, float]] = {
    "345m": ((1, 2, 4), 1024, 24, 16, 1024, 16, 4, 1.5e-4, 1.5e-5),
    "1.3b": ((2, 2, 2), 2048, 24, 16, 1024, 32, 8, 2e-4, 2e-5),
    "2.7b": ((2, 2, 2), 2560, 32, 32, 2048, 32, 8, 1.6e-4, 1.6e-5),
    "3.7b": ((2, 2, 2), 3072, 32, 32, 2048, 16, 4, 1.2e-4, 1.2e-5),
    "345m-without-mp": ((1, 1, 8), 1024, 24, 16, 1024, 64, 8, 1.5e-4, 1.5e-5),
}

FORMER = {
    "gpt-345m-pp2-dp4": "megatron-345m",
    "gpt-1.3b-mp2-pp2-dp2": "megatron-1.3b",
    "gpt-2.7b": "megatron-2.7b",
    "gpt-3.7b": "megatron-3.7b",
    "gpt-345m-without-mp": "megatron-345m-without-mp",
}

# One micro-batch per pipeline stage is the least that 1F1B runs with; the script has one for two.
LOWERED_MICRO_BATCH = {"345m": 2}


def flags_of(recipe: Recipe) -> dict[str, Any]:
    """The settings under the names of the scripts' flags and of ds_config.json."""
    m, o, e, d = recipe.Model, recipe.Optimizer, recipe.Engine, recipe.Distributed
    return {
        "layout": (d.mp_degree, d.pp_degree, d.dp_degree),
        "num-layers": m.num_layers,
        "hidden-size": m.hidden_size,
        "num-attention-heads": m.num_attention_heads,
        "ffn": m.ffn_size,
        "seq-length": recipe.Data.Train.dataset.max_seq_len,
        "max-position-embeddings": m.max_position_embeddings,
        "vocabulary": m.vocab_size,
        "init": (m.initializer_range, m.scale_residual_init),
        "micro-batch-size": recipe.Global.micro_batch_size,
        "global-batch-size": recipe.Global.global_batch_size,
        "train-iters": e.max_steps,
        "lr-decay-iters": o.lr.decay_steps,
        "lr": (o.lr.max_lr, o.lr.min_lr),
        "lr-warmup-fraction": o.lr.warmup_rate,
        "split": recipe.Data.Train.dataset.split,
        "weight-decay": o.weight_decay,
        "adam": (o.beta1, o.beta2, o.epsilon),
        "clip-grad": o.grad_clip.clip_norm,
        "intervals": (e.logging_freq, e.eval_freq, e.save_load.save_steps),
        "eval-iters": e.eval_iters,
        "fp16": (e.mix_precision.dtype, e.mix_precision.is_pure),
        "loss scale": (e.mix_precision.use_dynamic_loss_scaling, e.mix_precision.scale_loss),
        "loss_scale_window": e.mix_precision.loss_scale_window,
        "hysteresis": e.mix_precision.hysteresis,
        "seed": recipe.Global.seed,
        "dropout": (m.attention_probs_dropout_prob, m.hidden_dropout_prob),
        "checkpoint-activations": m.recompute,
        "zero": d.sharding.sharding_degree,
    }


@pytest.mark.parametrize("size", SIZES)
def test_a_recipe_has_the_values_of_the_scripts_flags(size: str) -> None:
    layout, hidden, layers, heads, length, total, micro, lr, min_lr = SIZES[size]
    assert flags_of(load_recipe(f"megatron-{size}")) == {
        "layout": layout,
        "num-layers": layers,
        "hidden-size": hidden,
        "num-attention-heads": heads,
        "ffn": 4 * hidden,
        "seq-length": length,
        "max-position-embeddings": length,
        "vocabulary": {1: 50304, 2: 50432}[layout[0]],
        "init": (0.02, True),
        "micro-batch-size": LOWERED_MICRO_BATCH.get(size, micro),
        "global-batch-size": total,
        "train-iters": 500_000,
        "lr-decay-iters": 320_000,
        "lr": (lr, min_lr),
        "lr-warmup-fraction": 0.01,
        "split": (949, 50, 1),
        "weight-decay": 1e-2,
        "adam": (0.9, 0.999, 1e-8),
        "clip-grad": 1.0,
        "intervals": (100, 1000, 100_000),
        "eval-iters": 10,
        "fp16": ("float16", True),
        "loss scale": (True, 2.0**12),
        "loss_scale_window": 500,
        "hysteresis": 2,
        "seed": 1234,
        "dropout": (0.0, 0.0),
        "checkpoint-activations": None if size == "345m-without-mp" else "full",
        "zero": 1,
    }


@pytest.mark.parametrize(("former", "name"), FORMER.items())
def test_the_former_names_are_the_same_recipes(former: str, name: str) -> None:
    assert load_recipe(former) == load_recipe(name)

"""The Paddle GPT against torch's: logits of a checkpoint, pruning masks, fake quantization."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from lathe.compress.criteria import importance
from lathe.compress.widths import choose_uniform
from lathe.model import fake_quant
from lathe.model.checkpoint import load_checkpoint, save_checkpoint
from lathe.model.gpt import GPT
from lathe.model.integer_weights import fake_quantize_weight
from lathe.model.quantization import QuantizationPlan, WeightFormat
from lathe_base.config.recipe import load_recipe
from tests.support.small_models import small_config

TOKENS = np.random.default_rng(0).integers(0, 257, (2, 48))
PRUNED = {"n_head": (4, 2), "n_inner": (96, 40)}


def save(model: GPT, folder: Path, tokenizer: Tokenizer) -> Path:
    save_checkpoint(folder, model, tokenizer, "pretrain", load_recipe("tiny"))
    return folder


def random_gpt(**changes: object) -> GPT:
    model = GPT(small_config(**changes))
    model.initialize(0.2, seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # make biases and norms matter
                parameter += 0.1 * torch.randn(parameter.shape, generator=_generator(name))
    return model.eval()


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(len(name))


def test_logits_and_files_are_the_same(
    in_paddle: Callable, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    models = {"full": random_gpt(), "pruned": random_gpt(**PRUNED)}
    for shape, model in models.items():
        save(model, tmp_path / shape, byte_tokenizer)
    out = in_paddle(
        """
        from lathe_paddle.checkpoint import load_checkpoint, save_checkpoint
        from lathe_base.config.recipe import load_recipe
        for shape in ("full", "pruned"):
            checkpoint = load_checkpoint(folder / shape)
            out[shape] = checkpoint.model(paddle.to_tensor(given["tokens"])).numpy()
            parts = checkpoint.model, checkpoint.tokenizer, "prune", load_recipe("tiny")
            save_checkpoint(folder / f"{shape}-again", *parts)
        """,
        tokens=TOKENS,
    )
    for shape, model in models.items():
        with torch.no_grad():
            expected = model(torch.from_numpy(TOKENS)).numpy()
        assert expected.std() > 0.5
        assert np.abs(out[shape] - expected).max() < 1e-5
        again = load_checkpoint(tmp_path / f"{shape}-again")
        assert again.meta["engine"] == "paddle"
        for name, tensor in again.model.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name]), (shape, name)


@pytest.mark.parametrize("criterion", ["l1_norm", "l2_norm"])
@pytest.mark.slow
def test_paddleslim_prunes_the_same_heads_and_channels(
    criterion: str, in_paddle: Callable, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    model = random_gpt(n_head=(4, 4, 4), n_inner=(96, 96, 96))
    save(model, tmp_path / "model", byte_tokenizer)
    out = in_paddle(
        f"""
        from lathe_paddle.checkpoint import load_checkpoint
        from lathe_paddle.prune import cut
        from lathe_base.config.settings import PruneSettings
        model = load_checkpoint(folder / "model").model
        small, kept = cut(model, PruneSettings(criterion="{criterion}", ratio=0.4), folder)
        small.eval()
        out["logits"] = small(paddle.to_tensor(given["tokens"])).numpy()
        for i, layer in enumerate(kept):
            out[f"heads{{i}}"], out[f"channels{{i}}"] = layer.heads, layer.channels
        """,
        tokens=TOKENS,
    )
    ours = choose_uniform(importance(model, criterion, ()), 0.4)  # type: ignore[arg-type]
    assert [len(layer.heads) for layer in ours] == [2, 2, 2]
    for i, layer in enumerate(ours):
        assert out[f"heads{i}"].tolist() == layer.heads.tolist()
        assert out[f"channels{i}"].tolist() == layer.channels.tolist()
    from lathe.compress.widths import shrink

    with torch.no_grad():
        expected = shrink(model, ours).eval()(torch.from_numpy(TOKENS)).numpy()
    assert np.abs(out["logits"] - expected).max() < 1e-5


def test_fake_quantization_is_the_same_at_the_same_scales(in_paddle: Callable) -> None:
    x = np.random.default_rng(1).normal(size=(64, 48)).astype(np.float32)
    scale = float(np.abs(x).max() / 127)
    out = in_paddle(
        f"""
        from lathe_paddle import fake_quant
        from paddle.nn.quant.quant_layers import (
            FakeQuantAbsMax, FakeQuantChannelWiseAbsMax, FakeQuantMovingAverageAbsMax)
        x = paddle.to_tensor(given["x"])
        activation = FakeQuantMovingAverageAbsMax()
        fake_quant.set_range(activation, 127 * {scale})
        activation.eval()
        out["activation"] = activation(x).numpy()
        out["abs_max"] = FakeQuantAbsMax(quant_on_weight=True)(x).numpy()
        out["channel_wise_abs_max"] = FakeQuantChannelWiseAbsMax(
            channel_num=48, quant_axis=1, quant_on_weight=True)(x).numpy()
        activation.train()
        activation(2 * x)
        out["moved"] = activation._scale.numpy()
        """,
        x=x,
    )
    observer = fake_quant.Observer(scale)
    assert out["activation"] == pytest.approx(
        observer.eval()(torch.from_numpy(x)).numpy(), abs=1e-6
    )
    for kind in ("abs_max", "channel_wise_abs_max"):
        form = WeightFormat(kind)  # type: ignore[arg-type]
        ours = fake_quantize_weight(torch.from_numpy(x.T.copy()), form)
        assert out[kind] == pytest.approx(ours.numpy().T, abs=1e-6)
    assert out["moved"][0] == pytest.approx((0.9 + 0.1 * 2) * 127 * scale, rel=1e-6)


@pytest.mark.slow
def test_a_quantized_checkpoint_has_the_same_logits(
    in_paddle: Callable, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    model = random_gpt(**PRUNED)
    names = [*model.config.linear_names()[1:], "lm_head"]  # the first one stays in float
    plan = QuantizationPlan.w8a8(dict.fromkeys(names, 0.0))
    with torch.no_grad():
        in_float = model(torch.from_numpy(TOKENS)).numpy()
    fake_quant.insert(model, plan)
    scales = fake_quant.calibrate(model, [torch.from_numpy(TOKENS)])
    model.config = model.config.with_quantization(plan.with_scales(scales))
    save(model, tmp_path / "model", byte_tokenizer)
    out = in_paddle(
        """
        from lathe_paddle import fake_quant
        from lathe_paddle.checkpoint import load_checkpoint
        model = load_checkpoint(folder / "model").model
        fake_quant.insert(model, model.config.quantization)
        model.eval()
        out["logits"] = model(paddle.to_tensor(given["tokens"])).numpy()
        """,
        tokens=TOKENS,
    )
    with torch.no_grad():
        expected = model.eval()(torch.from_numpy(TOKENS)).numpy()
    cost = np.abs(expected - in_float).mean()
    assert (
        np.abs(out["logits"] - expected).mean() < 0.2 * cost
    )  # inputs halfway between levels may round differently

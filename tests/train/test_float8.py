"""Matrix products in fp8: against the same arithmetic in float32, and in a training."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lathe.train import float8
from lathe.train.float8 import E4M3, E5M2, Float8Linear
from lathe.train.layout import configured_layout
from lathe.train.pretrain import new_model, pretrain
from lathe.train.shape import model_config
from lathe_base.config.recipe import load_recipe
from lathe_base.errors import UserError
from tests.support.small_run import SMALL, records

FP8 = ("Engine.mix_precision.dtype=bfloat16", "Engine.mix_precision.fp8=True")


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What fp8 makes of a tensor, in float32."""
    scale = x.abs().max().float() / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype).float() * scale


@pytest.mark.parametrize("rows", [32, 21])
def test_the_three_products_are_those_of_rounded_factors(rows: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48).bfloat16()
    x = torch.randn(rows, 64, dtype=torch.bfloat16, requires_grad=True)
    slope = 1e-6 * torch.randn(rows, 48, dtype=torch.bfloat16)  # below e4m3's range, unscaled
    y = Float8Linear(linear)(x)
    y.backward(slope)
    assert y.dtype == torch.bfloat16
    x8, w8 = rounded(x.detach(), E4M3), rounded(linear.weight.detach(), E4M3)
    g8 = rounded(slope, E5M2)
    assert x.grad is not None and linear.weight.grad is not None and linear.bias.grad is not None
    for found, expected in (
        (y, x8 @ w8.T + linear.bias),
        (x.grad, g8 @ w8),
        (linear.weight.grad, g8.T @ x8),
        (linear.bias.grad, slope.float().sum(0)),
    ):
        expected = expected.detach()
        off = 1e-2 * float(expected.abs().max())
        torch.testing.assert_close(found.detach().float(), expected, rtol=1e-2, atol=off)


def test_only_the_blocks_linears_of_whole_tiles_are_in_fp8() -> None:
    recipe = load_recipe("tiny", SMALL)
    config = model_config(recipe, 512)
    model = new_model(config, recipe.Model)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    float8.insert(model)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    assert sum(isinstance(m, Float8Linear) for m in model.modules()) == 4 * config.n_layer
    odd = nn.ModuleDict({"linear": nn.Linear(24, 32)})
    float8.insert(odd)  # type: ignore[arg-type]
    assert type(odd["linear"]) is nn.Linear


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_loss_falls_as_in_bfloat16(level: str, small_data: Path, tmp_path: Path) -> None:
    short = "Engine.max_steps=16", "Engine.eval_freq=16"
    same = (*SMALL, FP8[0], f"Engine.mix_precision.level={level}", *short)
    for name, more in {"bfloat16": (), "fp8": FP8[1:]}.items():
        pretrain(load_recipe("tiny", (*same, *more)), small_data, tmp_path / name)
    wide, narrow = (np.array(records(tmp_path / name, "loss")) for name in ("bfloat16", "fp8"))
    assert not np.array_equal(wide, narrow)
    np.testing.assert_allclose(narrow, wide, rtol=0.01)
    assert wide[0] - narrow[-1] > 0.98 * (wide[0] - wide[-1]) > 0.1


@pytest.mark.slow
def test_it_compiles_to_whole_graphs() -> None:
    linear = Float8Linear(nn.Linear(64, 48).bfloat16())
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    eager = linear(x)
    compiled = torch.compile(linear, fullgraph=True)(x)
    torch.testing.assert_close(compiled, eager, rtol=1e-2, atol=1e-2)
    compiled.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize(
    "overrides, message",
    [
        (("Engine.mix_precision.dtype=float16",), "dtype float16"),
        (("Distributed.mp_degree=2",), "mp_degree 2"),
    ],
)
def test_refusals(overrides: tuple[str, ...], message: str) -> None:
    recipe = load_recipe("tiny", (*SMALL, *FP8, *overrides))
    config = model_config(recipe, 512)
    with torch.device("meta"):
        model = new_model(config, recipe.Model)
    layout = configured_layout(config, recipe, recipe.Distributed.mp_degree)
    with pytest.raises(UserError, match=message):
        float8.require_float8(model, recipe, layout, torch.device("cpu"))


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    recipe = load_recipe("tiny", (*SMALL, *FP8))
    config = model_config(recipe, 512)
    with torch.device("meta"):
        model = new_model(config, recipe.Model)
    layout = configured_layout(config, recipe, 1)
    with pytest.raises(UserError, match="A100-SXM4-80GB has no fp8"):
        float8.require_float8(model, recipe, layout, torch.device("cuda", 0))

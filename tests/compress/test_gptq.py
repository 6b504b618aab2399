"""GPTQ against Optimal Brain Quantization, the algorithm that it accelerates, in numpy."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from torch import Tensor

from lathe.compress.gptq import (
    DAMPING,
    OUTPUT_DAMPING,
    PASSES,
    SCALES,
    gptq,
    input_hessian,
    round_columns,
)
from lathe.compress.output_hessians import output_hessians
from lathe.compress.plan import make_plan
from lathe.compress.prune import prune
from lathe.compress.quantize import quantize
from lathe.compress.sensitivity.measure import BatchMetric
from lathe.data.tokens import TokenDataset
from lathe.model import fake_quant
from lathe.model.architecture import Architecture
from lathe.model.checkpoint import load_checkpoint
from lathe.model.config import GPTConfig
from lathe.model.fake_quant import FakeQuantLinear
from lathe.model.families import GPT2, LLAMA, QWEN3
from lathe.model.gpt import GPT
from lathe.model.integer_weights import fake_quantize_weight, split, weight_rounding
from lathe.model.quantization import INT8, WeightFormat
from lathe.train.batches import EvalBatches
from lathe_base.config.recipe import load_recipe
from tests.support.small_run import SMALL

FORMATS = (WeightFormat.int4(32), WeightFormat.int4(64), INT8)
WITH_ZEROS = WeightFormat.grouped(32, 4, zero_points=True)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(n: int, width: int) -> Tensor:
    """Correlated inputs of different magnitudes."""
    return random(n, width, seed=1) @ random(width, width, seed=2) * torch.linspace(0.2, 2, width)


def output_error(weight: Tensor, rounded: Tensor, x: Tensor) -> float:
    return float((x @ (weight - rounded).T).square().sum())


def brain_quantization(weight: Tensor, form: WeightFormat, h: Tensor) -> np.ndarray:
    """Rounding by OBQ, with scales of groups that are then fitted to the integers, several
    times."""
    w, n = weight.double().numpy(), weight.shape[1]
    size = form.group_size or n
    groups = weight.numpy().reshape(len(w), -1, size)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)
    is_extreme = (np.abs(groups) == np.abs(extreme)).reshape(w.shape)
    exact = best_scales(groups, extreme, h) if form.group_size else np.abs(extreme) / 127
    scale = np.repeat(exact, size, -1).reshape(w.shape).astype(np.float64)
    if not form.group_size:
        return obq(w, scale, (-127, 127), np.rint(w / scale), is_extreme, h)
    for _ in range(PASSES):
        forced = np.where(w / scale < 0, -8, 7)
        integers = np.rint(obq(w, scale, (-8, 7), forced, is_extreme, h) / scale)
        scale = fitted(w, integers, size, h)
    return np.asarray(integers * scale)


def obq(
    weight: np.ndarray,
    scale: np.ndarray,
    bounds: tuple[int, int],
    forced: np.ndarray,
    is_forced: np.ndarray,
    h: Tensor,
) -> np.ndarray:
    """OBQ (Frantar & Alistarh 2022): after each column, the remaining columns compensate its error,
    and a step of Gaussian elimination removes its row and column from the inverse Hessian."""
    w, diagonal = weight.copy(), np.diag(h.numpy())
    inverse = np.linalg.inv(h.numpy() + DAMPING * diagonal.mean() * np.eye(len(h)))
    for j in np.argsort(-diagonal, kind="stable"):
        integers = np.clip(np.rint(w[:, j] / scale[:, j]), *bounds)
        rounded = np.where(is_forced[:, j], forced[:, j], integers) * scale[:, j]
        w -= np.outer((w[:, j] - rounded) / inverse[j, j], inverse[j])
        w[:, j] = rounded
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        inverse[j] = inverse[:, j] = 0
        w[:, j] = rounded
    return w


def fitted(weight: np.ndarray, integers: np.ndarray, size: int, h: Tensor) -> np.ndarray:
    """The scales of least output error, by least squares with the Hessian's square root."""
    root, n_groups = np.linalg.cholesky(h.numpy()).T, weight.shape[1] // size
    scales = []
    for row, found in zip(weight, integers, strict=True):
        parts = root * found
        columns = parts.reshape(len(root), n_groups, size).sum(-1)
        scales.append(np.linalg.lstsq(columns, root @ row, rcond=None)[0])
    return np.repeat(np.array(scales).astype(np.float16).astype(np.float64), size, 1)


def best_scales(groups: np.ndarray, extreme: np.ndarray, h: Tensor) -> np.ndarray:
    """The scale of every group (O, G, size), of those to try, with the smallest rounding error, in
    which inputs count as much as they are large."""
    tried = [(extreme / -8).astype(np.float16) * np.float32(ratio) for ratio in SCALES]
    scales = np.stack([scale.astype(np.float16) for scale in tried])
    rounded = np.clip(np.rint(groups / scales), -8, 7) * scales.astype(np.float64)
    importance = np.diag(h.numpy()).reshape(groups.shape[1:])
    errors = ((rounded - groups) ** 2 * importance).sum(-1, keepdims=True)
    return np.take_along_axis(scales, errors.argmin(0)[None], 0)[0]


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_it_is_brain_quantization(form: WeightFormat) -> None:
    weight, h = random(5, 192), input_hessian([inputs(500, 192)])
    rounded = weight.clone()
    round_columns(rounded, form, h)
    # A fitted scale may differ in the last bit of float16, far less than a step.
    np.testing.assert_allclose(rounded.numpy(), brain_quantization(weight, form, h), atol=2e-3)


@pytest.mark.parametrize("form", [*FORMATS, WITH_ZEROS], ids=str)
@pytest.mark.parametrize("width", [64, 300])
def test_the_result_is_of_the_format_and_better_where_inputs_are_related(
    form: WeightFormat, width: int
) -> None:
    weight, x = random(48, width), inputs(1000, width)
    nearest, rounded = fake_quantize_weight(weight, form), weight.clone()
    round_columns(rounded, form, input_hessian(x[None]))
    torch.testing.assert_close(fake_quantize_weight(rounded, form), rounded, rtol=1e-6, atol=0)
    assert output_error(weight, rounded, x) < 0.7 * output_error(weight, nearest, x)


def coupled(width: int) -> Tensor:
    """A Hessian of outputs of which a few directions matter most."""
    return input_hessian([random(40, width, seed=3) * torch.linspace(0.1, 2, width)]).float()


def cost(weight: Tensor, rounded: Tensor, h: Tensor, f: Tensor) -> float:
    error = (rounded - weight).double()
    return float((f.double() @ error @ h * error).sum())


@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.parametrize("form", [WeightFormat.int4(32), WITH_ZEROS], ids=str)
def test_output_channels_make_up_for_the_errors_of_those_before(
    form: WeightFormat, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Channels that are not rounded yet get the weights of least cost, given the errors so far."""
    weight, h, f = random(24, 96), input_hessian([inputs(500, 96)]), coupled(24)
    monkeypatch.setattr("lathe.compress.gptq.CHANNELS", channels)
    rounded = weight.clone()
    round_columns(rounded, form, h, [f])
    errors, left = np.zeros(weight.shape), list(np.argsort(-f.diagonal().numpy(), kind="stable"))
    damped = f.double().numpy() + OUTPUT_DAMPING * float(f.diagonal().mean()) * np.eye(24)
    done: list[int] = []
    while left:
        change = np.linalg.solve(damped[np.ix_(left, left)], damped[np.ix_(left, done)])
        targets = weight[left].double().numpy() - change @ errors[done]
        here = left[:channels]
        found = torch.from_numpy(targets[: len(here)]).float()
        round_columns(found, form, h)
        np.testing.assert_allclose(rounded[here], found, atol=2e-3)
        errors[here] = (rounded[here] - weight[here]).numpy()
        done, left = done + here, left[len(here) :]


@pytest.mark.parametrize("form", [WeightFormat.int4(32), WITH_ZEROS], ids=str)
def test_the_cost_of_coupled_outputs_falls(form: WeightFormat) -> None:
    weight, h, f = random(300, 96), input_hessian([inputs(500, 96)]), coupled(300)
    alone, together, parts = weight.clone(), weight.clone(), weight.clone()
    round_columns(alone, form, h)
    round_columns(together, form, h, [f])
    assert torch.equal(fake_quantize_weight(together, form), together)
    assert cost(weight, together, h, f) < 0.3 * cost(weight, alone, h, f)
    # Parts do not know of each other.
    round_columns(parts, form, h, [f[:150, :150], f[150:, 150:]])
    for rows in (slice(150), slice(150, None)):
        part = weight[rows].clone()
        round_columns(part, form, h, [f[rows, rows]])
        torch.testing.assert_close(part, parts[rows])


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -1e9])
def test_outputs_without_a_factor_are_rounded_alone(broken: float) -> None:
    weight, h, f = random(16, 96), input_hessian([inputs(500, 96)]), coupled(16)
    f[3, 3] = broken
    alone, together = weight.clone(), weight.clone()
    assert round_columns(alone, WITH_ZEROS, h)
    assert round_columns(together, WITH_ZEROS, h, [f])
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("mean", [0.0, 0.3, 4.0, -4.0])
def test_zero_points_lower_the_error_of_the_output(mean: float) -> None:
    weight, x = random(48, 256) + mean, inputs(1000, 256)
    errors = []
    for form in (WITH_ZEROS, WeightFormat.int4(32)):
        rounded = weight.clone()
        round_columns(rounded, form, input_hessian(x[None]))
        assert torch.equal(fake_quantize_weight(rounded, form), rounded)
        errors.append(output_error(weight, rounded, x))
    assert errors[0] < (0.95 if mean < 1 else 0.5) * errors[1]


@pytest.mark.parametrize("form", [*FORMATS, WITH_ZEROS, WeightFormat("abs_max")], ids=str)
def test_a_large_table_is_rounded_in_parts(
    form: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, h = random(20, 192), input_hessian([inputs(500, 192)])
    whole, parts = weight.clone(), weight.clone()
    round_columns(whole, form, h)
    monkeypatch.setattr("lathe.compress.gptq.CHUNK_ELEMENTS", 7 * 192)
    round_columns(parts, form, h)
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_unrelated_inputs_leave_nothing_to_make_up_for(form: WeightFormat) -> None:
    """Only the scale can be better than that of rounding to nearest."""
    weight = random(16, 128)
    nearest = fake_quantize_weight(weight, form)
    rounded = weight.clone()
    round_columns(rounded, form, torch.eye(128, dtype=torch.float64))
    if form.group_size:
        scale = weight_rounding(form).grid(rounded).scale
        integers = (split(weight, form.group_size) / scale).round().clamp(-8, 7)
        # All but the largest of a group, and those that the last fitted scale would round otherwise
        assert (split(rounded, form.group_size) / scale == integers).double().mean() > 0.99
        assert (weight - rounded).square().sum() < 0.95 * (weight - nearest).square().sum()
    else:
        torch.testing.assert_close(rounded, nearest)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_inputs_that_are_always_zero_are_rounded_to_nearest(form: WeightFormat) -> None:
    weight = random(16, 128)
    rounded = weight.clone()
    round_columns(rounded, form, torch.zeros(128, 128, dtype=torch.float64))
    torch.testing.assert_close(rounded, fake_quantize_weight(weight, form))


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("broken", ["not positive", "infinite", "NaN"])
def test_a_hessian_without_a_cholesky_factor_is_rounded_to_nearest(
    broken: str, form: WeightFormat
) -> None:
    h = input_hessian([inputs(500, 128)])
    h[3, 3] = {"not positive": -1e9, "infinite": torch.inf, "NaN": torch.nan}[broken]
    weight = random(16, 128)
    rounded, nearest = weight.clone(), weight.clone()
    assert not round_columns(rounded, form, h)
    assert round_columns(nearest, form, torch.eye(128, dtype=torch.float64))
    torch.testing.assert_close(rounded, nearest)


def test_a_hessian_that_rounding_made_indefinite_is_damped_further() -> None:
    """As of inputs whose products are summed in TF32."""
    h = input_hessian([inputs(500, 128)])
    h -= 0.2 * h.diagonal().mean() * torch.eye(128, dtype=h.dtype)
    lowest = float(torch.linalg.eigvalsh(h)[0])
    assert lowest < -DAMPING * float(h.diagonal().mean())
    weight = random(16, 128)
    rounded = weight.clone()
    assert round_columns(rounded, INT8, h)
    assert not torch.equal(rounded, fake_quantize_weight(weight, INT8))


def test_linears_rounded_to_nearest_for_want_of_a_factor_are_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GPTConfig(50, 16, 64, 32, (2, 2), (96, 96))
    model = GPT(config)
    model.initialize(0.2, 1)
    settings = load_recipe("tiny", ["Compress.Quantization.weight_bits=4"]).Compress.Quantization
    fake_quant.insert(model, make_plan(config, settings))
    monkeypatch.setattr("lathe.compress.gptq.input_hessian", lambda x: -input_hessian(x))
    gptq(model, list(torch.randint(50, (4, 2, 16))))
    assert "h.1.attn.c_proj: the Hessian of its inputs is not positive definite" in caplog.text


def test_groups_of_zeros_and_of_denormal_scales() -> None:
    """Their scale, times a ratio, is zero in float16."""
    form = WeightFormat.int4(32)
    weight = random(3, 96)
    weight[:, :32], weight[1, 32:64] = 0, weight[1, 32:64] * 1e-7
    rounded = weight.clone()
    round_columns(rounded, form, input_hessian([inputs(200, 96)]))
    torch.testing.assert_close(fake_quantize_weight(rounded, form), rounded)
    assert (rounded[:, :32] == 0).all() and rounded[1, 32:64].abs().max() < 1e-6


def test_every_linear_of_the_plan_is_rounded_and_no_other() -> None:
    config = GPTConfig(50, 16, 64, 32, (2, 2), (96, 96))
    model = GPT(config)
    model.initialize(0.2, 1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    settings = load_recipe(
        "tiny",
        [
            "Compress.Quantization.weight_bits=4",
            "Compress.Quantization.quantize_embedding=True",
        ],
    ).Compress.Quantization
    plan = make_plan(config, settings, {"h.1.attn.c_proj": "float"})
    fake_quant.insert(model, plan)
    gptq(model, list(torch.randint(50, (4, 2, 16))))
    after = model.state_dict()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed == {
        "wte.weight" if name == "lm_head" else f"{name}.weight" for name in plan.linears
    }


@pytest.mark.parametrize("family", [GPT2, LLAMA, QWEN3], ids=lambda family: family.model_type)
def test_it_is_bit_for_bit_what_running_whole_blocks_for_every_linear_finds(
    family: Architecture,
) -> None:
    groups = () if family is GPT2 else (2, 2)
    config = GPTConfig(50, 16, 64, 16, (4, 4), (96, 96), architecture=family, kv_heads=groups)
    models = [GPT(config), GPT(config)]
    settings = load_recipe("tiny", ["Compress.Quantization.weight_bits=4"]).Compress.Quantization
    plan = make_plan(config, settings, {f"{family.block(1)}.{family.row('heads').name}": "float"})
    batches = list(torch.randint(50, (4, 2, 16)))
    for model in models:
        model.initialize(0.2, 1)
        fake_quant.insert(model, plan)
    gptq(models[0], batches)
    gptq_by_whole_blocks(models[1], batches)
    found, expected = (model.state_dict() for model in models)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@torch.no_grad()
def gptq_by_whole_blocks(model: GPT, batches: Sequence[Tensor]) -> None:
    """GPTQ that runs each block once for every linear, and once more at the end."""
    model.eval()
    outputs = output_hessians(model, batches)
    hidden = [model.embed(tokens) for tokens in batches]
    for block in model.blocks:
        for linear in block.modules():
            if isinstance(linear, FakeQuantLinear):
                caught: list[Tensor] = []
                with linear.register_forward_pre_hook(lambda _, x, c=caught: c.append(x[0])):
                    for x in hidden:
                        block(x)
                assert linear.observer is not None
                parts, norms = outputs[linear].parts, outputs[linear].norms
                counted = zip(caught, norms, strict=True)
                h = input_hessian(linear.observer(x) * norm.sqrt() for x, norm in counted)
                round_columns(linear.weight, linear.quantized.fmt, h, parts)
        hidden = [block(x) for x in hidden]


@pytest.mark.slow
def test_post_training_quantization_as_a_stage(
    small_dense: Path, small_data: Path, tmp_path: Path
) -> None:
    """Without training, GPTQ is closer to the float model than rounding to nearest."""
    losses = {}
    for rounding in ("nearest", "gptq"):
        recipe = load_recipe(
            "tiny",
            (
                *SMALL,
                "Engine.max_steps=0",
                "Compress.Quantization.weight_bits=4",
                f"Compress.Quantization.rounding={rounding}",
            ),
        )
        folder = tmp_path / rounding
        result = quantize(recipe, small_dense, small_data, folder)
        assert result.step == 0 and result.eval_loss == result.first_eval_loss
        again = quantize(recipe, small_dense, small_data, folder)
        assert again.eval_loss == result.eval_loss
        model = load_checkpoint(folder).model
        losses[rounding] = divergence(load_checkpoint(small_dense).model, model, small_data)
        assert not (folder / "state").exists()
    assert losses["gptq"] < 0.8 * losses["nearest"]


def divergence(dense: GPT, quantized: GPT, data: Path) -> float:
    """KL divergence from the float model on validation text in nats per token."""
    recipe = load_recipe("tiny", SMALL)
    tokens = TokenDataset.open(data)
    batches = [torch.from_numpy(x) for x in EvalBatches(recipe, tokens, 4, 8)]
    return fmean(BatchMetric("kl", batches, dense)(quantized))


def test_pruning_without_finetuning(small_dense: Path, small_data: Path, tmp_path: Path) -> None:
    recipe = load_recipe(
        "tiny",
        (*SMALL, "Engine.max_steps=0", "Compress.Prune.ratio=0.5", "Compress.Prune.rounds=2"),
    )
    assert prune(recipe, small_dense, small_data, tmp_path / "p").step == 0

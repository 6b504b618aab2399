"""Fake quantization against torch's, and observers against their definitions."""

import copy

import pytest
import torch
from torch import nn

from lathe.model import fake_quant
from lathe.model.fake_quant import FakeQuantLinear, Observer, observers
from lathe.model.gpt import GPT
from lathe.model.integer_weights import QuantizedWeight, fake_quantize_weight, weight_rounding
from lathe.model.quantization import INT8, QuantizationPlan, WeightFormat
from tests.support.apart import run_apart

TOKENS = torch.arange(40).view(2, 20)


def full_plan(model: GPT, scale: float = 0.0) -> QuantizationPlan:
    names = model.config.linear_names()
    return QuantizationPlan.w8a8(dict.fromkeys([*names, "lm_head"], scale))


def test_activation_equals_torch_fake_quantize() -> None:
    # Powers of two as scales: torch multiplies by 1/s, ONNX divides by s.
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)) * 3
    theirs = x.clone().requires_grad_()
    ours = x.clone().requires_grad_()
    expected = torch.fake_quantize_per_tensor_affine(theirs, 2**-6, 0, -128, 127)
    observed = Observer(scale=2**-6).eval()(ours)
    assert torch.equal(observed, expected)
    expected.sin().sum().backward()
    observed.sin().sum().backward()
    assert ours.grad is not None and theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize(("bits", "high"), [(8, 127), (4, 7)])
@pytest.mark.parametrize("kind", ["abs_max", "channel_wise_abs_max"])
def test_weight_equals_torch_fake_quantize(kind: str, bits: int, high: int) -> None:
    w = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    w[3] = 0.0
    form = WeightFormat(kind, bits)  # type: ignore[arg-type]
    scale = weight_rounding(form).grid(w).scale
    zero = torch.zeros(32, dtype=torch.int32)
    if kind == "abs_max":
        expected = torch.fake_quantize_per_tensor_affine(w, float(scale), 0, -high, high)
    else:
        expected = torch.fake_quantize_per_channel_affine(w, scale[:, 0], zero, 0, -high, high)
    ours = fake_quantize_weight(w, form)
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)


def test_a_weight_that_has_changed_is_rounded_again() -> None:
    rounded = QuantizedWeight(INT8)
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = rounded(weight)
        assert rounded(weight) is before
        weight.mul_(2)
        torch.testing.assert_close(rounded(weight), 2 * before)


def test_training_keeps_static_scales(small_gpt: GPT) -> None:
    fake_quant.insert(small_gpt, full_plan(small_gpt))
    scales = fake_quant.calibrate(small_gpt, [TOKENS[:1]])
    small_gpt.train()(TOKENS).sum().backward()  # other texts have larger values
    assert scales == {name: observer.scale for name, observer in observers(small_gpt)}


def mean_peak(x: torch.Tensor) -> float:
    """Mean over rows (B, T, C) of the largest magnitude in each."""
    return float(x.abs().amax((1, 2)).mean())


def test_calibration_averages_the_largest_input_of_each_text(small_gpt: GPT) -> None:
    reference = copy.deepcopy(small_gpt)
    seen: dict[str, float] = {}
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name == "wte.weight" or name.endswith(
                ("c_attn.weight", "c_fc.weight", "proj.weight")
            ):
                parameter.copy_(fake_quantize_weight(parameter))
    for name, module in reference.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(
                lambda _, args, name=name: seen.__setitem__(name, mean_peak(args[0]))
            )
    with torch.no_grad():
        seen["lm_head"] = mean_peak(reference.hidden(TOKENS))
    fake_quant.insert(small_gpt, full_plan(small_gpt))
    scales = fake_quant.calibrate(small_gpt, [TOKENS])
    assert scales.keys() == seen.keys()
    for name, scale in scales.items():
        assert scale == pytest.approx(seen[name] / 127), name
    in_parts = torch.split(TOKENS, [1, len(TOKENS) - 1])
    assert fake_quant.calibrate(small_gpt, in_parts) == pytest.approx(scales)


def test_inserted_leaves_the_model_as_it_was(small_gpt: GPT) -> None:
    with torch.no_grad():
        before = small_gpt(TOKENS)
        with fake_quant.inserted(small_gpt, full_plan(small_gpt, 0.05)):
            assert isinstance(small_gpt.h[0].mlp.c_fc, FakeQuantLinear)
            assert not torch.equal(small_gpt(TOKENS), before)
        assert torch.equal(small_gpt(TOKENS), before)


def test_int8_of_wide_range_is_close_and_pact_learns_its_bound(small_gpt: GPT) -> None:
    with torch.no_grad():
        before = small_gpt(TOKENS)
    fake_quant.insert(small_gpt, full_plan(small_gpt), pact=True)
    fake_quant.calibrate(small_gpt, [TOKENS])
    logits = small_gpt.train()(TOKENS)
    assert (logits - before).abs().mean() < 0.05 * before.std()
    observer = small_gpt.h[1].mlp.c_proj.observer
    with torch.no_grad():
        observer.alpha.fill_(0.5)
    small_gpt(TOKENS).logsumexp(-1).sum().backward()
    assert observer.alpha.grad is not None and float(observer.alpha.grad) != 0.0
    assert observer.scale == pytest.approx(0.5 / 127)


def test_a_kept_weight_is_made_again_when_the_weight_changes(small_gpt: GPT) -> None:
    fake_quant.insert(small_gpt, full_plan(small_gpt, 0.05))
    optimizer = torch.optim.AdamW(small_gpt.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        with torch.no_grad():
            kept, again = small_gpt(TOKENS), small_gpt(TOKENS)
        assert torch.equal(kept, again)
        assert torch.equal(kept, small_gpt(TOKENS))  # nothing is cached with gradients
        small_gpt(TOKENS).logsumexp(-1).sum().backward()
        optimizer.step()
        with torch.no_grad():
            assert not torch.equal(small_gpt(TOKENS), kept)


def test_an_input_that_is_always_zero_gets_a_scale(
    small_gpt: GPT, caplog: pytest.LogCaptureFixture
) -> None:
    model = copy.deepcopy(small_gpt)
    with torch.no_grad():
        for parameter in model.get_submodule("h.0.ln_2").parameters():
            parameter.zero_()
    fake_quant.insert(model, full_plan(model))
    with caplog.at_level("WARNING", "lathe"):
        scales = fake_quant.calibrate(model, [TOKENS])
    assert "the input of h.0.mlp.c_fc is zero in all calibration batches" in caplog.messages
    assert min(scales.values()) > 0
    assert model(TOKENS).isfinite().all()


def test_evaluation_compiles_to_one_graph(small_gpt: GPT) -> None:
    fake_quant.insert(small_gpt, full_plan(small_gpt, 0.02))
    linear = next(m for m in small_gpt.eval().modules() if isinstance(m, FakeQuantLinear))
    x = torch.randn(2, linear.in_features, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def compile_and_compare() -> None:
        compiled = torch.compile(linear, backend="eager", fullgraph=True)(x)
        assert torch.equal(compiled, linear(x))

    run_apart(compile_and_compare)

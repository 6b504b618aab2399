"""The gradient-based estimate against a direct computation."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lathe.compress.sensitivity.measure import estimate_costs
from lathe.model.gpt import GPT
from lathe.model.quantization import LinearFormat, QuantizationPlan, WeightFormat
from lathe_base.config.settings.types import Format
from tests.support.small_models import small_config

SCALES = {"h.0.mlp.c_proj": 0.03, "lm_head": 0.05}
PLAN = QuantizationPlan.w8a8(SCALES)


@pytest.fixture
def tiny() -> GPT:
    model = GPT(
        small_config(vocab_size=11, n_positions=8, n_embd=6, head_dim=3, n_head=(2,), n_inner=(5,))
    )
    model.initialize(0.4, seed=3)
    return model.eval()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(11, (2, 8), generator=generator) for _ in range(3)]


def estimates(model: GPT, plan: QuantizationPlan, names: Sequence[str]) -> dict[str, float]:
    return estimate_costs(model, {"int8": plan}, names, batches())["int8"]


def rounded(x: np.ndarray, scale: np.ndarray | float, low: int) -> np.ndarray:
    return np.clip(np.round(x / scale), low, 127) * scale


def test_it_is_half_the_squared_gradients_times_squared_errors(tiny: GPT) -> None:
    """For the linear before the last LayerNorm, the gradients of weight and input follow from that
    of the output (by autograd) by the rules of matrix products."""
    linear = tiny.h[0].mlp.c_proj  # type: ignore[union-attr]
    weight = linear.weight.detach().double().numpy()  # type: ignore[union-attr]
    scale = np.abs(weight).max(1, keepdims=True) / 127
    weight_error = rounded(weight, scale, -127) - weight
    expected, n_tokens = 0.0, 0
    for tokens in batches():
        seen: dict[str, Tensor] = {}

        def keep(_: object, args: tuple[Tensor], y: Tensor, seen: dict[str, Tensor] = seen) -> None:
            seen["x"], seen["y"] = args[0].detach(), y

        handle = linear.register_forward_hook(keep)  # type: ignore[union-attr]
        logits = tiny(tokens[:, :-1])
        handle.remove()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        (slope,) = torch.autograd.grad(loss, seen["y"])
        dy = slope.flatten(0, 1).double().numpy()  # (n, 6)
        x = seen["x"].flatten(0, 1).double().numpy()  # (n, 5)
        weight_slope = np.zeros_like(weight)
        for i in range(len(x)):
            weight_slope += np.outer(dy[i], x[i])
        input_slope = dy @ weight
        input_error = rounded(x, 0.03, -128) - x
        expected += 0.5 * float((weight_slope**2 * weight_error**2).sum())
        expected += 0.5 * float((input_slope**2 * input_error**2).sum())
        n_tokens += len(x)
    found = estimates(tiny, PLAN, ["h.0.mlp.c_proj"])
    assert found == {"h.0.mlp.c_proj": pytest.approx(expected / n_tokens, rel=1e-3)}
    assert expected > 0


def test_the_tied_head_counts_both_uses_of_its_table(tiny: GPT) -> None:
    expected, n_tokens = 0.0, 0
    table = tiny.wte.weight
    scale = table.detach().abs().amax(1) / 127
    zeros = torch.zeros(len(scale), dtype=torch.int32)
    with torch.no_grad():
        table_error = (
            torch.fake_quantize_per_channel_affine(table, scale, zeros, 0, -127, 127) - table
        )
    for tokens in batches():
        hidden = tiny.hidden(tokens[:, :-1])
        logits = hidden @ table.T
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        by_table, by_hidden = torch.autograd.grad(loss, [table, hidden])
        error = torch.fake_quantize_per_tensor_affine(hidden.detach(), 0.05, 0, -128, 127)
        error -= hidden.detach()
        expected += 0.5 * float((by_table * table_error).square().sum())
        expected += 0.5 * float((by_hidden * error).square().sum())
        n_tokens += tokens[:, 1:].numel()
    found = estimates(tiny, PLAN, ["lm_head"])
    assert found["lm_head"] == pytest.approx(expected / n_tokens, rel=1e-4)


def test_it_leaves_the_model_as_it_was(tiny: GPT) -> None:
    tokens = batches()[0]
    before = tiny(tokens[:, :-1])
    estimates(tiny, PLAN, list(SCALES))
    assert all(p.grad is None for p in tiny.parameters())
    assert torch.equal(tiny(tokens[:, :-1]), before)
    tiny(tokens[:, :-1]).sum().backward()
    assert tiny.wte.weight.grad is not None  # no hook removes it


def test_a_float_input_costs_nothing(tiny: GPT) -> None:
    alone = QuantizationPlan(dict.fromkeys(SCALES, LinearFormat(activation=None)))
    costs = estimates(tiny, alone, list(SCALES))
    both = estimates(tiny, PLAN, list(SCALES))
    for name in SCALES:
        assert 0 < costs[name] < both[name], name


def test_one_pass_estimates_several_formats_as_passes_of_their_own_do(tiny: GPT) -> None:
    forms: dict[Format, WeightFormat] = {
        "int4": WeightFormat.int4(32),
        "dynamic_int8": WeightFormat.grouped(32, 8),
    }
    plans: dict[Format, QuantizationPlan] = {"static_int8": PLAN}
    for form, weight in forms.items():
        plans[form] = QuantizationPlan(dict.fromkeys(SCALES, LinearFormat(weight, "dynamic_int8")))
    found = estimate_costs(tiny, plans, list(SCALES), batches())
    assert found == {form: estimates(tiny, plan, list(SCALES)) for form, plan in plans.items()}
    for name in SCALES:
        assert 0 < found["dynamic_int8"][name] < found["int4"][name]

import numpy as np
import pytest
import torch
from torch import Tensor

from lathe.compress.sensitivity.measure import (
    input_distributions,
    weight_distributions,
)
from lathe.compress.sensitivity.result import Distribution
from lathe.model.gpt import GPT
from lathe.model.quantization import QuantizationPlan, WeightFormat

NAME, CPU = "h.1.mlp.c_fc", torch.device("cpu")


def transcribed(x: np.ndarray, scale: np.ndarray | float, low: int, channel: int) -> Distribution:
    quantized = np.clip(np.round(x / scale), low, 127) * scale
    magnitudes, tokens = (np.sort(np.abs(x).max(axis)) for axis in (1 - channel, channel))
    q1, median, q3 = np.percentile(x, [25, 50, 75])
    return Distribution(
        min=x.min(),
        q1=q1,
        median=median,
        q3=q3,
        max=x.max(),
        absmax=np.abs(x).max(),
        channel_spread=magnitudes[-1] / magnitudes[(len(magnitudes) - 1) // 2],
        sqnr_db=10 * np.log10((x**2).sum() / ((quantized - x) ** 2).sum()),
        token_spread=tokens[-1] / tokens[(len(tokens) - 1) // 2] if channel == 1 else None,
    )


def same(found: Distribution, expected: Distribution, rel: float = 1e-3) -> bool:
    return vars(found) == {
        k: None if v is None else pytest.approx(v, rel=rel) for k, v in vars(expected).items()
    }


@pytest.mark.parametrize("kind", ["abs_max", "channel_wise_abs_max"])
def test_weights(kind: str, small_gpt: GPT) -> None:
    form = WeightFormat(kind)  # type: ignore[arg-type]
    plan = QuantizationPlan.w8a8({NAME: 1, "lm_head": 1}, form)
    found = weight_distributions(small_gpt, plan, [NAME, "lm_head"], CPU)
    for name, per_row in ((NAME, kind != "abs_max"), ("lm_head", True)):
        tensor = small_gpt.wte.weight if name == "lm_head" else small_gpt.h[1].mlp.c_fc.weight  # type: ignore[union-attr]
        x = tensor.detach().double().numpy()  # type: ignore[union-attr, operator]
        scale = np.abs(x).max(1 if per_row else None, keepdims=True) / 127
        assert same(found[name], transcribed(x, scale, -127, 0)), name


def seen_inputs(model: GPT, batches: list[Tensor]) -> np.ndarray:
    seen: list[Tensor] = []
    hook = model.get_submodule(NAME).register_forward_hook(lambda _, args, __: seen.append(args[0]))
    with torch.no_grad():
        for tokens in batches:
            model(tokens)
    hook.remove()
    return torch.cat(seen).flatten(0, 1).double().numpy()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(384, (2, 32), generator=generator) for _ in range(3)]


def test_inputs_that_come_in_parts(small_gpt: GPT) -> None:
    x = seen_inputs(small_gpt, batches())
    scale = float(np.abs(x).max()) / 200  # clips
    plan = QuantizationPlan.w8a8({NAME: scale})
    found = input_distributions(small_gpt, plan, [NAME], batches())
    assert same(found[NAME], transcribed(x, scale, -128, 1))


def test_quartiles_of_a_sample_are_near_and_always_the_same(
    small_gpt: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lathe.compress.sensitivity.result.SAMPLE", 3000)  # of 9,216
    x = seen_inputs(small_gpt, batches())
    plan = QuantizationPlan.w8a8({NAME: 0.1})
    one, two = (input_distributions(small_gpt, plan, [NAME], batches())[NAME] for _ in range(2))
    assert one == two
    expected = transcribed(x, 0.1, -128, 1)
    assert one.absmax == pytest.approx(expected.absmax) and one.min == pytest.approx(expected.min)
    for name in ("q1", "median", "q3"):
        assert getattr(one, name) == pytest.approx(getattr(expected, name), abs=0.1 * x.std())


def test_a_weight_of_zeros_has_no_ratio(small_gpt: GPT) -> None:
    with torch.no_grad():
        small_gpt.h[1].mlp.c_fc.weight.zero_()  # type: ignore[union-attr, operator]
    found = weight_distributions(small_gpt, QuantizationPlan.w8a8({NAME: 1}), [NAME], CPU)[NAME]
    assert found.channel_spread is None and found.sqnr_db is None and found.absmax == 0

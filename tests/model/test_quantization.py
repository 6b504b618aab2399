"""Quantization plans as JSON, including those of older checkpoints."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from lathe.model.config import GPTConfig
from lathe.model.quantization import (
    INT8,
    ActivationFormat,
    Bits,
    LinearFormat,
    QuantizationPlan,
    WeightFormat,
)
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.small_models import small_config

SCALES = {"h.0.attn.c_attn": 0.1, "h.1.mlp.c_proj": 0.2, "lm_head": 0.3}
W8A8 = {
    "weight_quantize_type": "abs_max",
    "weight_bits": 8,
    "activation_bits": 8,
    "quantize_embedding": True,
    "activation_scales": SCALES,
}
WEIGHT_ALONE = asdict(LinearFormat(activation=None))
INT4 = asdict(LinearFormat(WeightFormat.int4(64), "dynamic_int8"))
GROUPS = INT4["weight"]
EIGHT_BITS = GROUPS | {"bits": 8, "zero_points": True}


def read(plan: dict[str, Any]) -> QuantizationPlan:
    values = small_config().to_json()
    values["lathe"]["quantization"] = plan
    found = GPTConfig.from_json(json.loads(json.dumps(values))).quantization
    assert found is not None
    return found


def test_integer_weights_and_activations_keep_their_keys() -> None:
    plan = read(W8A8)
    assert plan.activation_scales == SCALES
    assert plan.linears["h.0.attn.c_attn"].weight == WeightFormat("abs_max")
    assert plan.linears["lm_head"].weight == INT8
    assert json.dumps(plan.to_json()) == json.dumps(W8A8)


def test_four_bits_of_an_older_checkpoint_are_read() -> None:
    plan = read(W8A8 | {"weight_bits": 4})
    assert plan.linears["h.1.mlp.c_proj"].weight.levels == 7
    assert plan.linears["lm_head"].weight.levels == 127
    assert read(plan.to_json()) == plan


@pytest.mark.parametrize("weight", [INT8, WeightFormat("abs_max")])
def test_weights_alone(weight: WeightFormat) -> None:
    alone = LinearFormat(weight, activation=None)
    plan = QuantizationPlan({"h.0.attn.c_attn": alone, "h.1.mlp.c_proj": alone})
    assert plan.activation_scales == {} and not plan.quantize_embedding
    assert read(plan.to_json()) == plan


def test_a_format_of_its_own_for_every_linear() -> None:
    plan = QuantizationPlan.w8a8(SCALES)
    alone = replace(plan.linears["lm_head"], activation=None, activation_scale=0.0)
    mixed = QuantizationPlan(plan.linears | {"lm_head": alone, "h.0.mlp.c_fc": alone})
    assert mixed.quantize_embedding
    assert read(mixed.to_json()) == mixed
    assert mixed.part(["h.0.mlp.c_fc"]).linears == {"h.0.mlp.c_fc": alone}
    by_token = LinearFormat(activation="dynamic_int8")
    plan = QuantizationPlan({"h.0.attn.c_attn": by_token, "lm_head": by_token})
    assert plan.activation_scales == {} and plan.integer_linears == list(plan.linears)
    assert read(plan.to_json()) == plan


@pytest.mark.parametrize("activation", ["dynamic_int8", None])
@pytest.mark.parametrize("bits", [4, 8])
def test_groups(bits: Bits, activation: ActivationFormat | None) -> None:
    grouped = LinearFormat(WeightFormat.grouped(64, bits), activation)
    plan = QuantizationPlan({"h.0.attn.c_attn": grouped, "lm_head": grouped})
    assert plan.activation_scales == {} and plan.quantize_embedding and plan.weight_bits == bits
    assert plan.integer_linears == (list(plan.linears) if activation else [])
    assert read(plan.to_json()) == plan
    with_zeros = replace(grouped, weight=WeightFormat.grouped(64, 4, zero_points=True))
    plan.linears["h.0.mlp.c_fc"] = with_zeros
    assert read(plan.to_json()) == plan
    mixed = QuantizationPlan(plan.linears | QuantizationPlan.w8a8(SCALES).linears)
    mixed.linears["h.1.attn.c_proj"] = grouped
    assert read(mixed.to_json()) == mixed


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"quantize_embedding": False}, "quantize_embedding"),
        ({"activation_scales": {"h.0.attn.c_attn": 0.1}}, "quantize_embedding"),
        ({"linears": {"h.0.mlp.c_fc": {}}}, "weight"),
        ({"linears": {"h.7.mlp.c_fc": WEIGHT_ALONE}}, "h.7.mlp.c_fc, which is not a linear"),
        ({"linears": {"lm_head": WEIGHT_ALONE}}, "lm_head is in activation_scales and in linears"),
        ({"linears": {"h.0.mlp.c_fc": asdict(LinearFormat())}}, "go together"),
        ({"linears": {"h.0.mlp.c_fc": INT4 | {"activation": "int8"}}}, "go together"),
        (
            {
                "linears": {
                    "h.0.mlp.c_fc": INT4 | {"activation": "int8", "activation_scale": 0.1},
                }
            },
            "exclude",
        ),
        ({"linears": {"h.0.mlp.c_fc": INT4 | {"weight": GROUPS | {"group_size": 48}}}}, "size"),
        ({"linears": {"h.0.mlp.c_fc": INT4 | {"weight": GROUPS | {"group_size": 0}}}}, "together"),
        ({"linears": {"h.0.mlp.c_fc": INT4 | {"weight": EIGHT_BITS}}}, "only 4-bit groups"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(change: dict[str, Any], text: str) -> None:
    with raises(Code.MALFORMED, text):
        read(W8A8 | change)

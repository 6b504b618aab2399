"""Formats that a recipe sets for individual linears."""

from typing import get_args

import pytest

from lathe.backends.paddle_support import require_supported
from lathe.compress.plan import formats, make_plan, named_formats
from lathe.model.quantization import INT8, LinearFormat, WeightFormat
from lathe_base.config.recipe import load_recipe
from lathe_base.config.settings.types import FORMATS, Format
from lathe_base.errors import Code
from tests.support.errors import raises
from tests.support.small_models import small_config

CONFIG = small_config(n_embd=32, head_dim=8, n_head=(4, 4), n_inner=(64, 64))
NAMED = "Compress.Quantization.formats={block_0: {qkv: %s}}"
SCALES = "Compress.Quantization.activation_quantize_type="
STATIC, ALONE = LinearFormat(), LinearFormat(INT8, None)
DYNAMIC = LinearFormat(WeightFormat.grouped(64, 8), "dynamic_int8")
TOKEN = LinearFormat(activation="dynamic_int8")
KINDS = {
    "static_int8": STATIC,
    "dynamic_int8": DYNAMIC,
    "token_int8": TOKEN,
    "weight_only_int8": ALONE,
}


def test_every_format_that_a_recipe_can_name_is_described() -> None:
    assert {*FORMATS, "int8"} == set(get_args(Format))


@pytest.mark.parametrize("named", KINDS)
@pytest.mark.parametrize(
    ("scales", "usual"),
    [("moving_average_abs_max", STATIC), ("dynamic", DYNAMIC), ("token", TOKEN), ("none", ALONE)],
)
def test_a_linear_has_the_format_that_is_named_and_others_that_of_the_recipe(
    named: str, scales: str, usual: LinearFormat
) -> None:
    settings = load_recipe("tiny", (NAMED % named, SCALES + scales)).Compress.Quantization
    plan = make_plan(CONFIG, settings, named_formats(CONFIG, settings, None))
    first, *others = plan.linears.values()
    assert (first, set(others)) == (KINDS[named], {usual})
    assert {named, "float"} <= set(formats(settings)) and "int8" not in formats(settings)


@pytest.mark.parametrize("named", ["dynamic_int8", "token_int8", "weight_only_int8"])
def test_paddle_knows_static_scales_alone(named: str) -> None:
    recipe = load_recipe("tiny", ("Compress.engine=paddle", NAMED % named))
    with raises(Code.UNSUPPORTED, named):
        require_supported("quantize", recipe)


def test_paddle_has_no_int8_kv_cache() -> None:
    given = ("Compress.engine=paddle", "Compress.Quantization.kv_cache_bits=8")
    with raises(Code.UNSUPPORTED, "Compress.Quantization.kv_cache_bits"):
        require_supported("quantize", load_recipe("tiny", given))


def test_pact_has_no_bound_for_a_linear_with_dynamic_scales() -> None:
    pact = "Compress.Quantization.activation_preprocess_type=PACT"
    for given in (NAMED % "dynamic_int8", NAMED % "token_int8", SCALES + "token"):
        with raises(Code.INVALID_VALUE, "PACT", "every token"):
            load_recipe("tiny", (pact, given))

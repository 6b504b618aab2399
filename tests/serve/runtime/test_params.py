import math
from typing import get_args

import pytest

from lathe_base.config.settings import GenerationSettings, ServingSettings
from lathe_base.errors import Code
from lathe_base.parameters import FIELDS, Params, Range
from lathe_serving.runtime.protocol import parse
from lathe_serving.runtime.text_generator import BACKENDS
from tests.support.errors import raises


def test_defaults_fill_what_is_not_given() -> None:
    assert parse({"top_k": 3}, Params(temperature=0.5)) == Params(temperature=0.5, top_k=3)


def test_the_seeds_names_are_taken() -> None:
    given = {"max_dec_len": 9, "min_dec_len": 2, "decode_strategy": "greedy_search"}
    params = parse(given, Params())
    assert (params.max_tokens, params.min_tokens) == (9, 2)
    assert params.decode_strategy == "greedy_search"


@pytest.mark.parametrize(
    ("given", "code", "texts"),
    [
        ({"top_p": 1.5}, Code.INVALID_VALUE, ("top_p 1.5", "at most 1")),
        ({"top_p": 0}, Code.INVALID_VALUE, ("top_p 0", "above 0")),
        ({"temperature": float("nan")}, Code.INVALID_VALUE, ("temperature nan", "finite")),
        ({"temperature": float("inf")}, Code.INVALID_VALUE, ("temperature inf", "finite")),
        ({"temperature": "hot"}, Code.INVALID_VALUE, ("temperature 'hot'", "float")),
        ({"max_tokens": 0}, Code.CONFLICTING_OPTIONS, ("min_tokens 1", "max_tokens 0")),
        ({"max_dec_len": -3}, Code.INVALID_VALUE, ("max_dec_len -3", "at least 0")),
        ({"presence_penalty": 2.5}, Code.INVALID_VALUE, ("presence_penalty 2.5", "from -2 to 2")),
        (
            {"logprobs": True, "top_logprobs": 21},
            Code.INVALID_VALUE,
            ("top_logprobs 21", "from 0 to 20"),
        ),
        ({"top_logprobs": 2}, Code.CONFLICTING_OPTIONS, ("top_logprobs", "logprobs true")),
        (
            {"decode_strategy": "beam_search", "echo": True},
            Code.CONFLICTING_OPTIONS,
            ("echo", "beam_search"),
        ),
        ({"top_k": True}, Code.INVALID_VALUE, ("top_k True", "int")),
        (
            {"decode_strategy": "random"},
            Code.INVALID_VALUE,
            ("random", "sampling, greedy_search, beam_search"),
        ),
        (
            {"decode_strategy": "greedy_search", "num_return_sequences": 2},
            Code.CONFLICTING_OPTIONS,
            ("num_return_sequences 2", "greedy_search"),
        ),
        (
            {"decode_strategy": "beam_search", "num_return_sequences": 5},
            Code.CONFLICTING_OPTIONS,
            ("num_return_sequences 5", "num_beams 4"),
        ),
        (
            {"decode_strategy": "beam_search", "logprobs": True},
            Code.CONFLICTING_OPTIONS,
            ("logprobs", "beam_search"),
        ),
        ({"num_beams": 1}, Code.INVALID_VALUE, ("num_beams 1", "at least 2")),
        ({"stop": ""}, Code.INVALID_VALUE, ("stop ", "each of 1")),
        ({"stop": '["a", 1]'}, Code.INVALID_VALUE, ("stop",)),
        (
            {"min_tokens": 5, "max_tokens": 4},
            Code.CONFLICTING_OPTIONS,
            ("min_tokens 5", "max_tokens 4"),
        ),
        (
            {"max_tokens": 5, "max_dec_len": 5},
            Code.DUPLICATE,
            ("max_tokens", "max_dec_len"),
        ),
        ({"tempreature": 1.0}, Code.UNKNOWN_NAME, ("tempreature", "mean temperature")),
        ({"zzz": 1.0}, Code.UNKNOWN_NAME, ("zzz", "max_tokens")),
        ({"seed": -1}, Code.INVALID_VALUE, ("seed -1", "at least 0")),
        ({"min_p": 1.5}, Code.INVALID_VALUE, ("min_p 1.5", "from 0 to 1")),
        ({"stop_token_ids": "[-1]"}, Code.INVALID_VALUE, ("stop_token_ids: ", "at most 1024")),
        ({"stop_token_ids": "7"}, Code.INVALID_VALUE, ("stop_token_ids: ", "7")),
        ({"stop_token_ids": "[" * 9999}, Code.INVALID_VALUE, ("stop_token_ids: ",)),
        ({"logit_bias": '{"5": 101}'}, Code.INVALID_VALUE, ("logit_bias: ", "-100 to 100")),
        ({"logit_bias": '{"x": 1}'}, Code.INVALID_VALUE, ("logit_bias: ",)),
        ({"logit_bias": '{"5": NaN}'}, Code.INVALID_VALUE, ("logit_bias: ",)),
        (
            {"decode_strategy": "beam_search", "min_p": 0.1},
            Code.CONFLICTING_OPTIONS,
            ("min_p", "beam_search"),
        ),
    ],
)
def test_invalid_parameters_are_named_with_their_limit(
    given: dict[str, object], code: Code, texts: tuple[str, ...]
) -> None:
    with raises(code, *texts):
        parse(given, Params())


def test_lists_and_objects_come_as_json() -> None:
    given = {"stop_token_ids": "[5, 7]", "logit_bias": '{"3": -100, "9": 0.5}'}
    params = parse(given, Params())
    assert params.stop_token_ids == (5, 7)
    assert params.logit_bias == {3: -100.0, 9: 0.5}


@pytest.mark.parametrize(
    ("given", "strings"),
    [("end", ("end",)), ("[", ("[",)), ('["a", "\\n"]', ("a", "\n")), ("[x]", ("[x]",))],
)
def test_stop_is_a_string_or_a_list_of_them(given: str, strings: tuple[str, ...]) -> None:
    assert parse({"stop": given}, Params()).stop == strings


def test_the_recipe_has_the_parameters_and_their_defaults() -> None:
    settings, defaults = GenerationSettings(), Params()
    recipe = {about.recipe: name for name, about in FIELDS.items() if about.recipe}
    assert recipe.keys() == GenerationSettings.model_fields.keys()
    for key, name in recipe.items():
        if name != "max_tokens":
            assert getattr(settings, key) == getattr(defaults, name), key


def test_every_runtime_has_a_backend() -> None:
    assert BACKENDS.keys() == set(get_args(ServingSettings.model_fields["runtime"].annotation))


@pytest.mark.parametrize(
    ("limits", "inside", "outside", "text"),
    [
        (Range(ge=0), [0, 2**63 - 1, 0.5], [-1, 2**63, math.inf, math.nan], "at least 0"),
        (Range(gt=0), [1e-300, 1e300], [0.0, -1.0, math.inf], "above 0 and finite"),
        (Range(gt=0, le=1), [0.1, 1], [0, 1.1], "above 0 and at most 1"),
        (Range(ge=-2, le=2), [-2, 2.0], [-2.1, 3], "from -2 to 2"),
        (Range(), [-1e300, 0], [math.nan, -math.inf], "finite"),
    ],
)
def test_a_range_says_what_it_contains(
    limits: Range, inside: list[float], outside: list[float], text: str
) -> None:
    assert all(value in limits for value in inside)
    assert not any(value in limits for value in outside)
    assert str(limits) == text

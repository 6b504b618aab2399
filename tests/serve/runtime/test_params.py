import math
from typing import get_args

import pytest

from lathe_base.config.settings import GenerationSettings, ServingSettings
from lathe_base.errors import UserError
from lathe_base.parameters import FIELDS, Range
from lathe_serving.runtime.params import Params, parse
from lathe_serving.runtime.text_generator import BACKENDS


def test_defaults_fill_what_is_not_given() -> None:
    assert parse({"top_k": 3}, Params(temperature=0.5)) == Params(temperature=0.5, top_k=3)


def test_the_seeds_names_are_taken() -> None:
    given = {"max_dec_len": 9, "min_dec_len": 2, "decode_strategy": "greedy_search"}
    params = parse(given, Params())
    assert (params.max_tokens, params.min_tokens) == (9, 2)
    assert params.decode_strategy == "greedy_search"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top_p": 1.5}, "top_p 1.5 .* at most 1"),
        ({"top_p": 0}, "top_p 0 .* above 0"),
        ({"temperature": float("nan")}, "temperature nan .* finite"),
        ({"temperature": float("inf")}, "temperature inf .* finite"),
        ({"temperature": "hot"}, "temperature 'hot' is not of type float"),
        ({"max_tokens": 0}, "min_tokens 1 is above max_tokens 0"),
        ({"max_dec_len": -3}, "max_dec_len -3 .* at least 0"),
        ({"presence_penalty": 2.5}, "presence_penalty 2.5 .* from -2 to 2"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs 21 .* from 0 to 20"),
        ({"top_logprobs": 2}, "top_logprobs without logprobs"),
        ({"decode_strategy": "beam_search", "echo": True}, "echo with beam_search"),
        ({"top_k": True}, "top_k True is not of type int"),
        ({"decode_strategy": "random"}, "random .* sampling, greedy_search, beam_search"),
        (
            {"decode_strategy": "greedy_search", "num_return_sequences": 2},
            "num_return_sequences 2: greedy_search returns only one",
        ),
        (
            {"decode_strategy": "beam_search", "num_return_sequences": 5},
            "num_return_sequences 5 is above num_beams 4",
        ),
        ({"decode_strategy": "beam_search", "logprobs": True}, "logprobs with beam_search"),
        ({"num_beams": 1}, "num_beams 1 .* at least 2"),
        ({"stop": ""}, "stop  is out of range.*each of 1"),
        ({"stop": '["a", 1]'}, "not a list of strings"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5 is above max_tokens 4"),
        ({"max_tokens": 5, "max_dec_len": 5}, "max_tokens is given twice"),
        ({"tempreature": 1.0}, "unknown parameter tempreature.*did you mean temperature"),
        ({"zzz": 1.0}, "unknown parameter zzz.*known: max_tokens"),
        ({"seed": -1}, "seed -1 .* at least 0"),
        ({"min_p": 1.5}, "min_p 1.5 .* from 0 to 1"),
        ({"stop_token_ids": "[-1]"}, "stop_token_ids: invalid value.*list of at most 1024"),
        ({"stop_token_ids": "7"}, "stop_token_ids: invalid value 7"),
        ({"stop_token_ids": "[" * 9999}, "stop_token_ids: invalid value"),
        ({"logit_bias": '{"5": 101}'}, "logit_bias: invalid value.*-100 to 100"),
        ({"logit_bias": '{"x": 1}'}, "logit_bias: invalid value"),
        ({"logit_bias": '{"5": NaN}'}, "logit_bias: invalid value"),
        ({"decode_strategy": "beam_search", "min_p": 0.1}, "min_p with beam_search"),
    ],
)
def test_invalid_parameters_are_named_with_their_limit(
    given: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=f"(?s){message}"):
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

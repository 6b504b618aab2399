"""Checks the generation parameters of a request to Triton; `lathe_base.parameters` defines them."""

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from lathe_base.errors import Code, UserError
from lathe_base.parameters import ALIASES, FIELDS, About, Params

__all__ = ["ALIASES", "FIELDS", "Params", "parse"]


def parse(parameters: Mapping[str, Any], defaults: Params) -> Params:
    """Check a request's parameters and fill the rest from `defaults`.

    Raises:
        UserError: an unknown name, a wrong type or a value out of range; names value and limit.
    """
    values: dict[str, Any] = {}
    for name, value in parameters.items():
        field_name = ALIASES.get(name, name)
        if field_name not in FIELDS:
            near = get_close_matches(name, [*FIELDS, *ALIASES], n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(FIELDS)}"
            raise UserError(f"unknown parameter {name}", hint, Code.UNKNOWN_NAME)
        if field_name in values:
            raise UserError(
                f"{field_name} is given twice, once as {name}",
                "give one of them",
                Code.DUPLICATE,
            )
        values[field_name] = _checked(name, value, FIELDS[field_name])
    params = replace(defaults, **values)
    sequences, strategy = params.num_return_sequences, params.decode_strategy
    if strategy == "greedy_search" and sequences > 1:
        raise UserError(
            f"num_return_sequences {sequences}: greedy_search returns only one",
            "give num_return_sequences 1, or another decode_strategy",
            Code.CONFLICTING_OPTIONS,
        )
    if strategy == "beam_search" and sequences > params.num_beams:
        raise UserError(
            f"num_return_sequences {sequences} is above num_beams {params.num_beams}",
            f"raise num_beams to {sequences}, or ask for fewer sequences",
            Code.CONFLICTING_OPTIONS,
        )
    if strategy == "beam_search":
        for name, about in FIELDS.items():  # defaults do not count: beams ignore them
            neutral = getattr(Params(), name)
            if not about.allows_beams and values.get(name, neutral) != neutral:
                raise UserError(
                    f"{name} with beam_search", "leave one of them out", Code.CONFLICTING_OPTIONS
                )
        if params.max_tokens == 0:
            raise UserError(
                "max_tokens 0 with beam_search", "leave one of them out", Code.CONFLICTING_OPTIONS
            )
    if params.top_logprobs and not params.logprobs:
        raise UserError(
            "top_logprobs without logprobs", "give logprobs true as well", Code.CONFLICTING_OPTIONS
        )
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise UserError(
            f"min_tokens {params.min_tokens} is above max_tokens {params.max_tokens}",
            f"lower min_tokens to {params.max_tokens} or less",
            Code.CONFLICTING_OPTIONS,
        )
    return params


def _checked(name: str, value: Any, about: About) -> Any:
    if about.kind is float and type(value) is int:
        value = float(value)
    if type(value) is not about.kind:
        raise UserError(
            f"{name} {value!r} is not of type {about.kind.__name__}",
            about.limit,
            Code.INVALID_VALUE,
        )
    if not about.allowed(value):
        shown = format(value, {float: "g", str: ".100"}.get(about.kind, ""))
        raise UserError(
            f"{name} {shown} is out of range", f"give {name} {about.limit}", Code.INVALID_VALUE
        )
    if about.read is None:
        return value
    try:
        return about.read(value)
    except (ValueError, RecursionError):
        raise UserError(
            f"{name}: invalid value {value:.100}", f"give {about.limit}", Code.INVALID_VALUE
        ) from None

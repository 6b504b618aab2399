"""Generation parameters of a request: names, ranges and defaults.

The names are those common to language model servers; PaddleFleetX's `min_dec_len` and
`max_dec_len` are accepted as aliases of `min_tokens` and `max_tokens`.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, Literal

from lathe_base.errors import UserError

ALIASES = {"max_dec_len": "max_tokens", "min_dec_len": "min_tokens"}
STRATEGIES = ("sampling", "greedy_search", "beam_search")
MAX_INT = 2**63 - 1
MAX_TOP = 20  # alternatives of a token, as in the OpenAI API
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 1000  # every new token is compared with all of them
MAX_TOKEN_IDS = 1024  # of `stop_token_ids` and `logit_bias`
MAX_LOGIT_BIAS = 100.0  # as in the OpenAI API
CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar")  # of `structured_outputs`
MAX_CONSTRAINT_CHARACTERS = 500_000

STOP_LIMIT = (
    f"a string, or a JSON list of at most {MAX_STOPS}, each of 1 to {MAX_STOP_CHARACTERS} "
    "characters"
)


@dataclass(frozen=True)
class Field:
    """Type and range of one parameter as a request sends it.

    Attributes:
        allowed: whether a value of this type is within the range.
        limit: the range, as a text.
        read: parses a structured parameter, because Triton's are only numbers and strings; raises
            ValueError if it is invalid.
        allows_beams: whether beam search supports the parameter.
    """

    kind: type
    allowed: Callable[[Any], bool]
    limit: str
    read: Callable[[Any], Any] | None = None
    allows_beams: bool = True


def _parameter(
    default: Any, kind: type, allowed: Callable[[Any], bool], limit: str, **more: Any
) -> Any:
    """A field of `Params`; see `Field`."""
    about = {"field": Field(kind, allowed, limit, **more)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=about)
    return field(default=default, metadata=about)


def _flag(**more: Any) -> Any:
    return _parameter(False, bool, lambda v: True, "true or false", **more)


def _stop_strings(value: str) -> tuple[str, ...]:
    if not value.startswith("["):
        strings = [value]
    else:
        try:
            strings = json.loads(value)
        except (json.JSONDecodeError, RecursionError):
            strings = [value]
    if not all(isinstance(string, str) and string for string in strings):
        raise UserError(f"stop {value:.100}: not a list of strings", STOP_LIMIT)
    if len(strings) > MAX_STOPS or max(map(len, strings), default=0) > MAX_STOP_CHARACTERS:
        raise UserError(f"stop {value:.100}: too many or too long stop strings", STOP_LIMIT)
    return tuple(strings)


def _token_ids(value: str) -> tuple[int, ...]:
    ids = json.loads(value)
    is_short = isinstance(ids, list) and len(ids) <= MAX_TOKEN_IDS
    if not is_short or not all(type(i) is int and 0 <= i <= MAX_INT for i in ids):
        raise ValueError
    return tuple(ids)


def _logit_bias(value: str) -> dict[int, float]:
    biases = json.loads(value)
    if not isinstance(biases, dict) or len(biases) > MAX_TOKEN_IDS:
        raise ValueError
    for token, bias in biases.items():
        is_number = type(bias) in (int, float) and -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS
        if not (token.isdecimal() and len(token) < 20 and is_number):
            raise ValueError
    return {int(token): float(bias) for token, bias in biases.items()}


@dataclass(frozen=True)
class Params:
    """One request's generation parameters, with their defaults and ranges."""

    # None: the server's default, or the room left in the context. More than that is rejected, and 0
    # only reads the prompt.
    max_tokens: int | None = _parameter(None, int, lambda v: 0 <= v <= MAX_INT, "at least 0")
    min_tokens: int = _parameter(1, int, lambda v: 0 <= v <= MAX_INT, "at least 0")
    decode_strategy: Literal["sampling", "greedy_search", "beam_search"] = _parameter(
        "sampling", str, lambda v: v in STRATEGIES, ", ".join(STRATEGIES)
    )
    temperature: float = _parameter(1.0, float, lambda v: 0 < v < math.inf, "above 0 and finite")
    top_k: int = _parameter(50, int, lambda v: 0 <= v <= MAX_INT, "at least 0 (0: no limit)")
    top_p: float = _parameter(0.75, float, lambda v: 0 < v <= 1, "above 0 and at most 1")
    min_p: float = _parameter(0.0, float, lambda v: 0 <= v <= 1, "from 0 to 1", allows_beams=False)
    repetition_penalty: float = _parameter(
        1.0, float, lambda v: 0 < v < math.inf, "above 0 and finite"
    )
    # These two count the generated tokens, as OpenAI's do.
    presence_penalty: float = _parameter(
        0.0, float, lambda v: -2 <= v <= 2, "from -2 to 2", allows_beams=False
    )
    frequency_penalty: float = _parameter(
        0.0, float, lambda v: -2 <= v <= 2, "from -2 to 2", allows_beams=False
    )
    num_return_sequences: int = _parameter(1, int, lambda v: 1 <= v <= MAX_INT, "at least 1")
    num_beams: int = _parameter(4, int, lambda v: 2 <= v <= MAX_INT, "at least 2")
    length_penalty: float = _parameter(1.0, float, math.isfinite, "finite")
    stop: tuple[str, ...] = _parameter((), str, bool, STOP_LIMIT, read=_stop_strings)
    # They end the text like the model's own end tokens, which `ignore_eos` disables.
    stop_token_ids: tuple[int, ...] = _parameter(
        *((), str, bool, f"a JSON list of at most {MAX_TOKEN_IDS} token ids"),
        read=_token_ids,
        allows_beams=False,
    )
    ignore_eos: bool = _flag(allows_beams=False)
    # Added to the logits of its tokens before anything else.
    logit_bias: Mapping[int, float] = _parameter(
        {},
        str,
        bool,
        f"a JSON object of at most {MAX_TOKEN_IDS} token ids with numbers from "
        f"-{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}",
        read=_logit_bias,
        allows_beams=False,
    )
    # Constrains the text; see `lathe_serving.runtime.grammar`.
    structured_outputs: str = _parameter(
        "",
        str,
        lambda v: len(v) <= MAX_CONSTRAINT_CHARACTERS,
        f"a JSON object with one of {', '.join(CONSTRAINTS)}, of at most "
        f"{MAX_CONSTRAINT_CHARACTERS:,} characters",
        allows_beams=False,
    )
    logprobs: bool = _flag(allows_beams=False)
    top_logprobs: int = _parameter(0, int, lambda v: 0 <= v <= MAX_TOP, f"from 0 to {MAX_TOP}")
    echo: bool = _flag(allows_beams=False)  # the answer begins with the prompt
    seed: int | None = _parameter(None, int, lambda v: 0 <= v <= MAX_INT, "at least 0")
    # Seconds after its arrival at which the request ends with the tokens generated so far.
    timeout_seconds: float | None = _parameter(
        None, float, lambda v: 0 < v < math.inf, "above 0 and finite"
    )
    stream: bool = _flag()

    @property
    def branches(self) -> int:
        """Number of slots that the request needs."""
        is_beams = self.decode_strategy == "beam_search"
        return self.num_beams if is_beams else self.num_return_sequences


FIELDS: dict[str, Field] = {param.name: param.metadata["field"] for param in fields(Params)}


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
            raise UserError(f"unknown parameter {name}", hint)
        if field_name in values:
            raise UserError(f"{field_name} is given twice, once as {name}", "give one of them")
        values[field_name] = _checked(name, value, FIELDS[field_name])
    params = replace(defaults, **values)
    sequences, strategy = params.num_return_sequences, params.decode_strategy
    if strategy == "greedy_search" and sequences > 1:
        raise UserError(
            f"num_return_sequences {sequences}: greedy_search returns only one",
            "give num_return_sequences 1, or another decode_strategy",
        )
    if strategy == "beam_search" and sequences > params.num_beams:
        raise UserError(
            f"num_return_sequences {sequences} is above num_beams {params.num_beams}",
            f"raise num_beams to {sequences}, or ask for fewer sequences",
        )
    if strategy == "beam_search":
        for name, about in FIELDS.items():  # defaults do not count: beams ignore them
            neutral = getattr(Params(), name)
            if not about.allows_beams and values.get(name, neutral) != neutral:
                raise UserError(f"{name} with beam_search", "leave one of them out")
        if params.max_tokens == 0:
            raise UserError("max_tokens 0 with beam_search", "leave one of them out")
    if params.top_logprobs and not params.logprobs:
        raise UserError("top_logprobs without logprobs", "give logprobs true as well")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise UserError(
            f"min_tokens {params.min_tokens} is above max_tokens {params.max_tokens}",
            f"lower min_tokens to {params.max_tokens} or less",
        )
    return params


def _checked(name: str, value: Any, about: Field) -> Any:
    if about.kind is float and type(value) is int:
        value = float(value)
    if type(value) is not about.kind:
        raise UserError(f"{name} {value!r} is not of type {about.kind.__name__}", about.limit)
    if not about.allowed(value):
        shown = format(value, {float: "g", str: ".100"}.get(about.kind, ""))
        raise UserError(f"{name} {shown} is out of range", f"give {name} {about.limit}")
    if about.read is None:
        return value
    try:
        return about.read(value)
    except (ValueError, RecursionError):
        raise UserError(f"{name}: invalid value {value:.100}", f"give {about.limit}") from None

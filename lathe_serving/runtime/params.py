"""Generation parameters of a request: names, ranges and defaults.

The names are those common to language model servers; PaddleFleetX's `min_dec_len` and
`max_dec_len` are accepted as aliases of `min_tokens` and `max_tokens`.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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

NO_BEAMS = (
    *("logprobs", "echo", "presence_penalty", "frequency_penalty"),
    *("min_p", "logit_bias", "stop_token_ids", "ignore_eos", "structured_outputs"),
)
"""Parameters that beam search does not support."""


@dataclass(frozen=True)
class Params:
    """One request's generation parameters. `max_tokens` None means the server's default, limited to
    the room left in the context; a larger number than that is rejected, and 0 only reads the
    prompt. A request ends `timeout_seconds` after its arrival with the tokens generated so far.
    With `echo` the answer begins with the prompt. The presence and frequency penalties count the
    generated tokens, as OpenAI's do. `logit_bias` is added to the logits of its tokens before
    anything else, and a token in `stop_token_ids` ends the text like the model's own end tokens,
    which `ignore_eos` disables. `structured_outputs` constrains the text; see
    `lathe_serving.runtime.grammar`."""

    max_tokens: int | None = None
    min_tokens: int = 1
    decode_strategy: Literal["sampling", "greedy_search", "beam_search"] = "sampling"
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 0.75
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    num_return_sequences: int = 1
    num_beams: int = 4
    length_penalty: float = 1.0
    seed: int | None = None
    timeout_seconds: float | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    structured_outputs: str = ""
    logprobs: bool = False
    top_logprobs: int = 0
    echo: bool = False
    stream: bool = False

    @property
    def branches(self) -> int:
        """Number of slots that the request needs."""
        is_beams = self.decode_strategy == "beam_search"
        return self.num_beams if is_beams else self.num_return_sequences


@dataclass(frozen=True)
class Field:
    """Type and range of one parameter."""

    kind: type
    allowed: Callable[[Any], bool]
    limit: str


FIELDS = {
    "max_tokens": Field(int, lambda v: 0 <= v <= MAX_INT, "at least 0"),
    "min_tokens": Field(int, lambda v: 0 <= v <= MAX_INT, "at least 0"),
    "decode_strategy": Field(str, lambda v: v in STRATEGIES, ", ".join(STRATEGIES)),
    "temperature": Field(float, lambda v: 0 < v < math.inf, "above 0 and finite"),
    "top_k": Field(int, lambda v: 0 <= v <= MAX_INT, "at least 0 (0: no limit)"),
    "top_p": Field(float, lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "min_p": Field(float, lambda v: 0 <= v <= 1, "from 0 to 1"),
    "repetition_penalty": Field(float, lambda v: 0 < v < math.inf, "above 0 and finite"),
    "presence_penalty": Field(float, lambda v: -2 <= v <= 2, "from -2 to 2"),
    "frequency_penalty": Field(float, lambda v: -2 <= v <= 2, "from -2 to 2"),
    "num_return_sequences": Field(int, lambda v: 1 <= v <= MAX_INT, "at least 1"),
    "num_beams": Field(int, lambda v: 2 <= v <= MAX_INT, "at least 2"),
    "length_penalty": Field(float, math.isfinite, "finite"),
    "stop": Field(
        str,
        bool,
        f"a string, or a JSON list of at most {MAX_STOPS}, each of 1 to {MAX_STOP_CHARACTERS} "
        "characters",
    ),
    "stop_token_ids": Field(str, bool, f"a JSON list of at most {MAX_TOKEN_IDS} token ids"),
    "ignore_eos": Field(bool, lambda v: True, "true or false"),
    "logit_bias": Field(
        str,
        bool,
        f"a JSON object of at most {MAX_TOKEN_IDS} token ids with numbers from "
        f"-{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}",
    ),
    "structured_outputs": Field(
        str,
        lambda v: len(v) <= MAX_CONSTRAINT_CHARACTERS,
        f"a JSON object with one of {', '.join(CONSTRAINTS)}, of at most "
        f"{MAX_CONSTRAINT_CHARACTERS:,} characters",
    ),
    "logprobs": Field(bool, lambda v: True, "true or false"),
    "top_logprobs": Field(int, lambda v: 0 <= v <= MAX_TOP, f"from 0 to {MAX_TOP}"),
    "echo": Field(bool, lambda v: True, "true or false"),
    "seed": Field(int, lambda v: 0 <= v <= MAX_INT, "at least 0"),
    "timeout_seconds": Field(float, lambda v: 0 < v < math.inf, "above 0 and finite"),
    "stream": Field(bool, lambda v: True, "true or false"),
}


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
    for name, read in READERS.items():
        if name in values:
            values[name] = read(values[name])
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
        for name in NO_BEAMS:
            if getattr(params, name) != getattr(Params(), name):
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


def _stop_strings(value: str) -> tuple[str, ...]:
    if not value.startswith("["):
        strings = [value]
    else:
        try:
            strings = json.loads(value)
        except (json.JSONDecodeError, RecursionError):
            strings = [value]
    if not all(isinstance(string, str) and string for string in strings):
        raise UserError(f"stop {value:.100}: not a list of strings", FIELDS["stop"].limit)
    if len(strings) > MAX_STOPS or max(map(len, strings), default=0) > MAX_STOP_CHARACTERS:
        raise UserError(
            f"stop {value:.100}: too many or too long stop strings", FIELDS["stop"].limit
        )
    return tuple(strings)


def _token_ids(value: str) -> tuple[int, ...]:
    ids = _json("stop_token_ids", value)
    is_short = isinstance(ids, list) and len(ids) <= MAX_TOKEN_IDS
    if not is_short or not all(type(i) is int and 0 <= i <= MAX_INT for i in ids):
        raise _invalid("stop_token_ids", value)
    return tuple(ids)


def _logit_bias(value: str) -> dict[int, float]:
    biases = _json("logit_bias", value)
    if not isinstance(biases, dict) or len(biases) > MAX_TOKEN_IDS:
        raise _invalid("logit_bias", value)
    for token, bias in biases.items():
        is_number = type(bias) in (int, float) and -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS
        if not (token.isdecimal() and len(token) < 20 and is_number):
            raise _invalid("logit_bias", value)
    return {int(token): float(bias) for token, bias in biases.items()}


def _json(name: str, value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise _invalid(name, value) from None


def _invalid(name: str, value: str) -> UserError:
    return UserError(f"{name}: invalid value {value:.100}", f"give {FIELDS[name].limit}")


READERS: dict[str, Callable[[str], Any]] = {
    "stop": _stop_strings,
    "stop_token_ids": _token_ids,
    "logit_bias": _logit_bias,
}
"""Parsers of structured parameters, because Triton's parameters are only numbers and strings."""


def _checked(name: str, value: Any, field: Field) -> Any:
    if field.kind is float and type(value) is int:
        value = float(value)
    if type(value) is not field.kind:
        raise UserError(f"{name} {value!r} is not of type {field.kind.__name__}", field.limit)
    if not field.allowed(value):
        shown = format(value, {float: "g", str: ".100"}.get(field.kind, ""))
        raise UserError(f"{name} {shown} is out of range", f"give {name} {field.limit}")
    return value

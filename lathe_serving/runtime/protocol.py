"""What a request to Triton and its response consist of, shared by server and client: tensor and
model names, the parameters of a request, which `lathe_base.parameters` defines, and the chunks of a
response."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lathe_base.errors import Code, UserError
from lathe_base.parameters import ALIASES, FIELDS, About, Params

FinishReason = Literal["", "stop", "length", "timeout", "cancelled"]
PROMPTS = ("text_input", "input_ids")  # inputs of the generating model, which needs one of them
CANCEL = "cancel"  # parameter of a request that cancels another, whose id is its value
REQUEST_ID = "request_id"  # parameter that names a request over HTTP, where Triton knows no id
CODE = "\n  code: "  # stands before the code at the end of an error's message
VLLM_FORMAT = "compressed-tensors"  # the folder of an export that the runtime vllm loads
# Inputs of the scoring model: either all of the first, or all of the second.
TOKENS = ("tokens", "index", "targets")
TEXTS = ("text_input", "continuation")
TokenScores = tuple[NDArray[np.float64], NDArray[np.bool_]]  # log-likelihood, is it the argmax


class InvalidRequest(UserError):
    """A request is invalid, whenever it is sent."""


@dataclass(frozen=True)
class Chunk:
    """Part or all of a continuation; `finish_reason` is empty until the last chunk.

    Finish reasons: `stop`, the model generated EOS (which is in neither `text` nor `tokens`) or a
    stop string (which `text` omits); `length`, `max_tokens` or the end of the context was reached;
    `timeout`, `timeout_seconds` have passed; `cancelled`, the client has disconnected or cancelled.

    Attributes:
        sequence: index among the `num_return_sequences`, from 0.
        log_probabilities: the model's own, one per token, if requested; NaN for the first token of
            an echoed prompt.
        names: the tokens as text, if log-probabilities are requested; see `TokenBytes.name`.
        top: log-probabilities by name of the most likely tokens at each token's position and of the
            token itself, if requested; empty for the first token of an echoed prompt.
        prompt_tokens: number of tokens of the prompt; 0 before the last chunk.
        cached_tokens: number of these from the prefix cache; 0 before the last chunk.
        lengths: number of characters of the text that each token completes, if log-probabilities
            are requested; 0 for a special token, which the text omits.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    sequence: int = 0
    log_probabilities: list[float] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    lengths: list[int] = field(default_factory=list)


def error_message(error: Exception) -> str:
    """The text of an error in a response: its message and, of a UserError, its code."""
    return f"{error}{CODE}{error.code}" if isinstance(error, UserError) else str(error)


def score_name(model_name: str) -> str:
    """Name of the Triton model that scores with `model_name`'s weights."""
    return f"{model_name}-score"


def model_settings(args: Mapping[str, str]) -> dict[str, Any]:
    """The `parameters` of config.pbtxt, each JSON, from the arguments of Triton's `initialize`."""
    parameters = json.loads(args["model_config"])["parameters"]
    return {name: json.loads(value["string_value"]) for name, value in parameters.items()}


def decode(value: bytes, name: str) -> str:
    """Decode a text input; raises UserError if it is not UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        what = f"{name} is not UTF-8: byte {value[error.start]:#04x} at offset {error.start}"
        raise UserError(what, "send UTF-8 text", Code.MALFORMED) from None


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

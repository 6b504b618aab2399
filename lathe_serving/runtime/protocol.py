"""Definitions shared by server and client: tensor and model names, and the contents of a
response."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lathe_base.errors import Code, UserError

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

    Attributes: sequence: index among the `num_return_sequences`, from 0. log_probabilities: the
    model's own, one per token, if requested; NaN for the first token of an echoed prompt. names:
    the tokens as text, if log-probabilities are requested; see `TokenBytes.name`. top:
    log-probabilities by name of the most likely tokens at each token's position and of the token
    itself, if requested; empty for the first token of an echoed prompt. prompt_tokens: number of
    tokens of the prompt; 0 before the last chunk. cached_tokens: number of these from the prefix
    cache; 0 before the last chunk. lengths: number of characters of the text that each token
    completes, if log-probabilities are requested; 0 for a special token, which the text omits.
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

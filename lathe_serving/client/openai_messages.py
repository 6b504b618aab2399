"""OpenAI's /v1/completions: builds request bodies from parameters, and chunks from responses."""

import json
import math
from typing import Any

from pydantic import BaseModel, ValidationError

from lathe_base.errors import UserError
from lathe_serving.client.openai_errors import ApiError, not_openai, told
from lathe_serving.client.transport import Parameters
from lathe_serving.runtime.params import ALIASES, FIELDS, Params, parse
from lathe_serving.runtime.protocol import Chunk, FinishReason

REASONS: dict[str | None, FinishReason] = {None: "", "length": "length"}


class Logprobs(BaseModel):
    """Log-probabilities of a choice's tokens; null for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class Choice(BaseModel):
    """A sequence, or part of one. `token_ids` is an extension of vLLM and Lathe."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    token_ids: list[int] | None = None


class PromptDetails(BaseModel):
    """Token counts of a prompt."""

    cached_tokens: int | None = None


class Usage(BaseModel):
    """Token counts."""

    prompt_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Completion(BaseModel):
    """A response, or an event of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: ApiError | None = None


def body(model_name: str, prompt: str, parameters: Parameters) -> dict[str, Any]:
    """The body of a request.

    Args:
        parameters: those of `lathe_serving.runtime.params`.

    Raises:
        UserError: a parameter is unknown, out of range, or only supported by Triton.
    """
    settings = {ALIASES.get(name, name): v for name, v in parameters.items() if v is not None}
    params = parse(settings, Params())
    beams = {"beam_search"} if params.decode_strategy == "beam_search" else set()
    absent = {name for name in settings if FIELDS[name].openai == "none"}
    for name in (*absent, *beams):
        raise UserError(f"{name}: not supported by the OpenAI API", "omit it, or use Triton's gRPC")
    fields = {name: getattr(params, name) for name in settings if FIELDS[name].openai == "same"}
    if params.decode_strategy == "greedy_search":
        fields["temperature"] = 0
    if params.stop:
        fields["stop"] = params.stop
    if params.structured_outputs:
        try:
            fields["structured_outputs"] = json.loads(params.structured_outputs)
        except (ValueError, RecursionError):
            what = f"structured_outputs: not JSON: {params.structured_outputs:.100}"
            raise UserError(what, f"give {FIELDS['structured_outputs'].limit}") from None
    if params.logprobs:
        fields["logprobs"] = params.top_logprobs
    if "num_return_sequences" in settings:
        fields["n"] = params.num_return_sequences
    return {"model": model_name, "prompt": prompt, "return_token_ids": True, **fields}


def parse_chunks(data: str | bytes, url: str) -> list[Chunk]:
    """The chunks of a response or an event, one per choice.

    Raises:
        UserError: the server is busy or rejects the request, or it does not have the OpenAI API.
        StageError: the server failed.
    """
    try:
        completion = Completion.model_validate_json(data)
    except ValidationError:
        raise not_openai(url, data) from None
    if completion.error is not None:
        raise told(url, completion.error.status, completion.error)
    usage = completion.usage or Usage()
    choices = sorted(completion.choices, key=lambda choice: choice.index)
    return [_chunk(choice, usage) for choice in choices]


def _chunk(choice: Choice, usage: Usage) -> Chunk:
    scored = choice.logprobs or Logprobs(tokens=[], token_logprobs=[])
    return Chunk(
        choice.text,
        choice.token_ids or [],
        REASONS.get(choice.finish_reason, "stop"),
        choice.index,
        [math.nan if value is None else value for value in scored.token_logprobs],
        scored.tokens,
        [top or {} for top in scored.top_logprobs or []],
        usage.prompt_tokens,
        (usage.prompt_tokens_details or PromptDetails()).cached_tokens or 0,
    )

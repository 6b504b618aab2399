"""A server with the OpenAI API, for threads and for asyncio: from parameters to chunks.

From top to bottom: the parts of its responses, the body of a request, the chunks of a response,
errors as messages for the client's users, and the two transports.
"""

import json
import math
import os
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from lathe_base.errors import Code, StageError, UserError, printable
from lathe_base.parameters import ALIASES, FIELDS, Params
from lathe_serving.client.transport import Parameters, utf8
from lathe_serving.reach import (
    REACH_SECONDS,
    is_loopback,
    nothing_listens,
    require_base_url,
    too_slow,
)
from lathe_serving.runtime.protocol import Chunk, FinishReason, TokenScores, parse

PATH, DONE = "/completions", "[DONE]"
KEY_VARIABLE = "LATHE_API_KEY"
CODES = {"overloaded": 503, "unavailable": 503}
HINTS = {
    "model_not_found": (Code.NOT_FOUND, "give the name of the server's model: --model-name NAME"),
    "context_length_exceeded": (Code.TOO_LONG, "give a shorter prompt, or ask for fewer tokens"),
}
"""Our codes and hints by the API's codes."""

REASONS: dict[str | None, FinishReason] = {None: "", "length": "length"}


class ApiError(BaseModel):
    """An error in the API's format."""

    message: str
    type: str | None = None
    code: str | int | None = None

    @property
    def status(self) -> int:
        """The HTTP status that it would have had before the response began."""
        return CODES.get(str(self.code), 500 if self.type == "server_error" else 400)


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
        parameters: those of `lathe_base.parameters`.

    Raises:
        UserError: a parameter is unknown, out of range, or only supported by Triton; or the prompt
            is not UTF-8 text.
    """
    # Checked as Triton's backend would, so that both interfaces reject the same values; a name that
    # OpenAI's API has not would be ignored by the server, without a word.
    utf8(prompt)
    settings = {ALIASES.get(name, name): v for name, v in parameters.items() if v is not None}
    params = parse(settings, Params())
    beams = {"beam_search"} if params.decode_strategy == "beam_search" else set()
    absent = {name for name in settings if FIELDS[name].openai == "none"}
    for name in (*absent, *beams):
        raise UserError(
            f"{name}: not supported by the OpenAI API",
            "omit it, or use Triton's gRPC",
            Code.UNSUPPORTED,
        )
    fields = {name: getattr(params, name) for name in settings if FIELDS[name].openai == "same"}
    if params.decode_strategy == "greedy_search":
        fields["temperature"] = 0  # the API's way to say so
    if params.stop:
        fields["stop"] = params.stop
    if params.structured_outputs:
        try:
            fields["structured_outputs"] = json.loads(params.structured_outputs)
        except (ValueError, RecursionError):
            what = f"structured_outputs: not JSON: {params.structured_outputs:.100}"
            raise UserError(
                what, f"give {FIELDS['structured_outputs'].limit}", Code.INVALID_VALUE
            ) from None
    if params.logprobs:  # the number of most likely tokens, which may be 0
        fields["logprobs"] = params.top_logprobs
    if "num_return_sequences" in settings:
        fields["n"] = params.num_return_sequences
    # Without its ids a token would be known by its text only, which may be half a character.
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
    chunks = []
    for choice in sorted(completion.choices, key=lambda choice: choice.index):
        scored = choice.logprobs or Logprobs(tokens=[], token_logprobs=[])
        chunk = Chunk(
            choice.text,
            choice.token_ids or [],
            REASONS.get(choice.finish_reason, "stop"),  # others, such as content_filter, end it too
            choice.index,
            [math.nan if value is None else value for value in scored.token_logprobs],
            scored.tokens,
            [top or {} for top in scored.top_logprobs or []],
            usage.prompt_tokens,
            (usage.prompt_tokens_details or PromptDetails()).cached_tokens or 0,
        )
        chunks.append(chunk)
    return chunks


def refusal(url: str, reply: httpx2.Response) -> Exception:
    """The exception for a response (already read) with a status other than 200."""
    try:
        error = ApiError.model_validate(json.loads(reply.content)["error"])
    except (ValueError, KeyError, TypeError, ValidationError):
        # Proxies answer with pages of their own, too: that is no reason to doubt the server behind.
        if reply.status_code < 500 and reply.status_code not in (401, 403, 429):
            return not_openai(url, reply.content, f"status {reply.status_code}: ")
        error = ApiError(message=f"status {reply.status_code}")
    return told(url, reply.status_code, error, reply.headers.get("retry-after", ""))


def told(url: str, status: int, error: ApiError, retry_after: str = "") -> Exception:
    """The exception for an error of the API.

    Args:
        retry_after: the header Retry-After.
    """
    message = printable(error.message, limit=1000)
    if status in (401, 403):
        hint = f"set {KEY_VARIABLE} to one of the server's keys"
        return UserError(
            f"{url}: {message}", hint, Code.UNAUTHORIZED if status == 401 else Code.FORBIDDEN
        )
    if status in (429, 503):
        seconds = f"in {retry_after} s" if retry_after.isdecimal() else "later"
        return UserError(f"{url}: {message}", f"retry {seconds}", Code.BUSY)
    if status < 500:
        fallback = (Code.INVALID_REQUEST, "change the request")
        code, hint = HINTS.get(str(error.code), fallback)
        return UserError(message, hint, code)
    return StageError(f"{url}: {message}", Code.SERVER_ERROR)


def not_openai(url: str, data: str | bytes, status: str = "") -> UserError:
    """The error for a response that is not from an OpenAI-compatible API."""
    text = data.decode(errors="replace") if isinstance(data, bytes) else data
    return UserError(
        f"{url}: not an OpenAI-compatible API: {status}{printable(text, limit=100)!r}",
        "check the address; that of `make serve` is http://localhost:9000/v1",
        Code.SERVER_ERROR,
    )


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Raise the user's error if the server does not answer at first.

    Raises:
        UserError: no answer, no answer in time, or an answer that is not HTTP.
    """
    try:
        yield
    except httpx2.TimeoutException:
        raise UserError(
            f"{url}: no answer within {REACH_SECONDS:g} s",
            "check the address and the server's log",
            Code.TIMEOUT,
        ) from None
    except httpx2.NetworkError:
        raise nothing_listens(url) from None
    except httpx2.TransportError as error:
        raise not_openai(url, str(error)) from None


@contextmanager
def asking(url: str, timeout_seconds: float | None) -> Iterator[None]:
    """Raise the user's error if there is no response to a request, or it ends early.

    Raises:
        UserError: no answer, or no answer in time.
        StageError: the connection was lost.
    """
    try:
        yield
    except httpx2.ConnectError:
        raise nothing_listens(url) from None
    except httpx2.ConnectTimeout:
        raise too_slow(url, REACH_SECONDS) from None
    except httpx2.TimeoutException:
        raise too_slow(url, timeout_seconds) from None
    except httpx2.TransportError as error:
        raise StageError(
            f"{url}: the connection was lost before the answer was complete: {error}",
            Code.UNREACHABLE,
        ) from None


class _Endpoint:
    """Common parts of both transports."""

    def __init__(
        self, url: str, model_name: str, timeout_seconds: float | None, api_key: str | None
    ) -> None:
        self._url = require_base_url(url)
        self._model_name, self._timeout = model_name, timeout_seconds
        self._is_reached = False
        key = os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key
        if not (key.isascii() and key.isprintable()) or key != key.strip():
            raise UserError(
                "the API key contains characters that are not allowed in HTTP headers",
                f"check {KEY_VARIABLE}",
                Code.INVALID_VALUE,
            )
        self._options: dict[str, Any] = {
            "base_url": self._url,
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "timeout": httpx2.Timeout(timeout_seconds, connect=REACH_SECONDS, pool=None),
            "limits": httpx2.Limits(max_connections=None),  # a load test has many clients
            "trust_env": not is_loopback(self._url),  # proxies
        }

    def _chunks(self, data: str | bytes, since: float) -> list[Chunk]:
        # httpx's timeout starts again with each piece that arrives; this one is for all of them.
        if self._timeout is not None and time.monotonic() - since > self._timeout:
            raise too_slow(self._url, self._timeout)
        return parse_chunks(data, self._url)

    def _cut(self) -> StageError:
        return StageError(
            f"{self._url}: the stream ended before the answer was complete", Code.UNREACHABLE
        )


class OpenAITransport(_Endpoint):
    """See `Transport`.

    Raises:
        UserError: `url` is not a base URL, or the key cannot be sent.
    """

    def __init__(
        self, url: str, model_name: str, timeout_seconds: float | None, api_key: str | None
    ) -> None:
        super().__init__(url, model_name, timeout_seconds, api_key)
        self._http = httpx2.Client(**self._options)

    def chunks(self, prompt: str, parameters: Parameters) -> Generator[Chunk]:
        """See `Transport.chunks`."""
        request_body = body(self._model_name, prompt, parameters)
        self._reach()
        since = time.monotonic()
        with (
            asking(self._url, self._timeout),
            self._http.stream("POST", PATH, json=request_body) as reply,
        ):
            if reply.status_code != 200 or not request_body.get("stream"):
                reply.read()
            if reply.status_code != 200:
                raise refusal(self._url, reply)
            if not request_body.get("stream"):
                yield from self._chunks(reply.content, since)
                return
            for event in httpx2.EventSource(reply):
                if event.data == DONE:
                    return  # a stream without it was cut, even if it ends without an error
                yield from self._chunks(event.data, since)
        raise self._cut()

    def scores(self, arrays: Mapping[str, NDArray[Any]]) -> TokenScores:
        """Refused."""
        raise self._only_triton("scores")

    def served_digest(self) -> str:
        """Refused."""
        raise self._only_triton("a model's SHA-256")

    def close(self) -> None:
        """See `Transport.close`."""
        self._http.close()

    def _reach(self) -> None:
        """Check once that the server answers and accepts the key."""
        if self._is_reached:
            return
        with reaching(self._url):
            reply = self._http.get("/models", timeout=REACH_SECONDS)
        if reply.status_code != 200:
            raise refusal(self._url, reply)
        self._is_reached = True

    def _only_triton(self, what: str) -> UserError:
        return UserError(
            f"{self._url}: the OpenAI API does not support {what}",
            "use Triton's gRPC address, HOST:PORT, such as localhost:8001",
            Code.UNSUPPORTED,
        )


class AsyncOpenAITransport(_Endpoint):
    """See `AsyncTransport`.

    Raises:
        UserError: `url` is not a base URL, or the key cannot be sent.
    """

    def __init__(
        self, url: str, model_name: str, timeout_seconds: float | None, api_key: str | None
    ) -> None:
        super().__init__(url, model_name, timeout_seconds, api_key)
        self._http = httpx2.AsyncClient(**self._options)

    async def chunks(self, prompt: str, parameters: Parameters) -> AsyncGenerator[Chunk]:
        """See `AsyncTransport.chunks`."""
        request_body = body(self._model_name, prompt, parameters)
        await self._reach()
        since = time.monotonic()
        with asking(self._url, self._timeout):
            async with self._http.stream("POST", PATH, json=request_body) as reply:
                if reply.status_code != 200 or not request_body.get("stream"):
                    await reply.aread()
                if reply.status_code != 200:
                    raise refusal(self._url, reply)
                if not request_body.get("stream"):
                    for chunk in self._chunks(reply.content, since):
                        yield chunk
                    return
                async for event in httpx2.EventSource(reply):
                    if event.data == DONE:
                        return
                    for chunk in self._chunks(event.data, since):
                        yield chunk
        raise self._cut()

    async def close(self) -> None:
        """See `AsyncTransport.close`."""
        await self._http.aclose()

    async def _reach(self) -> None:
        if self._is_reached:
            return
        with reaching(self._url):
            reply = await self._http.get("/models", timeout=REACH_SECONDS)
        if reply.status_code != 200:
            raise refusal(self._url, reply)
        self._is_reached = True

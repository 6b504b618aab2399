"""The KServe API, version 2 (`/v2`): forwards checked requests to Triton's own HTTP server.

Triton's HTTP server can be crashed by a body in very many chunks, or by deeply nested JSON, and
lets anybody who can reach it use its shared memory, model repository, traces and log. So it listens
on loopback, and only receives complete bodies with parsed JSON, on the paths below.
"""

import asyncio
import json
import math
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

import numpy as np
from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    TCPConnector,
)
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lathe_serving.gateway.admission import Admission, Slots
from lathe_serving.gateway.connections import read_body, until_disconnect
from lathe_serving.gateway.errors import (
    ApiError,
    TritonDied,
    TritonUnavailable,
    as_api_error,
)
from lathe_serving.gateway.telemetry import Call, Report, Usage
from lathe_serving.gateway.triton import CrashQuarantine
from lathe_serving.runtime.protocol import REQUEST_ID, score_name

JSON_LENGTH = "inference-header-content-length"
"""The header with the number of JSON bytes in the body; the rest are binary tensors."""

MAX_PARAMETERS, MAX_TENSORS, MAX_DIMENSIONS = 256, 64, 16
MAX_ENTRIES = {"parameters": MAX_PARAMETERS, "inputs": MAX_TENSORS, "outputs": MAX_TENSORS}

MODEL = r"/v2/models/([A-Za-z0-9][A-Za-z0-9_.-]{0,199})(?:/versions/[0-9]{1,18})?"
HEALTH = re.compile(r"/v2/health/(?:live|ready)")
ABOUT = re.compile(rf"/v2|{MODEL}(?:/(?:ready|config|stats))?")
INFERENCE = re.compile(rf"{MODEL}/(infer|generate|generate_stream)")

EVENTS = "text/event-stream"
FORWARDED = ("content-type", "accept-encoding", JSON_LENGTH)
RETURNED = ("content-type", "content-encoding", JSON_LENGTH)
CONNECT_SECONDS = 5.0


def require_request(body: bytes, json_length: str | None) -> dict[str, Any]:
    """Check a request; returns its JSON.

    Triton 2.51 does not check it: it parses recursively, and multiplies a tensor's sizes without
    checking for overflow. Either can crash the server.

    Args:
        json_length: value of the header JSON_LENGTH.

    Raises:
        ApiError: it is not a JSON object of few fields that is nested at most 200 deep (the limit
            of pydantic's parser), or a tensor has more elements than the request has bytes.
    """
    text = body  # binary tensors may follow the JSON
    if json_length is not None:
        if not json_length.isdecimal() or len(json_length) > 9 or int(json_length) > len(body):
            raise ApiError(400, f"{JSON_LENGTH} is not a length within the body: {json_length:.99}")
        text = body[: int(json_length)]
    try:
        document = from_json(text)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ApiError(400, "the body is not a JSON object")
    _require_at_most(MAX_PARAMETERS, "fields", document)
    for name, limit in MAX_ENTRIES.items():
        _require_at_most(limit, name, document.get(name))
    tensors = document.get("inputs")
    for i, tensor in enumerate(tensors if isinstance(tensors, list) else []):
        if not isinstance(tensor, dict):
            continue  # Triton rejects it
        name, shape = f"inputs[{i}].shape", tensor.get("shape")
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise ApiError(400, f"{name} is not a list of sizes", param=name)
        _require_at_most(MAX_DIMENSIONS, name, shape)
        # Each size too: an empty tensor has the product 0, whatever the other sizes are.
        if max(math.prod(shape), *shape, 0) > len(body):
            raise ApiError(400, f"{name} has more elements than the request has bytes", param=name)
    return document


def _require_at_most(limit: int, name: str, value: Any) -> None:
    if isinstance(value, dict | list) and len(value) > limit:
        raise ApiError(400, f"more than {limit} {name}", param=name)


class KServe:
    """An ASGI application for `/v2` and all paths below it.

    Args:
        address: Triton's HTTP address, `host:port`.
        reports: called for each inference request at its end.
        slots: of the models that generate; requests to these wait for a slot, and can be cancelled.
        cancel: cancels the request with this name to this model.
    """

    def __init__(
        self,
        address: str,
        admission: Admission,
        reports: Sequence[Report],
        quarantine: CrashQuarantine,
        slots: Mapping[str, Slots],
        cancel: Callable[[str, str], None],
    ) -> None:
        self._url, self._quarantine = f"http://{address}", quarantine
        self._admission, self._reports = admission, reports
        self._slots, self._cancel = slots, cancel
        self._names = {*slots, *map(score_name, slots)}

    @asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        """Keep connections to Triton while the block runs."""
        async with ClientSession(
            # Admission has a limit; and Triton waits for idle connections when it is told to end.
            connector=TCPConnector(limit=0, force_close=True),
            timeout=ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            cookie_jar=DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        ) as self._session:
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun, status = False, 200
        path = scope["path"].rstrip("/")
        inference = INFERENCE.fullmatch(path)
        # Metrics have a label for each path, so that of a model must not be what a client sends.
        call = Call(f"/v2/models/*/{inference[2]}" if inference else path, scope)
        if inference and inference[1] in self._names:
            call.model = inference[1]

        async def noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            if not HEALTH.fullmatch(path):  # kubelet's probes have no key
                call.caller = self._admission.check(scope)
            if inference:
                call.caller.begin()
                async with self._admission.until_deadline():
                    status = await self._infer(call, inference, scope, receive, noting)
            else:
                await (await self._about(path, scope))(scope, receive, noting)
        except Exception as error:
            api_error = as_api_error(error)
            status = api_error.status
            if has_begun:
                last = json.dumps({"error": api_error.message}, ensure_ascii=False)
                body = f"data: {last}\n\n".encode()
                await send({"type": "http.response.body", "body": body})
            else:
                await api_error.response({"error": api_error.message})(scope, receive, send)
        if inference:
            call.end(status, self._reports)

    async def _about(self, path: str, scope: Scope) -> Response:
        """Forward a request for metadata of Triton or its models."""
        if not HEALTH.fullmatch(path) and not ABOUT.fullmatch(path):
            raise ApiError(404, "this path does not exist")
        if scope["method"] not in ("GET", "HEAD"):
            return _not_allowed("GET, HEAD")
        if self._admission.is_draining and path == "/v2/health/ready":
            return Response(status_code=503)
        try:
            async with self._session.get(self._url + path) as reply:
                return Response(await reply.read(), reply.status, _only(RETURNED, reply.headers))
        except (ClientError, OSError) as error:
            raise TritonUnavailable(f"Triton on {self._url}: {error}") from None

    async def _infer(
        self,
        call: Call,
        inference: re.Match[str],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> int:
        """Forward an inference request; returns the status of the response."""
        if scope["method"] != "POST":
            await _not_allowed("POST")(scope, receive, send)
            return 405
        path, (model, verb) = inference[0], inference.groups()
        body = await read_body(self._admission, scope, receive)
        headers = Headers(scope=scope)
        document = require_request(body, headers.get(JSON_LENGTH))
        digest = sha256(path.encode() + body).digest()  # before the name, which is never the same
        forwarded = _only(FORWARDED, headers)
        # Parameters are fields, or below `parameters`.
        nested = document.get("parameters")
        fields = {**document, **(nested if isinstance(nested, dict) else {})}

        # Over HTTP a request has no id by which it could be cancelled: a parameter names it, unless
        # the client has given one.
        slots = self._slots.get(model)
        generates = verb != "infer" and slots is not None
        if generates:
            forwarded.pop("accept-encoding", None)  # its tokens are counted
        name = uuid.uuid4().hex
        can_cancel = generates and REQUEST_ID not in document and bool(document)
        if can_cancel:  # the name becomes the first field
            body = f'{{"{REQUEST_ID}":"{name}",'.encode() + body.lstrip()[1:]
            forwarded.pop(JSON_LENGTH, None)
        first_token: float | None = None

        def count(content: bytes) -> None:
            nonlocal first_token
            if fields.get("stream") is True and first_token is None:
                first_token = time.monotonic()
            _count(content, fields.get("echo") is True, call.usage)

        async def ask() -> int:
            async with self._quarantine.watch(digest):
                try:
                    url = self._url + path
                    async with self._session.post(url, data=body, headers=forwarded) as reply:
                        returned = _only(RETURNED, reply.headers)
                        if reply.content_type == EVENTS:
                            await _stream(reply, returned, send, count)
                            return reply.status
                        content = await reply.read()
                        if generates and reply.status == 200:
                            count(content)
                        await Response(content, reply.status, returned)(scope, receive, send)
                        return reply.status
                except ClientConnectorError as error:
                    raise TritonUnavailable(f"Triton on {self._url}: {error}") from None
                except (ClientError, OSError) as error:  # it had the request
                    raise TritonDied(f"Triton on {self._url}: {error}") from None

        async def generate() -> int:
            if slots is None:
                return await ask()
            # As far as the request says how many sequences it generates at the same time; the
            # backend checks its parameters.
            counts = (fields.get(key) for key in ("num_return_sequences", "num_beams"))
            width = max([1, *(n for n in counts if type(n) is int)])
            arrived = time.monotonic()
            try:
                async with slots.hold(width, True, call.caller.is_low):
                    call.waited(arrived)
                    since = time.monotonic()
                    try:
                        return await ask()
                    finally:
                        call.generated(since, first_token)
            except asyncio.CancelledError:
                if can_cancel:  # so that its slot is free within a step
                    self._cancel(model, name)
                raise

        with self._admission.track(call.caller):
            return await until_disconnect(generate(), receive)


def _count(content: bytes, echo: bool, usage: Usage) -> None:
    """Add the tokens of a generated response, or of an event of a stream."""
    try:
        answer = from_json(content)
        # Triton writes a tensor of one element as a number.
        counts, sequences, prompts = (
            np.atleast_1d(answer.get(name, 0)).tolist()
            for name in ("token_count", "sequence", "prompt_token_count")
        )
    except (ValueError, AttributeError):  # an error
        return
    # All sequences of a prompt tell its length: it is counted with the first one.
    usage.prompt += sum(prompts[:1]) if sequences[0] == 0 else 0
    usage.completion += sum(counts) - (sum(prompts) if echo else 0)


async def _stream(
    reply: ClientResponse, headers: Mapping[str, str], send: Send, read: Callable[[bytes], None]
) -> None:
    """Forward a stream; `read` gets the data of its events."""
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": raw})
    rest = b""
    async for piece in reply.content.iter_any():
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        *events, rest = (rest + piece).split(b"\n\n")
        for data in events:
            read(data.removeprefix(b"data: "))
    await send({"type": "http.response.body", "body": b""})


def _only(names: tuple[str, ...], headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in names if name in headers}


def _not_allowed(methods: str) -> Response:
    response = ApiError(405, "the method is not allowed").response({"error": "Method Not Allowed"})
    response.headers["allow"] = methods
    return response

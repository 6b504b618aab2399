"""The gateway's application: its routes, the protection against web pages, and its endpoints.

An `Endpoint` answers the requests of one path of the OpenAI API; `Gateway` holds what lives as long
as the process, and has the routes; `Web` is the middleware before them.
"""

import asyncio
import json
import re
import uuid
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any, Protocol
from urllib.parse import urlsplit

from pydantic import Field, field_validator
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lathe_serving.gateway.admission import Admission, ApiKeys, Limits, Slots
from lathe_serving.gateway.chat import Conversation, read_chat, render_prompt
from lathe_serving.gateway.connections import FILLER, read_body, until_disconnect
from lathe_serving.gateway.errors import ApiError, Json, as_api_error
from lathe_serving.gateway.generation import Id, RequestBody, ServedModel, read_completion
from lathe_serving.gateway.kserve import KServe
from lathe_serving.gateway.responses import read_responses
from lathe_serving.gateway.telemetry import REQUEST_ID, Call, GatewayMetrics, Report, Tracing
from lathe_serving.gateway.template import Renderer
from lathe_serving.gateway.tools import ToolSchemas
from lathe_serving.gateway.triton import CrashQuarantine, Model, Triton, models_by_name
from lathe_serving.reach import is_this_machine

PATHS = (
    "/v1/models, /v1/completions, /v1/chat/completions, /v1/responses, /v2/models, /tokenize and "
    "/detokenize"
)

ID_BYTES = 16
"""Maximum size of a token id in JSON, including what separates it from the next."""

_ID = re.compile(r"[!-~]{1,128}")

COMMENT = b": keep-alive\n\n"
COMMENT_SECONDS = 15.0
FIRST_SECONDS = 2.0
"""Maximum time that a stream's headers wait for its first chunk."""

STREAM_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # nginx would collect events before it passes them on
    ],
}


class TokenizeText(RequestBody):
    """A text to tokenize, for `/tokenize` as in vLLM."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChat(Conversation):
    """Messages whose prompt is to be tokenized."""

    return_token_strs: bool = False
    add_special_tokens: bool = False

    @field_validator("add_special_tokens")
    @classmethod
    def _is_default_template(cls, value: bool) -> bool:
        if value:
            raise ValueError("not supported with messages: the chat template adds special tokens")
        return value


class Detokenize(RequestBody):
    """Tokens to convert to text, for `/detokenize`."""

    tokens: Annotated[list[Id], Field(max_length=2**20)]


class Answer(Protocol):
    """A parsed request, answered by one of the two methods."""

    is_stream: bool

    async def whole(self) -> Json:
        """The complete response."""

    def stream(self) -> AsyncGenerator[bytes]:
        """The server-sent events of a response."""

    def failed(self, error: ApiError) -> bytes:
        """The last events of a stream that an error ends."""


Read = Callable[[Any, Call], Awaitable[Answer | Json]]
"""Parses the body of a request, which is any JSON, and returns an `Answer` or the response itself;
raises ValidationError or ApiError."""


class Endpoint:
    """A path that generates, as an ASGI application: from the headers of a request to the last byte
    of its response.

    It admits the request, receives its body, lets one of `generation`, `chat` and `responses` read
    it, and sends the answer that it returns: whole, or as server-sent events. All ends of a request
    meet here: a client that leaves, an error before or within a stream, and the deadline of a
    gateway that shuts down.

    Args:
        reports: called for each request at its end.
        max_body: bytes; a longer body is about more tokens than a context has. Parsing it would
            stop the other requests meanwhile.
    """

    def __init__(
        self,
        path: str,
        read: Read,
        admission: Admission,
        reports: Sequence[Report],
        max_body: int | None = None,
    ) -> None:
        self._path, self._read, self._max_body = path, read, max_body
        self._admission, self._reports = admission, reports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, admission = Call(self._path, scope), self._admission
        answer: Answer | Json | None = None

        async def respond(answer: Answer) -> int:
            if answer.is_stream:
                await _send_events(answer, scope, send)
            else:
                await JSONResponse(await answer.whole())(scope, receive, send)
            return 200

        try:
            # From cheap to expensive: nothing of a body is read for a request without a key.
            call.caller = admission.check(scope)
            call.caller.begin()
            # Without this type any web page could make a browser send requests; see `Web`.
            kind = Headers(scope=scope).get("content-type", "")
            if kind.partition(";")[0].strip().lower() != "application/json":
                raise ApiError(415, f"the content type is {kind[:100]!r}: send application/json")
            async with admission.until_deadline():
                body = await read_body(admission, scope, receive)
                if self._max_body is not None and len(body) > self._max_body:
                    what = f"{len(body):,} bytes have more tokens than the positions of the model"
                    raise ApiError(400, what, code="context_length_exceeded")
                with admission.track(call.caller):
                    try:
                        document = json.loads(body)
                    except (ValueError, RecursionError) as error:
                        raise ApiError(400, f"the body is not JSON: {error}") from None
                    answer = await self._read(document, call)
                    if isinstance(answer, dict):  # no work is left that a client could cancel
                        await JSONResponse(answer)(scope, receive, send)
                        status = 200
                    else:
                        status = await until_disconnect(respond(answer), receive)
        except Exception as error:
            api_error = as_api_error(error)
            status = api_error.status
            is_streaming = FILLER in scope["state"]
            if is_streaming and answer is not None and not isinstance(answer, dict):
                # The status has been sent: only an event can tell the client.
                await send({"type": "http.response.body", "body": answer.failed(api_error)})
            else:
                await api_error.response()(scope, receive, send)
        call.end(status, self._reports)


async def _send_events(answer: Answer, scope: Scope, send: Send) -> None:
    async def send_piece(piece: bytes) -> None:
        await send({"type": "http.response.body", "body": piece, "more_body": True})

    async def comment() -> None:
        # Clients skip comments; but proxies close connections that are silent for long.
        while True:
            await asyncio.sleep(COMMENT_SECONDS)
            await send_piece(COMMENT)

    async with aclosing(answer.stream()) as events:
        first = asyncio.ensure_future(anext(events))
        tasks: list[asyncio.Future[Any]] = [first]
        try:
            await asyncio.wait({first}, timeout=FIRST_SECONDS)
            if first.done():
                first.result()  # an error that comes soon has a status of its own
            # From now on an error is an event of the stream, and the connection may send comments:
            # to find out whether a client that has closed its side still reads.
            scope["state"][FILLER] = COMMENT
            await send(STREAM_START)
            tasks.append(asyncio.create_task(comment()))
            await send_piece(await first)
            async for piece in events:
                await send_piece(piece)
        finally:
            for task in tasks:
                task.cancel()
            # The generator cannot be closed while a task is within it.
            await asyncio.gather(*tasks, return_exceptions=True)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class Gateway:
    """The OpenAI and KServe APIs for the models of one Triton.

    Attributes:
        admission: which requests are answered, how many are in flight, and when they are ended.

    Args:
        models: by name.
        url: Triton's gRPC address, `host:port`.
        http: Triton's HTTP address, `host:port`.
        keys: None allows everybody.
        tracing: None makes no traces.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        url: str,
        http: str,
        limits: Limits,
        keys: ApiKeys | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._models, self._url, self._tracing = models, url, tracing
        self._names = models_by_name(models.values())
        self._slots = {name: Slots(model) for name, model in models.items()}
        self._quarantine = CrashQuarantine()
        self.admission = Admission(limits, keys)
        self.metrics = GatewayMetrics(self.admission, self._slots)
        self._reports = [self.metrics.report, *([tracing.report] if tracing else [])]
        # Triton's connection is made later, in the event loop that uvicorn runs.
        self._kserve = KServe(
            *(http, self.admission, self._reports, self._quarantine, self._slots),
            lambda *name: self._triton.cancel(*name),
        )
        self._served: dict[str, ServedModel] = {}  # while the application runs

    def app(
        self, origins: Sequence[str] = (), hosts: Sequence[str] = (), is_local: bool = True
    ) -> Starlette:
        """The application.

        Args:
            origins: allowed origins of web pages (CORS).
            hosts: see `Web`.
            is_local: whether it listens on loopback only.
        """
        n_positions = max(model.n_positions for model in self._models.values())
        max_ids = 1000 + ID_BYTES * n_positions  # bytes, with those of the other fields
        max_prompts = self.admission.limits.prompts
        post: dict[str, tuple[Read, int | None]] = {
            "/v1/completions": (
                lambda body, call: read_completion(body, call, self._find, max_prompts),
                None,
            ),
            "/v1/chat/completions": (lambda body, call: read_chat(body, call, self._find), None),
            "/v1/responses": (lambda body, call: read_responses(body, call, self._find), None),
            "/tokenize": (self._tokenize, None),
            "/detokenize": (self._detokenize, max_ids),
        }
        get = {
            "/v1/models": self._list,
            "/v1/models/{name:path}": self._model,
            "/health": self._health,
            "/metrics": self.metrics.page,
        }
        handlers: list[tuple[str, Any, str]] = [
            (path, Endpoint(path, read, self.admission, self._reports, max_body), "POST")
            for path, (read, max_body) in post.items()
        ]
        handlers += [(path, handler, "GET") for path, handler in get.items()]
        routes = [
            Route(path + end, handler, methods=[method])
            for path, handler, method in handlers
            for end in ("", "/")
        ]
        routes += [Route(path, self._kserve) for path in ("/v2", "/v2/{path:path}")]
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
        app = Starlette(
            routes=routes,
            middleware=[Middleware(Web, origins, hosts, is_local), *([cors] if origins else [])],
            exception_handlers={HTTPException: _refused, ApiError: _refused},
            lifespan=self._lifespan,
        )
        app.router.redirect_slashes = False  # it would redirect to whatever host was named
        return app

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        # gRPC's channel belongs to the event loop that is running now.
        self._triton, schemas = Triton(self._url, self._quarantine), ToolSchemas()
        self._served = {
            name: ServedModel(
                model, self._slots[name], Renderer(model.folder), schemas, self._triton
            )
            for name, model in self._models.items()
        }
        async with self._kserve.session():
            yield
        schemas.close()
        for served in self._served.values():
            served.renderer.close()
        await self._triton.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    def _find(self, name: str, call: Call | None = None) -> ServedModel:
        """The model with a name, which the call is then about."""
        if name not in self._names:
            what = f"the model {name!r} does not exist; available: {', '.join(self._names)}"
            raise ApiError(404, what, param="model", code="model_not_found")
        served = self._served[self._names[name].name]
        if call is not None:
            call.model = served.model.name
        return served

    async def _tokenize(self, body: Any, call: Call) -> Json:
        is_chat = isinstance(body, dict) and "messages" in body
        request = (TokenizeChat if is_chat else TokenizeText).model_validate(body)
        served = self._find(request.model, call)
        if isinstance(request, TokenizeChat):
            ids = await render_prompt(request, served)
        else:
            ids = await served.renderer.tokenize(request.prompt, request.add_special_tokens)
        return {
            "count": len(ids),
            "max_model_len": served.model.n_positions,
            "tokens": ids,
            "token_strs": await served.renderer.names(ids) if request.return_token_strs else None,
        }

    async def _detokenize(self, body: Any, call: Call) -> Json:
        request = Detokenize.model_validate(body)
        renderer = self._find(request.model, call).renderer
        return {"prompt": await renderer.detokenize(request.tokens)}

    async def _list(self, request: Request) -> Response:
        self.admission.check(request.scope)
        models = [model.to_json(name) for name, model in self._names.items()]
        return JSONResponse({"object": "list", "data": models})

    async def _model(self, request: Request) -> Response:
        self.admission.check(request.scope)
        name = request.path_params["name"].rstrip("/")
        return JSONResponse(self._find(name).model.to_json(name))

    async def _health(self, _: Request) -> Response:
        # First, so that a load balancer stops sending requests while those in flight are answered.
        if self.admission.is_draining:
            return JSONResponse({"status": "shutting down"}, 503)
        waiting = [name for name in self._models if not await self._triton.is_ready(name)]
        if waiting:
            return JSONResponse({"status": f"not ready: {', '.join(waiting)}"}, 503)
        return JSONResponse({"status": "ready"})


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return error.response()
    assert isinstance(error, HTTPException)
    path = request.url.path[:100]
    what = f"{path} does not exist" if error.status_code == 404 else error.detail
    response = ApiError(error.status_code, f"{what}: this server supports {PATHS}").response()
    response.headers.update(error.headers or {})  # Allow
    return response


class Web:
    """ASGI middleware against cross-site requests from web browsers, which also names requests.

    Any web page can make a browser send requests to this machine, and with a domain that resolves
    to it (DNS rebinding) it can read the responses. So a request from a page is only answered if
    the page's origin is allowed, and a gateway that listens on loopback only answers to this
    machine's host names. Requiring the JSON content type (`Endpoint`) blocks the requests that
    browsers send without a preflight.

    Args:
        origins: allowed origins of web pages.
        hosts: allowed host names besides this machine's and those of the origins, for example
            that of a proxy; `*` allows all.
        is_local: whether the gateway listens on loopback only.
    """

    def __init__(
        self, app: ASGIApp, origins: Sequence[str], hosts: Sequence[str], is_local: bool
    ) -> None:
        self._app, self._origins = app, set(origins)
        self._hosts: set[str | None] | None = None
        if is_local and "*" not in hosts:
            self._hosts = {urlsplit(origin).hostname for origin in origins}
            self._hosts |= {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        # The client's own id, so that it finds its request in the log; but one line, and short.
        request_id = headers.get(REQUEST_ID, "")
        name = request_id if _ID.fullmatch(request_id) else uuid.uuid4().hex
        scope["state"][REQUEST_ID] = name

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = name
            await send(message)

        error: ApiError | None = None
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins and "*" not in self._origins:
            what = (
                f"pages of {origin[:100]!r} are not allowed; add the origin to LATHE_CORS_ORIGINS"
            )
            error = ApiError(403, what, code="foreign_origin")
        if self._hosts is not None and "host" in headers:  # HTTP/1.0 may have none, browsers do
            try:
                host = urlsplit(f"//{headers['host']}").hostname or ""
            except ValueError:
                host = headers["host"][:100]
            is_ours = is_this_machine(host) or host.endswith(".localhost")
            if not is_ours and host not in self._hosts:
                what = (
                    f"{host!r} is not a host name of this machine; add a proxy's to "
                    "LATHE_ALLOWED_HOSTS"
                )
                error = ApiError(421, what, code="unknown_host")
        await (error.response() if error else self._app)(scope, receive, named)

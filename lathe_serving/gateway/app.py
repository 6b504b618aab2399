"""The gateway: its application, the protection against web pages, and its server.

`Gateway` holds what lives as long as the process, and is the ASGI application's routes; `Web` is
the middleware before them; `Server` is uvicorn with an orderly end.
"""

import asyncio
import re
import socket
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any
from urllib.parse import urlsplit

import uvicorn
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

from lathe_base.errors import Code, StageError, UserError
from lathe_serving.gateway.admission import Admission, ApiKeys, Limits, Slots
from lathe_serving.gateway.chat import Conversation, read_chat, render_prompt
from lathe_serving.gateway.completions import read_completion
from lathe_serving.gateway.connections import (
    LAST_SECONDS,
    MAX_HEADER_BYTES,
    Bodies,
    Connection,
    Connections,
)
from lathe_serving.gateway.endpoint import DrainDeadline, Endpoint, Entrance, Read
from lathe_serving.gateway.errors import ApiError, Json
from lathe_serving.gateway.generation import Id, RequestBody, ServedModel
from lathe_serving.gateway.kserve import KServe
from lathe_serving.gateway.renderer import Renderer
from lathe_serving.gateway.responses import read_responses
from lathe_serving.gateway.telemetry import REQUEST_ID, Call, GatewayMetrics, Tracing
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

SWEEP_TICKS = 10  # of uvicorn's, 0.1 s each
BACKLOG = 2048  # connections that wait to be accepted, as uvicorn's default


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


class Gateway:
    """The OpenAI and KServe APIs for the models of one Triton.

    Attributes:
        admission: which requests are answered, and how many are in flight.
        deadline: ends the requests in flight.

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
        self.admission, self.deadline = Admission(limits, keys), DrainDeadline()
        self.metrics = GatewayMetrics(self.admission, self._slots)
        reports = [self.metrics.report, *([tracing.report] if tracing else [])]
        self._entrance = Entrance(self.admission, Bodies(self.admission), self.deadline, reports)
        # Triton's connection is made later, in the event loop that uvicorn runs.
        self._kserve = KServe(
            *(http, self._entrance, self._quarantine, self._slots),
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
            "/metrics": self._page,
        }
        handlers: list[tuple[str, Any, str]] = [
            (path, Endpoint(path, read, self._entrance, max_body), "POST")
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

    async def _page(self, _: Request) -> Response:
        return self.metrics.page()


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

        error = self._refusal(headers)
        await (error.response() if error else self._app)(scope, receive, named)

    def _refusal(self, headers: Headers) -> ApiError | None:
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
                return ApiError(421, what, code="unknown_host")
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins and "*" not in self._origins:
            what = (
                f"pages of {origin[:100]!r} are not allowed; add the origin to LATHE_CORS_ORIGINS"
            )
            return ApiError(403, what, code="foreign_origin")
        return None


class Server(uvicorn.Server):
    """uvicorn with limits for connections.

    After SIGTERM it is no longer ready, rejects new requests, and ends when those in flight have
    been answered. After `drain_seconds`, or at a second signal, the rest of them get an error.

    Args:
        origins: allowed origins of web pages (CORS).
        host: address to listen on.
        ports: all serve the same API; 0 picks a free one.
        hosts: allowed host names; see `Web`.
        tls: PEM files of the certificate chain and of its private key; without them, plain HTTP.

    Raises:
        StageError: a port is not available.
        UserError: a file of `tls` is missing or invalid.
    """

    def __init__(
        self,
        gateway: Gateway,
        origins: Sequence[str],
        drain_seconds: float,
        host: str = "127.0.0.1",
        ports: Sequence[int] = (0,),
        hosts: Sequence[str] = (),
        tls: tuple[Path, Path] | None = None,
    ) -> None:
        self._gateway, self._drain_seconds = gateway, drain_seconds
        # Before uvicorn starts: a port in use is an error of the command line.
        self._sockets = []
        for port in ports:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
            except OSError as error:
                raise StageError(
                    f"cannot listen on {host}:{port}: {error.strerror}", Code.IN_USE
                ) from None
            self._sockets.append(listening)
        self._connections = Connections(gateway.admission.limits.connections)
        self._deadline: float | None = None
        super().__init__(
            uvicorn.Config(
                gateway.app(origins, hosts, is_this_machine(host)),
                http=partial(Connection, self._connections),  # type: ignore[arg-type]
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                ws="none",
                log_level="error",
                timeout_keep_alive=3600,  # Connections ends idle ones
                # After it uvicorn would cancel requests with a traceback; `shutdown` leaves none.
                timeout_graceful_shutdown=LAST_SECONDS + 1,
                access_log=False,
                server_header=False,
                log_config=None,
            )
        )
        if tls is not None:
            # Here, not by uvicorn's options: a wrong file is an error of the command line.
            self.config.load()
            self.config.ssl = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            try:
                self.config.ssl.load_cert_chain(*tls)
            except (OSError, ssl.SSLError) as error:
                what = f"{tls[0]}, {tls[1]}: not a certificate and its private key: {error}"
                raise UserError(
                    what, "give two PEM files, the key without a password", Code.MALFORMED
                ) from None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen and answer until SIGTERM."""
        super().run(sockets or self._sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to shut down; a second signal ends the server at once."""
        self.should_exit = self._gateway.admission.is_draining
        self._gateway.admission.is_draining = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the requests in flight, and the connections."""
        self._gateway.deadline.expire()  # those in flight now get their error or last event
        asyncio.get_running_loop().call_later(LAST_SECONDS, self._connections.abort)
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times per second."""
        self._connections.abort_reset()  # every 0.1 s: a cancelled request should free its slot
        if counter % SWEEP_TICKS == 0:
            self._connections.sweep()
        if self._gateway.admission.is_draining:
            now = time.monotonic()
            if self._deadline is None:  # the first tick since SIGTERM
                self._deadline = now + self._drain_seconds
                self._connections.drain()
            self.should_exit |= not self._gateway.admission.in_flight or now > self._deadline
        return await super().on_tick(counter)

"""The gateway as an ASGI application."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

from pydantic import Field, field_validator
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lathe_serving.gateway.calls import Call
from lathe_serving.gateway.chat import Chat, chat_constraint, render_prompt
from lathe_serving.gateway.completions import Completion
from lathe_serving.gateway.endpoint import Answer, Endpoint
from lathe_serving.gateway.errors import ApiError
from lathe_serving.gateway.generation import Json
from lathe_serving.gateway.keys import ApiKeys
from lathe_serving.gateway.kserve import KServe
from lathe_serving.gateway.limits import Admission, DrainDeadline, Limits
from lathe_serving.gateway.metrics import GatewayMetrics
from lathe_serving.gateway.models import Model, models_by_name
from lathe_serving.gateway.quarantine import CrashQuarantine
from lathe_serving.gateway.renderer import Renderer
from lathe_serving.gateway.requests import (
    ChatRequest,
    CompletionRequest,
    Conversation,
    Id,
    RequestBody,
)
from lathe_serving.gateway.responses import Responses, ResponsesRequest, own_fields
from lathe_serving.gateway.schemas import ToolSchemas
from lathe_serving.gateway.slots import Slots, SlotsForCall
from lathe_serving.gateway.tracing import Tracing
from lathe_serving.gateway.triton import Triton
from lathe_serving.gateway.web import Web

PATHS = (
    "/v1/models, /v1/completions, /v1/chat/completions, /v1/responses, /v2/models, /tokenize and "
    "/detokenize"
)


ID_BYTES = 16
"""Maximum size of a token id in JSON, including what separates it from the next."""


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
        self._models, self._url, self._admission = models, url, Admission(limits, keys)
        self._names = models_by_name(models.values())
        self.metrics, self._quarantine = GatewayMetrics(), CrashQuarantine()
        self._slots = {name: Slots(model) for name, model in models.items()}
        self.deadline, self._tracing = DrainDeadline(), tracing
        self._reports = [self.metrics.report, *([tracing.report] if tracing else [])]
        self._kserve = KServe(
            *(http, self._admission, self._reports, self._quarantine, self._slots),
            lambda *name: self.triton.cancel(*name),
            self.deadline,
        )
        self.metrics.watch(self._admission, self._slots)
        self._triton: Triton | None = None

    def app(
        self, origins: Sequence[str] = (), hosts: Sequence[str] = (), is_local: bool = True
    ) -> Starlette:
        """The application.

        Args:
            origins: allowed origins of web pages (CORS).
            hosts: see `Web`.
            is_local: whether it listens on loopback only.
        """
        parts = self._admission, self._reports, self.deadline
        completions = Endpoint("/v1/completions", self._completion, *parts)
        chat = Endpoint("/v1/chat/completions", self._chat, *parts)
        responses = Endpoint("/v1/responses", self._responses, *parts)
        tokenizing = Endpoint("/tokenize", self._tokenize, *parts)
        n_positions = max(model.n_positions for model in self._models.values())
        max_body = 1000 + ID_BYTES * n_positions
        detokenizing = Endpoint("/detokenize", self._detokenize, *parts, max_body)
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
        handlers: dict[str, tuple[Any, str]] = {
            "/v1/models": (self._list, "GET"),
            "/v1/models/{name:path}": (self._model, "GET"),
            "/v1/completions": (completions, "POST"),
            "/v1/chat/completions": (chat, "POST"),
            "/v1/responses": (responses, "POST"),
            "/tokenize": (tokenizing, "POST"),
            "/detokenize": (detokenizing, "POST"),
            "/health": (self._health, "GET"),
            "/metrics": (self._page, "GET"),
        }
        routes = [
            Route(path + end, handler, methods=[method])
            for path, (handler, method) in handlers.items()
            for end in ("", "/")
        ]
        routes += [Route(path, self._kserve) for path in ("/v2", "/v2/{path:path}")]
        app = Starlette(
            routes=routes,
            middleware=[Middleware(Web, origins, hosts, is_local), *([cors] if origins else [])],
            exception_handlers={HTTPException: _refused, ApiError: _refused},
            lifespan=self._lifespan,
        )
        app.router.redirect_slashes = False  # it would redirect to whatever host was named
        return app

    @property
    def limits(self) -> Limits:
        """Limits on requests."""
        return self._admission.limits

    @property
    def in_flight(self) -> int:
        """Number of requests in flight."""
        return self._admission.in_flight

    @property
    def is_draining(self) -> bool:
        """Whether it is shutting down: it completes requests in flight, and rejects new ones."""
        return self._admission.is_draining

    @is_draining.setter
    def is_draining(self, value: bool) -> None:
        self._admission.is_draining = value

    @property
    def triton(self) -> Triton:
        """The connection, while the application runs."""
        assert self._triton is not None
        return self._triton

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._triton = Triton(self._url, self._quarantine)
        self._renderers = {name: Renderer(model.folder) for name, model in self._models.items()}
        self._schemas = ToolSchemas()
        async with self._kserve.session():
            yield
        self._schemas.close()
        for renderer in self._renderers.values():
            renderer.close()
        await self._triton.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    async def _completion(self, body: Any, call: Call) -> Answer:
        request = CompletionRequest.model_validate(body)
        max_prompts = self._admission.limits.prompts
        if len(request.prompts) > max_prompts:
            what = f"{len(request.prompts)} prompts exceed the limit of {max_prompts}"
            raise ApiError(400, what, param="prompt")
        model = self._named(request.model, call)
        request = request.with_defaults(model.recommended)
        return Completion(request, model, self.triton, self._slots_for(model, call))

    async def _chat(self, body: Any, call: Call) -> Answer:
        request = ChatRequest.model_validate(body)
        return await self._chat_answer(request, call)

    async def _responses(self, body: Any, call: Call) -> Answer:
        request = ResponsesRequest.model_validate(body)
        with own_fields():
            return Responses(request, await self._chat_answer(request.chat(), call))

    async def _chat_answer(self, request: ChatRequest, call: Call) -> Chat:
        model = self._named(request.model, call)
        constraint = await chat_constraint(request, model, self._schemas)
        with call.span("template"):
            prompt = await render_prompt(request, model, self._renderers[model.name])
        request = request.with_defaults(model.recommended)
        slots = self._slots_for(model, call)
        return Chat(request, prompt, constraint, model, self.triton, slots)

    async def _tokenize(self, body: Any, call: Call) -> Json:
        is_chat = isinstance(body, dict) and "messages" in body
        request = (TokenizeChat if is_chat else TokenizeText).model_validate(body)
        model = self._named(request.model, call)
        renderer = self._renderers[model.name]
        if isinstance(request, TokenizeChat):
            ids = await render_prompt(request, model, renderer)
        else:
            ids = await renderer.tokenize(request.prompt, request.add_special_tokens)
        strings = await renderer.names(ids) if request.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": model.n_positions,
            "tokens": ids,
            "token_strs": strings,
        }

    async def _detokenize(self, body: Any, call: Call) -> Json:
        request = Detokenize.model_validate(body)
        renderer = self._renderers[self._named(request.model, call).name]
        return {"prompt": await renderer.detokenize(request.tokens)}

    def _slots_for(self, model: Model, call: Call) -> SlotsForCall:
        return SlotsForCall(self._slots[model.name], call)

    def _named(self, name: str, call: Call | None = None) -> Model:
        """The model with a name, which the call is then about."""
        if name in self._names:
            if call is not None:
                call.model = self._names[name].name
            return self._names[name]
        what = f"the model {name!r} does not exist; available: {', '.join(self._names)}"
        raise ApiError(404, what, param="model", code="model_not_found")

    async def _list(self, request: Request) -> Response:
        self._admission.check(request.scope)
        models = [model.to_json(name) for name, model in self._names.items()]
        return JSONResponse({"object": "list", "data": models})

    async def _model(self, request: Request) -> Response:
        self._admission.check(request.scope)
        name = request.path_params["name"].rstrip("/")
        return JSONResponse(self._named(name).to_json(name))

    async def _health(self, _: Request) -> Response:
        if self.is_draining:
            return JSONResponse({"status": "shutting down"}, 503)
        waiting = [name for name in self._models if not await self.triton.is_ready(name)]
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

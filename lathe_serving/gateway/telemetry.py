"""What logs, metrics and traces say about requests.

A `Call` goes with each request from its headers to the end of its response, and collects what
happens on the way. At its end it is logged, and reported to the metrics and, if they are
configured, to the traces.

Metrics are Prometheus's, `lathe_gateway_*`; those of the models are Triton's. Traces are sent over
OTLP where OpenTelemetry's own variables name an endpoint: each request is a span with those of its
parts: `template`, `queue`, and `prefill` and `decode` of a stream, or `generate` of a whole answer.
It continues the trace of the header `traceparent`.

Source of the spans' attributes: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from lathe_base.errors import Code, UserError
from lathe_serving.gateway.admission import ANYBODY, Admission, Slots
from lathe_serving.gateway.errors import Json
from lathe_serving.runtime.protocol import Chunk

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

log = logging.getLogger("lathe")

REQUEST_ID = "x-request-id"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Buckets of the histograms."""

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SERVICE = "lathe-gateway"

Report = Callable[["Call", int], None]
"""Called for each request at its end, with the status of its response."""


@dataclass
class Usage:
    """Token counts, added up from chunks."""

    prompt: int = 0
    cached: int = 0  # of the prompt's
    completion: int = 0

    def add(self, chunk: Chunk, is_first: bool, echo: bool) -> None:
        """Count a chunk.

        Args:
            is_first: whether its sequence is the first of its prompt.
            echo: whether the sequence includes the prompt's tokens.
        """
        self.prompt += chunk.prompt_tokens if is_first else 0
        self.cached += chunk.cached_tokens if is_first else 0
        self.completion += len(chunk.tokens) - (chunk.prompt_tokens if echo else 0)

    def to_json(self) -> Json:
        """The field `usage`."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Call:
    """One request, from its headers to the end of the response.

    Attributes:
        path: of the endpoint.
        request_id: its `x-request-id`.
        client: the address that it comes from.
        headers: its own.
        caller: who sends it, when the key is known.
        model: the name of the model, when it is known; a model that does not exist is not named.
        usage: its tokens so far.
        started: seconds of `time.monotonic`, as in `spans`.
        started_ns: nanoseconds since the epoch.
        spans: name, start and end of its parts.
        waits: seconds in which its prompts waited for a slot.
        first_token: when the first token of a stream arrived.
    """

    def __init__(self, path: str, scope: Scope) -> None:
        self.path, self.headers = path, Headers(scope=scope)
        self.request_id: str = scope["state"][REQUEST_ID]
        self.client: str = (scope.get("client") or ("",))[0]
        self.caller, self.model, self.usage = ANYBODY, "", Usage()
        self.started, self.started_ns = time.monotonic(), time.time_ns()
        self.spans: list[tuple[str, float, float]] = []
        self.waits: list[float] = []
        self.first_token: float | None = None

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record when the block runs."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.spans.append((name, started, time.monotonic()))

    def waited(self, since: float) -> None:
        """Record that a prompt has got its slot."""
        now = time.monotonic()
        self.spans.append(("queue", since, now))
        self.waits.append(now - since)

    def generated(self, since: float, first_token: float | None) -> None:
        """Record that a prompt has been answered.

        Args:
            since: when it was sent to Triton.
            first_token: when the first token came, in a stream; a whole answer comes at its end.
        """
        now = time.monotonic()
        if first_token is None:
            self.spans.append(("generate", since, now))
            return
        # Triton's own queue is short (`admission.AHEAD`), so what comes before the first token is
        # mostly the reading of the prompt.
        self.spans += [("prefill", since, first_token), ("decode", first_token, now)]
        self.first_token = min(first_token, self.first_token or first_token)

    def end(self, status: int, reports: Sequence[Report]) -> None:
        """Log the request, count its tokens, and call its reports."""
        seconds = time.monotonic() - self.started
        tokens = max(self.usage.prompt, 0), max(self.usage.completion, 0)
        self.caller.charge(sum(tokens))
        for report in reports:
            report(self, status)
        log.info(
            "%s %d in %.3f s, model %s, %d + %d tokens, key %s, client %s, request %s",
            *(self.path, status, seconds, self.model or "-", *tokens),
            *(self.caller.name or "-", self.client or "-", self.request_id),
        )


class GatewayMetrics:
    """The metrics `lathe_gateway_*`.

    Args:
        admission: whose requests in flight are exported.
        slots: by the names of the models whose waiting sequences are exported.
    """

    def __init__(self, admission: Admission, slots: Mapping[str, Slots]) -> None:
        # A registry of its own: the library's default one is global, and a test runs many gateways.
        registry = self._registry = CollectorRegistry()
        counter = partial(Counter, namespace="lathe_gateway", registry=registry)
        gauge = partial(Gauge, namespace="lathe_gateway", registry=registry)
        seconds = partial(Histogram, namespace="lathe_gateway", buckets=SECONDS, registry=registry)
        who, where = ("model", "key"), ("path", "model")
        self._requests = counter(
            "requests",
            "Requests answered; status 499 means that the client disconnected",
            ("path", "status", *who),
        )
        self._prompt = counter("prompt_tokens", "Prompt tokens", who)
        self._completion = counter("completion_tokens", "Tokens generated", who)
        self._seconds = seconds("request_seconds", "Request latency in seconds", where)
        self._queue = seconds(
            "queue_seconds", "Seconds that a prompt waited for a slot", ("model",)
        )
        self._first = seconds(
            "first_token_seconds", "Seconds from a request to the first token of its stream", where
        )
        in_flight = gauge("requests_in_flight", "Requests in flight")
        in_flight.set_function(lambda: admission.in_flight)
        waiting = gauge("waiting", "Sequences waiting for a slot", ("model",))
        wait = gauge("expected_wait_seconds", "Expected wait for a slot, in seconds", ("model",))
        for name, of_model in slots.items():
            waiting.labels(name).set_function(of_model.waiting)
            wait.labels(name).set_function(of_model.expected_wait)

    def watch_server(self, state: Path) -> None:
        """Export the number of Triton's restarts after crashes, and its start time, from a state
        file."""

        # Read when Prometheus asks; NaN, as there may be no file yet, or somebody else's.
        def restarts() -> float:
            try:
                return float(json.loads(state.read_bytes())["restarts"])
            except (OSError, ValueError, KeyError):  # it is starting, or somebody else's
                return math.nan

        def started() -> float:
            try:
                return state.stat().st_mtime
            except OSError:
                return math.nan

        gauges = {
            "restarts": ("Restarts of Triton after a crash", restarts),
            "started_seconds": ("Start time of Triton, in seconds since the epoch", started),
        }
        for name, (description, read) in gauges.items():
            gauge = Gauge(f"lathe_gateway_triton_{name}", description, registry=self._registry)
            gauge.set_function(read)

    def report(self, call: Call, status: int) -> None:
        """Count a request that has ended."""
        # Names that a client may choose freely are no labels: each would be a series of its own.
        labels = call.model, call.caller.name
        self._requests.labels(call.path, str(status), *labels).inc()
        if call.model:
            self._prompt.labels(*labels).inc(call.usage.prompt)
            self._completion.labels(*labels).inc(max(call.usage.completion, 0))
        seconds = time.monotonic() - call.started
        self._seconds.labels(call.path, call.model).observe(seconds)
        for waited in call.waits:
            self._queue.labels(call.model).observe(waited)
        if call.first_token is not None:
            first = call.first_token - call.started
            self._first.labels(call.path, call.model).observe(first)

    async def page(self, _: Request) -> Response:
        """The metrics page for Prometheus."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


def processor_from_environment() -> "SpanProcessor | None":
    """The sender of spans that OpenTelemetry's variables configure; None if they name no endpoint,
    or disable it.

    Raises:
        UserError: OpenTelemetry is not installed.
    """
    endpoints = [name for name in ENDPOINTS if os.environ.get(name)]
    if not endpoints or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise UserError(
            f"{endpoints[0]} is set, but OpenTelemetry is not installed: {error}",
            "pip install 'lathe-serving[tracing]' where the gateway runs, or unset the variable",
            Code.NOT_INSTALLED,
        ) from None
    return BatchSpanProcessor(trace_exporter.OTLPSpanExporter())


class Tracing:
    """Makes spans of requests.

    Args:
        processor: sends the spans.
    """

    def __init__(self, processor: "SpanProcessor") -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider

        name = os.environ.get("OTEL_SERVICE_NAME", SERVICE)
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("lathe_serving.gateway")

    def report(self, call: Call, status: int) -> None:
        """Send the spans of a request that has ended."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        def at(seconds: float) -> int:
            return call.started_ns + int((seconds - call.started) * 1e9)

        span = self._tracer.start_span(
            f"POST {call.path}",
            TraceContextTextMapPropagator().extract(dict(call.headers)),
            SpanKind.SERVER,
            {
                "http.request.method": "POST",
                "http.route": call.path,
                "http.response.status_code": status,
                "client.address": call.client,
                "gen_ai.request.model": call.model,
                "gen_ai.usage.input_tokens": call.usage.prompt,
                "gen_ai.usage.output_tokens": max(call.usage.completion, 0),
                "lathe.key": call.caller.name,
                "lathe.request_id": call.request_id,
            },
            start_time=call.started_ns,
        )
        within = set_span_in_context(span)
        for name, start, end in call.spans:
            self._tracer.start_span(name, within, start_time=at(start)).end(at(end))
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end()

    def close(self) -> None:
        """Send what has not been sent yet."""
        self._provider.shutdown()

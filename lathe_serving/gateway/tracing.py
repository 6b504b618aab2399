"""Traces of requests, sent over OTLP where OpenTelemetry's own variables name an endpoint.

Each request is a span with those of its parts: `template`, `queue`, and `prefill` and `decode` of a
stream, or `generate` of a whole answer. It continues the trace of the header `traceparent`.

Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

import os
from typing import TYPE_CHECKING

from lathe_base.errors import UserError
from lathe_serving.gateway.calls import Call

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SERVICE = "lathe-gateway"


def processor_from_environment() -> "SpanProcessor | None":
    """The sender of spans that OpenTelemetry's variables configure; None if they name no endpoint,
    or disable it.

    Raises:
        UserError: OpenTelemetry is not installed.
    """
    named = [name for name in ENDPOINTS if os.environ.get(name)]
    if not named or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise UserError(
            f"{named[0]} is set, but OpenTelemetry is not installed: {error}",
            "pip install 'lathe-serving[tracing]' where the gateway runs, or unset the variable",
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

"""Spans of requests: with OpenTelemetry's SDK in this process, and over OTLP."""

import importlib.util
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lathe_base.errors import Code
from lathe_serving.gateway.telemetry import ENDPOINTS, Tracing, processor_from_environment
from lathe_serving.server import TritonServer
from tests.support.errors import raises
from tests.support.gateways import opened, with_chat_template

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
THREE = {"model": "gpt", "max_tokens": 3, "ignore_eos": True}
CHAT = THREE | {"messages": [{"role": "user", "content": "x"}]}
TEXT = THREE | {"prompt": "x"}
KSERVE = {"text_input": "x", "max_tokens": 3, "min_tokens": 3}

IS_INSTALLED = importlib.util.find_spec("opentelemetry.exporter") is not None


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENDPOINTS, "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced(
    server: TritonServer, spans: InMemorySpanExporter, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    tracing = Tracing(SimpleSpanProcessor(spans))
    template = with_chat_template(server, TEMPLATE, tmp_path_factory.mktemp("chat"))
    with opened(server, tracing=tracing, **template) as address:
        yield address


STREAMED, WHOLE = ["queue", "prefill", "decode"], ["queue", "generate"]


@pytest.mark.parametrize(
    ("path", "body", "parts"),
    [
        ("/v1/chat/completions", CHAT | {"stream": True}, ["template", *STREAMED]),
        ("/v1/chat/completions", CHAT, ["template", *WHOLE]),
        ("/v1/completions", TEXT | {"stream": True}, STREAMED),
        ("/v1/completions", TEXT | {"prompt": ["x", "y"]}, sorted([*WHOLE, *WHOLE])),
        ("/v2/models/gpt/generate_stream", KSERVE | {"stream": True}, STREAMED),
        ("/v2/models/gpt/generate", KSERVE, WHOLE),
        ("/tokenize", {"model": "gpt", "prompt": "x"}, []),
        ("/v1/completions", {"prompt": 5}, []),
    ],
)
def test_a_request_is_a_span_of_the_callers_trace_with_its_parts(
    traced: str, spans: InMemorySpanExporter, path: str, body: dict[str, Any], parts: list[str]
) -> None:
    spans.clear()
    reply = requests.post(traced + path, json=body, headers=HEADERS, timeout=30)
    *children, request = wait(spans, len(parts) + 1)
    assert f"{request.context.trace_id:032x}" == TRACE  # type: ignore[union-attr]
    assert f"{request.parent.span_id:016x}" == PARENT  # type: ignore[union-attr]
    assert request.attributes is not None
    assert request.attributes["http.response.status_code"] == reply.status_code
    assert request.attributes["lathe.request_id"] == "mine"
    children.sort(key=lambda span: (span.start_time, span.end_time))
    names = [span.name for span in children]
    assert (names if len(set(names)) == len(names) else sorted(names)) == parts
    for span in children:
        assert span.parent is not None and span.parent.span_id == request.context.span_id  # type: ignore[union-attr]
        assert request.start_time <= span.start_time <= span.end_time <= request.end_time  # type: ignore[operator]
    if "queue" in parts:
        assert request.attributes["gen_ai.request.model"] == "gpt"
        tokens = request.attributes["gen_ai.usage.output_tokens"]
        assert tokens == 3 * parts.count("queue")


def wait(spans: InMemorySpanExporter, count: int) -> Sequence[ReadableSpan]:
    """The spans; a request's are made after its response has been sent."""
    for _ in range(1000):
        if len(found := spans.get_finished_spans()) >= count:
            return found
        time.sleep(0.01)
    raise AssertionError(found)


def test_it_is_off_unless_an_endpoint_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processor_from_environment() is None
    monkeypatch.setenv(ENDPOINTS[1], "http://127.0.0.1:4318")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert processor_from_environment() is None


@pytest.mark.skipif(IS_INSTALLED, reason="OpenTelemetry's exporter is installed")
def test_without_the_exporter_an_endpoint_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINTS[1], "http://127.0.0.1:4318")
    with raises(Code.NOT_INSTALLED, "pip install 'lathe-serving[tracing]'", ENDPOINTS[1]):
        processor_from_environment()


@pytest.mark.skipif(not IS_INSTALLED, reason="needs opentelemetry-exporter-otlp-proto-http")
def test_spans_arrive_over_otlp(
    server: TritonServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    received: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Collector) as collector, ThreadPoolExecutor(1) as pool:
        pool.submit(collector.serve_forever)
        monkeypatch.setenv(ENDPOINTS[1], f"http://127.0.0.1:{collector.server_port}")
        processor = processor_from_environment()
        assert processor is not None
        with opened(server, tracing=Tracing(processor)) as address:
            requests.post(f"{address}/v1/completions", json=TEXT, headers=HEADERS, timeout=30)
        collector.shutdown()
    messages = [ExportTraceServiceRequest.FromString(content) for content in received]
    (resource,) = (spans for message in messages for spans in message.resource_spans)
    names = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    assert names.keys() == {"POST /v1/completions", "queue", "generate"}
    assert all(span.trace_id.hex() == TRACE for span in names.values())
    assert "lathe-gateway" in str(resource.resource)

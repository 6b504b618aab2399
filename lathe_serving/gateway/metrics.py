"""The gateway's own Prometheus metrics; those of the models are Triton's."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from starlette.responses import Response

from lathe_serving.gateway.calls import Call
from lathe_serving.gateway.limits import Admission
from lathe_serving.gateway.slots import Slots

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class GatewayMetrics:
    """The metrics `lathe_gateway_*`."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter(
            "requests",
            "Requests answered; status 499 means that the client disconnected",
            *("path", "status", "model", "key"),
        )
        self._prompt = self._counter("prompt_tokens", "Prompt tokens", "model", "key")
        self._completion = self._counter("completion_tokens", "Tokens generated", "model", "key")
        self._seconds = self._histogram(
            "request_seconds", "Request latency in seconds", "path", "model"
        )
        self._queue = self._histogram(
            "queue_seconds", "Seconds that a prompt waited for a slot", "model"
        )
        self._first = self._histogram(
            "first_token_seconds",
            "Seconds from a request to the first token of its stream",
            *("path", "model"),
        )
        self._in_flight = Gauge(
            "lathe_gateway_requests_in_flight",
            "Requests in flight",
            registry=self._registry,
        )
        self._waiting = Gauge(
            "lathe_gateway_waiting",
            "Sequences waiting for a slot",
            ("model",),
            registry=self._registry,
        )
        self._wait = Gauge(
            "lathe_gateway_expected_wait_seconds",
            "Expected wait for a slot, in seconds",
            ("model",),
            registry=self._registry,
        )

    def watch(self, admission: Admission, slots: Mapping[str, Slots]) -> None:
        """Export the requests in flight, and the waiting sequences of each model."""
        self._in_flight.set_function(lambda: admission.in_flight)
        for name, of_model in slots.items():
            self._waiting.labels(name).set_function(of_model.waiting)
            self._wait.labels(name).set_function(of_model.expected_wait)

    def watch_server(self, state: Path) -> None:
        """Export the number of Triton's restarts after crashes, and its start time, from a state
        file."""

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

        told = {
            "restarts": ("Restarts of Triton after a crash", restarts),
            "started_seconds": ("Start time of Triton, in seconds since the epoch", started),
        }
        for name, (description, read) in told.items():
            gauge = Gauge(f"lathe_gateway_triton_{name}", description, registry=self._registry)
            gauge.set_function(read)

    def report(self, call: Call, status: int) -> None:
        """Count a request that has ended."""
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

    def page(self) -> Response:
        """The metrics page for Prometheus."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    def _counter(self, name: str, description: str, *labels: str) -> Counter:
        return Counter(f"lathe_gateway_{name}", description, labels, registry=self._registry)

    def _histogram(self, name: str, description: str, *labels: str) -> Histogram:
        return Histogram(
            f"lathe_gateway_{name}", description, labels, buckets=SECONDS, registry=self._registry
        )

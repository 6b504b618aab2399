"""Malformed requests, which a server must reject without being affected."""

from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2, service_pb2_grpc  # type: ignore[import-untyped]

from lathe_base.errors import StageError
from lathe_serving.client.grpc_messages import CHANNEL_OPTIONS, request
from lathe_serving.state import LOOPBACK, ServerState

TIMEOUT_SECONDS = 60.0
NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
ENDLESS = "The turner counts the strokes. " * 20_000  # more tokens than any context has

BODIES = {
    "truncated JSON": b'{"text_input": "On',
    "JSON that is not an object": b'["text_input"]',
    "text_input missing": b'{"max_tokens": 4}',
    "text_input a number": b'{"text_input": 5, "max_tokens": 4}',
    "max_tokens a text": b'{"text_input": "On", "max_tokens": "four"}',
}


def refusals(state: ServerState) -> Iterator[str]:
    """Send them one by one; yields a description of each after its rejection.

    Raises:
        StageError: one was accepted, or the server did not respond.
    """
    for what, message in _messages(state.model_name).items():
        yield _require_refused(f"gRPC, {what}", _grpc_error(state, message))
    for what, body in BODIES.items():
        yield _require_refused(f"HTTP, {what}", _http_error(state, body))


def _messages(model_name: str) -> dict[str, Any]:
    def asking(prompt: str = "On", **parameters: int) -> Any:
        return request(model_name, prompt, {"max_tokens": 4, **parameters})

    wrong_type = service_pb2.ModelInferRequest(
        model_name=model_name,
        inputs=[
            {
                "name": "text_input",
                "datatype": "INT64",
                "shape": [1],
                "contents": {"int64_contents": [5]},
            }
        ],
    )
    return {
        "text_input of type INT64": wrong_type,
        "text_input missing": service_pb2.ModelInferRequest(model_name=model_name),
        "a prompt longer than the context": asking(ENDLESS),
        "max_tokens negative": asking(max_tokens=-1),
        "max_tokens beyond the context": asking(max_tokens=2**40),
        "num_return_sequences huge": asking(num_return_sequences=2**40),
    }


def _require_refused(what: str, error: str | None) -> str:
    if not error:
        raise StageError(f"the server answers a malformed request: {what}")
    return what


def _grpc_error(state: ServerState, message: Any) -> str | None:
    with grpc.insecure_channel(state.grpc, CHANNEL_OPTIONS) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            responses = stub.ModelStreamInfer(iter([message]), timeout=TIMEOUT_SECONDS)
            return next((str(r.error_message) for r in responses if r.error_message), None)
        except grpc.RpcError as error:
            if error.code() in NO_ANSWER:
                raise StageError(f"no answer to a malformed request: {error.details()}") from error
            return str(error.details())


def _http_error(state: ServerState, body: bytes) -> str | None:
    url = f"http://{state.http}/v2/models/{state.model_name}/generate"
    asked = Request(url, body, {"Content-Type": "application/json"})
    try:
        with LOOPBACK.open(asked, timeout=TIMEOUT_SECONDS):
            return None
    except HTTPError as error:
        return f"{error.code} {error.read().decode(errors='replace')}"
    except OSError as error:
        raise StageError(f"no answer to a malformed request: {error}") from error

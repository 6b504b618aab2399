"""The acceptance test of a release: the published bytes, served by a temporary Triton."""

import logging
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2, service_pb2_grpc  # type: ignore[import-untyped]

from lathe.release.golden import Golden
from lathe.release.release import Releases
from lathe_base.config.settings import ProductionSettings, Recipe
from lathe_base.errors import Code, StageError
from lathe_base.provenance.chain import require
from lathe_base.provenance.keys import trusted_keys
from lathe_serving.client import Client
from lathe_serving.client.grpc_transport import CHANNEL_OPTIONS, request
from lathe_serving.client.load import Load, Objective, Summary, run_load, summarize
from lathe_serving.server import ANY_PORTS, start
from lathe_serving.state import LOOPBACK, ServerState

log = logging.getLogger("lathe")

TIMEOUT_SECONDS = 60.0
NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
ENDLESS = "The turner counts the strokes. " * 20_000  # more tokens than any context has

MALFORMED_BODIES = {
    "truncated JSON": b'{"text_input": "On',
    "JSON that is not an object": b'["text_input"]',
    "text_input missing": b'{"max_tokens": 4}',
    "text_input a number": b'{"text_input": 5, "max_tokens": 4}',
    "max_tokens a text": b'{"text_input": "On", "max_tokens": "four"}',
}


def provenance_checks(settings: ProductionSettings) -> list[str]:
    """The checks in `Production.require` that concern attestations and signatures."""
    return [name for name in settings.require if name != "audit"]


@dataclass(frozen=True)
class Acceptance:
    """Figures of a release that has passed.

    Attributes:
        identical: number of prompts whose whole continuation equals the golden one.
        refused: number of malformed requests that were refused.
        first_token_ms, between_tokens_ms: 99th percentiles under the burst.
    """

    prompts: int
    identical: int
    refused: int
    requests: int
    tokens_per_second: float
    first_token_ms: float
    between_tokens_ms: float


def accept(releases: Releases, release: str, recipe: Recipe) -> Acceptance:
    """Fetch a release and serve it; it must reproduce its golden prompts, stay within the latency
    limits of `recipe.Production` under load, and reject malformed requests. The fetched bytes must
    first meet `Production.require`.

    Raises:
        UserError: the store does not answer, or Triton is not installed.
        StageError: the release fails a test; the message says which.
    """
    golden = releases.golden(release)
    with tempfile.TemporaryDirectory(prefix="lathe-release-") as scratch:
        repository = releases.fetch(release, Path(scratch) / "repository")
        settings = recipe.Production
        require(repository, provenance_checks(settings), trusted_keys(settings.keys))
        serving = recipe.Serving.model_copy(update=ANY_PORTS)
        with (
            start(repository, serving, Path(scratch) / "server") as server,
            Client(server.state.grpc, serving.model_name) as client,
        ):
            identical = golden.replay(client)
            burst = _burst(client, golden, recipe.Production)
            refused = list(refusals(server.state))
            log.info("refused: %s", "; ".join(refused))
            golden.replay(client)  # the server still answers correctly
    return Acceptance(
        prompts=len(golden.prompts),
        identical=identical,
        refused=len(refused),
        requests=burst.requests,
        tokens_per_second=burst.tokens_per_second,
        first_token_ms=1e3 * burst.first_token["p99"],
        between_tokens_ms=1e3 * burst.between_tokens.get("p99", 0.0),
    )


def _burst(client: Client, golden: Golden, settings: ProductionSettings) -> Summary:
    load = Load(
        prompts=[prompt.prompt for prompt in golden.prompts],
        lengths=[golden.max_tokens],
        requests=sys.maxsize,
        clients=settings.burst_clients,
        seconds=settings.burst_seconds,
    )
    requests = run_load(client, load)
    if failed := [request.error for request in requests if not request.answered]:
        raise StageError(
            f"under load {len(failed)} of {len(requests)} requests failed, the first: {failed[0]}",
            Code.GATE,
        )
    summary = summarize(requests, Objective(math.inf, math.inf))
    for what, seconds, limit in (
        ("the first token", summary.first_token, settings.p99_first_token_ms),
        ("the next token", summary.between_tokens, settings.p99_between_tokens_ms),
    ):
        p99 = 1e3 * seconds.get("p99", 0.0)
        log.info(
            "burst of %d requests: p99 of the time to %s %.1f ms (limit %g ms)",
            *(summary.requests, what, p99, limit),
        )
        if p99 > limit:
            raise StageError(
                f"too slow under load: with {settings.burst_clients} clients, the 99th percentile "
                f"of the time to {what} is {p99:.1f} ms, above the limit of {limit:g} ms",
                Code.GATE,
            )
    return summary


def refusals(state: ServerState) -> Iterator[str]:
    """Send malformed requests, which a server must reject without being affected, one by one;
    yields a description of each after its rejection.

    Raises:
        StageError: one was accepted, or the server did not respond.
    """
    for what, message in _messages(state.model_name).items():
        yield _require_refused(f"gRPC, {what}", _grpc_error(state, message))
    for what, body in MALFORMED_BODIES.items():
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
        raise StageError(f"the server answers a malformed request: {what}", Code.GATE)
    return what


def _grpc_error(state: ServerState, message: Any) -> str | None:
    with grpc.insecure_channel(state.grpc, CHANNEL_OPTIONS) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            responses = stub.ModelStreamInfer(iter([message]), timeout=TIMEOUT_SECONDS)
            return next((str(r.error_message) for r in responses if r.error_message), None)
        except grpc.RpcError as error:
            if error.code() in NO_ANSWER:
                raise StageError(
                    f"no answer to a malformed request: {error.details()}", Code.GATE
                ) from error
            return str(error.details())


def _http_error(state: ServerState, body: bytes) -> str | None:
    url = f"http://{state.http}/v2/models/{state.model_name}/generate"
    http_request = Request(url, body, {"Content-Type": "application/json"})
    try:
        with LOOPBACK.open(http_request, timeout=TIMEOUT_SECONDS):
            return None
    except HTTPError as error:
        return f"{error.code} {error.read().decode(errors='replace')}"
    except OSError as error:
        raise StageError(f"no answer to a malformed request: {error}", Code.GATE) from error

"""Queries a live server over every transport: gRPC, HTTP, streamed or not, concurrently."""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.request import Request

from lathe_serving.client import Client
from lathe_serving.client.transport import Parameter
from lathe_serving.state import LOOPBACK, ServerState

HTTP_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class RehearsedAnswer:
    """One generation as seen by a client; seconds since the request was sent."""

    text: str
    tokens: list[int]
    first_token_seconds: float
    seconds: float


def greedy(max_tokens: int) -> dict[str, Parameter]:
    """Parameters of a reproducible continuation."""
    return {
        "decode_strategy": "greedy_search",
        "max_tokens": max_tokens,
        "min_tokens": 0,
        "repetition_penalty": 1.0,
    }


def ask(client: Client, prompt: str, **parameters: Parameter) -> RehearsedAnswer:
    """One streamed generation over gRPC."""
    started = time.perf_counter()
    first = 0.0
    text, tokens = "", []
    for chunk in client.stream(prompt, **parameters):
        first = first or time.perf_counter() - started
        text += chunk.text
        tokens += chunk.tokens
    return RehearsedAnswer(text, tokens, first, time.perf_counter() - started)


def ask_together(
    client: Client, prompts: Sequence[str], n_clients: int, **parameters: Parameter
) -> list[RehearsedAnswer]:
    """Ask every prompt once, `n_clients` at a time; answers in the order of the prompts."""
    with ThreadPoolExecutor(n_clients) as pool:
        return list(pool.map(lambda prompt: ask(client, prompt, **parameters), prompts))


def ask_http(state: ServerState, prompt: str, stream: bool, **parameters: Parameter) -> list[int]:
    """The tokens over HTTP: Triton's `generate`, or `generate_stream` (server-sent events)."""
    verb = "generate_stream" if stream else "generate"
    body = {"text_input": prompt, "stream": stream, **parameters}
    request = Request(
        f"http://{state.http}/v2/models/{state.model_name}/{verb}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    # Never through a proxy of the environment: the server is on this machine.
    with LOOPBACK.open(request, timeout=HTTP_TIMEOUT_SECONDS) as reply:
        lines = [line for line in reply.read().decode().split("\n") if line]
    answers = [json.loads(line.removeprefix("data: ")) for line in lines]
    parts = [answer["tokens"] for answer in answers]
    # Triton's JSON writes a tensor of one element as that element.
    return [token for part in parts for token in (part if isinstance(part, list) else [part])]

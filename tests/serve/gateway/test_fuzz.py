"""Triton and its models survive thousands of hostile requests to both APIs."""

import copy
import json
import random
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests

from lathe_base.config.settings import ServingSettings
from lathe_serving.server import start
from lathe_serving.state import ServerState
from tests.serve.gateway.test_kserve import SCORE
from tests.support.connection import connected
from tests.support.processes import processes

GENERATE = {"text_input": "hello", "max_tokens": 4, "temperature": 0.5, "stop": "a", "seed": 3}
IDS = {"input_ids": [1, 2, 3], "max_tokens": 3, "logprobs": True, "stream": True}
COMPLETION = {"model": "gpt", "prompt": ["a", "b"], "max_tokens": 4, "n": 2, "stop": ["x"]}
TARGETS: tuple[tuple[str, Any], ...] = (
    ("/v2/models/gpt/generate", GENERATE),
    ("/v2/models/gpt/generate", IDS),
    ("/v2/models/gpt/generate_stream", IDS),
    ("/v2/models/gpt-score/infer", SCORE),
    ("/v2/models/gpt-score/generate", {"text_input": "hello", "continuation": "you"}),
    ("/v1/completions", COMPLETION),
    ("/v1/completions", COMPLETION | {"stream": True, "logprobs": 2}),
    ("/v2/repository/index", {"ready": True}),
    ("/v2/systemsharedmemory/region/x/register", {"key": "/x", "offset": 0, "byte_size": 64}),
)
SCALARS = (
    *(None, True, False, 0, -1, 1.5, 1e308, -0.0, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64),
    *("", "a", "\0", "😀", "é" * 1000, "a" * 20_000, "../..", "shared_memory_region", "\\", '"'),
)  # fmt: skip
HEADERS = (
    *("Inference-Header-Content-Length: 5", "Inference-Header-Content-Length: 99999999"),
    *("Content-Encoding: gzip", "Content-Encoding: deflate", "Accept-Encoding: gzip, deflate"),
    *("Transfer-Encoding: chunked", "Content-Length: 7", "Content-Type: text/plain", "X: \xff\xfe"),
    *("Expect: 100-continue", "Connection: close", "triton-admin: x", "Upgrade: h2c", "Host: evil"),
    *("traceparent: 00-" + "a" * 32 + "-" + "b" * 16 + "-01", "X" * 5000 + ": y"),
)  # fmt: skip
VERSIONS = ("HTTP/1.1",) * 20 + ("HTTP/1.0", "HTTP/2.0", "HTTP/9", "")
NUMBER = 5000
PATIENCE = 0.5  # seconds before the connection is closed, which cancels the request
METHODS = ("POST",) * 20 + ("GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE")


def nested(rng: random.Random) -> Any:
    value = rng.choice(SCALARS)
    for _ in range(rng.choice((1, 5, 50, 150))):
        value = [value] if rng.random() < 0.5 else {"shape": value}
    return value


def mutated(rng: random.Random, body: Any) -> Any:
    """Change a few places of a body, at any depth."""
    body = copy.deepcopy(body)
    for _ in range(rng.randrange(4)):
        places: list[tuple[Any, Any]] = []
        waiting = [body]
        while waiting:
            part = waiting.pop()
            keys = list(part) if isinstance(part, dict) else range(len(part))
            places += [(part, key) for key in keys]
            waiting += [part[key] for key in keys if isinstance(part[key], dict | list)]
        if not places or len(places) > 300:  # three thousand times a larger one fills the memory
            return body
        part, key = rng.choice(places)
        match rng.randrange(5):
            case 0:
                part[key] = rng.choice(SCALARS)
            case 1:
                part[key] = nested(rng)
            case 2:
                part[key] = [part[key]] * rng.choice((0, 2, 100, 3000))
            case 3:
                del part[key]
            case _:
                name = rng.choice(("shape", "parameters", "id", "data", "binary_data_size", "zz"))
                if isinstance(part, dict):
                    part[name] = rng.choice(SCALARS)
    return body


def message(rng: random.Random) -> bytes:
    """Make a request in which any part may be invalid."""
    path, target = rng.choice(TARGETS)
    body = json.dumps(mutated(rng, target)).encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        cut = rng.randrange(len(body) + 1)
        body = body[:cut] + rng.randbytes(rng.randrange(20)) + body[cut:]
    if rng.random() < 0.05:
        path += rng.choice(("/", "/x", "?a=b", "%00", "/../..", "%2e", "/versions/1/infer", " "))
    given = rng.sample(HEADERS, rng.choice((0, 0, 0, 1, 2)))
    if "Transfer-Encoding: chunked" in given:
        size = rng.choice((1, 7, 1000))
        parts = [body[i : i + size] for i in range(0, len(body), size)]
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    elif rng.random() < 0.98:
        given.append(f"Content-Length: {len(body)}")
    kind = "" if rng.random() < 0.1 else "Content-Type: application/json\r\n"
    lines = "".join(f"{line}\r\n" for line in given)
    start = f"{rng.choice(METHODS)} {path} {rng.choice(VERSIONS)}\r\nHost: localhost\r\n"
    data = f"{start}{kind}{lines}\r\n".encode("latin-1") + body
    return data if rng.random() < 0.97 else rng.randbytes(rng.randrange(1, 3000))


def send(address: str, seed: int) -> str:
    """Send a random request and return its status, or disconnect before the response."""
    rng = random.Random(seed)
    data = message(rng)
    with suppress(OSError), connected(address) as connection:
        connection.settimeout(PATIENCE)
        connection.sendall(data[: rng.randrange(len(data))] if rng.random() < 0.05 else data)
        if rng.random() < 0.2:
            return "left"
        try:
            found = connection.recv(1 << 16)
        except TimeoutError:  # the server waits for the rest of an incomplete request
            connection.settimeout(20)
            connection.shutdown(socket.SHUT_WR)
            found = connection.recv(1 << 16)
        return found[9:12].decode("latin-1") if found.startswith(b"HTTP/1.1 ") else "closed"
    return "broken off"


def backends(state: ServerState) -> set[int]:
    """Pids of the server and of its models."""
    found = processes(state.shared_memory).items()
    return {pid for pid, line in found if "lathe_serving.guard" not in line}


@pytest.mark.slow
def test_triton_and_its_models_outlive_thousands_of_hostile_requests(
    triton: None, repository: Path, serving: ServingSettings, tmp_path: Path
) -> None:
    first = random.SystemRandom().randrange(10**9)  # failures report their seeds
    with start(repository, serving, tmp_path, with_gateway=True) as server:
        address = f"http://{server.state.http}"
        before, found = backends(server.state), Counter[str]()
        with ThreadPoolExecutor(8) as pool:
            for begin in range(first, first + NUMBER, 500):
                seeds = range(begin, begin + 500)
                found += Counter(pool.map(lambda seed: send(address, seed), seeds))
                assert backends(server.state) == before, f"died in {begin} to {begin + 499}"
        for path, body in (TARGETS[0], TARGETS[3], TARGETS[5]):
            assert requests.post(f"{address}{path}", json=body, timeout=60).status_code == 200
    assert found["200"] and found["400"] and found["404"], found

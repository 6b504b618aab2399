"""Requests never get each other's text: random concurrent requests must get the same response as
when sent alone."""

import itertools
import random
import string
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import requests

from lathe_serving.client import Client
from lathe_serving.server import TritonServer
from tests.support.gateways import opened
from tests.support.openai_requests import OpenAIRequest, ask

SYSTEM = "All of these begin with the same words, which are read once at most. " * 3
N_WORKERS = 10


def random_requests(rng: random.Random) -> list[OpenAIRequest]:
    """Requests of all kinds; each has a unique word, and many share a prefix."""
    found = []
    for i in range(24):
        canary = "".join(rng.choices(string.ascii_letters, k=12))
        prompt = rng.choice(["", SYSTEM, SYSTEM[: rng.randrange(len(SYSTEM))]]) + f"{i} {canary}"
        shapes: list[dict[str, Any]] = [
            {"prompt": prompt, "temperature": 0},
            {"prompt": prompt, "temperature": 0, "logprobs": 3},
            {"prompt": prompt, "seed": i, "n": rng.randrange(1, 5)},
            {"prompt": prompt, "seed": i, "best_of": 3, "temperature": 1.5},
            {"prompt": [prompt, canary, SYSTEM + canary], "temperature": 0, "n": 2},
            {"prompt": prompt, "temperature": 0, "stop": [canary[0], " "]},
            {"prompt": prompt, "temperature": 0, "echo": True, "logprobs": 1},
            {"prompt": list(prompt.encode()), "temperature": 0, "frequency_penalty": 1.0},
        ]
        found.append(OpenAIRequest(shapes[i % len(shapes)] | {"max_tokens": rng.randrange(4, 50)}))
    return found


def leave(address: str, asked: OpenAIRequest, rng: random.Random) -> None:
    """Start a stream and disconnect at a random point."""
    body = asked.body | {"stream": True, "max_tokens": 200, "n": 1, "ignore_eos": True}
    body.pop("best_of", None)
    url = f"{address}/v1/completions"
    with closing(requests.post(url, json=body, stream=True, timeout=60)) as reply:
        for _ in itertools.islice(reply.iter_lines(), rng.randrange(12)):
            pass


def beams(client: Client, prompt: str) -> list[list[int]]:
    options = {"decode_strategy": "beam_search", "num_beams": 3, "num_return_sequences": 2}
    found = client.generate_all(prompt, max_tokens=20, **options)  # type: ignore[arg-type]
    return [chunk.tokens for chunk in found]


def run(server: TritonServer, address: str, seconds: float, seed: int) -> Counter[str]:
    """Send random requests from many threads; fails at the first response that differs."""
    asked = random_requests(random.Random(seed))
    alone = {one: ask(address, one) for one in asked}
    done: Counter[str] = Counter()
    failed = threading.Event()
    end = time.monotonic() + seconds
    with Client(server.state.grpc, "gpt", timeout_seconds=60) as client:
        beams_alone = beams(client, "beams " + SYSTEM)

        def again(rng: random.Random) -> None:
            one, stream = rng.choice(asked), rng.random() < 0.5
            found = ask(address, one, stream)
            assert found == alone[one], (one, stream)

        def leaving(rng: random.Random) -> None:
            leave(address, rng.choice(asked), rng)

        def with_beams(_: random.Random) -> None:
            assert beams(client, "beams " + SYSTEM) == beams_alone

        def work(number: int) -> None:
            rng = random.Random(f"{seed} {number}")
            kinds: list[Callable[[random.Random], None]] = (
                [again] * 7 + [leaving] * 2 + [with_beams]
            )
            while time.monotonic() < end and not failed.is_set():
                kind = rng.choice(kinds)
                try:
                    kind(rng)
                except BaseException:
                    failed.set()
                    raise
                done[kind.__name__] += 1

        with ThreadPoolExecutor(N_WORKERS) as pool:
            for future in [pool.submit(work, number) for number in range(N_WORKERS)]:
                future.result()
    return done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "seed"),
    [
        (2.5, 1),
        pytest.param(30.0, 2, marks=pytest.mark.slow),
        pytest.param(240.0, 2, marks=pytest.mark.long),
    ],
)
def test_each_answer_is_as_it_is_alone(server: TritonServer, seconds: float, seed: int) -> None:
    with opened(server, max_wait=60) as address:
        done = run(server, address, seconds, seed)
    print(dict(done))
    assert min(done[kind] for kind in ("again", "leaving", "with_beams")) > 2

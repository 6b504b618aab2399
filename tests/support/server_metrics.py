"""What a server's metrics say of its requests."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import requests

from lathe.serve.server import TritonServer

TOKENS = "lathe_generated_tokens_total"


def figures(server: TritonServer) -> dict[str, float]:
    page = requests.get(f"http://127.0.0.1:{server.state.metrics_port}/metrics", timeout=30)
    lines = [line for line in page.text.splitlines() if line.startswith("lathe_")]
    assert all('model="gpt"' in line for line in lines)
    return {line.split("{")[0]: float(line.split()[-1]) for line in lines}


@contextmanager
def cut_short(server: TritonServer, tokens: int) -> Iterator[None]:
    """What is asked here ends before it has made so many tokens: a client that leaves frees its
    slot. The last request has to be one that is answered."""
    before = figures(server).get(TOKENS, 0.0)
    yield
    deadline, found = time.monotonic() + 60, figures(server)
    while found[TOKENS] == before or found["lathe_running"] or found["lathe_waiting"]:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
        found = figures(server)
    assert found[TOKENS] - before < tokens

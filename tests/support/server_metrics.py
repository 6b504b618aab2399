"""Checks of a server's request metrics."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import requests

from lathe_serving.server import TritonServer

TOKENS = "lathe_generated_tokens_total"


def figures(server: TritonServer) -> dict[str, float]:
    page = requests.get(f"http://127.0.0.1:{server.state.metrics_port}/metrics", timeout=30)
    lines = [line for line in page.text.splitlines() if line.startswith("lathe_")]
    assert all('model="gpt"' in line for line in lines)
    return {line.split("{")[0]: float(line.split()[-1]) for line in lines}


@contextmanager
def expect_cancelled(server: TritonServer, tokens: int) -> Iterator[None]:
    """Check that requests in the block are cancelled before they generate `tokens` tokens in total.

    A disconnected client must free its slot. The last request in the block must generate a token.
    """
    before = figures(server).get(TOKENS, 0.0)
    yield
    deadline, found = time.monotonic() + 60, figures(server)
    while found[TOKENS] == before or found["lathe_running"] or found["lathe_waiting"]:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
        found = figures(server)
    assert found[TOKENS] - before < tokens

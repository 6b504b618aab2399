"""Replacing gateways while streams run loses no tokens."""

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from lathe_base.config.settings import ServingSettings
from lathe_serving import wait_closed
from lathe_serving.server import TritonServer, start
from tests.support.balancer import Balancer
from tests.support.openai_requests import Answer, OpenAIRequest, RefusedError, ask

ASKED = OpenAIRequest(
    {"prompt": "a stream", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
)


@pytest.fixture
def balancer() -> Iterator[Balancer]:
    found = Balancer()
    yield found
    found.close()


class Streaming(threading.Thread):
    """A client that requests one stream after another."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._address, self._is_over = address, threading.Event()
        self.answers: list[Answer] = []
        self.failures: Counter[str] = Counter()

    def run(self) -> None:
        while not self._is_over.is_set():
            try:
                self.answers.append(ask(self._address, ASKED, stream=True))
            except Exception as error:
                self.failures[repr(error)] += 1

    def end(self) -> None:
        self._is_over.set()
        self.join()


@pytest.mark.slow
def test_a_rolling_update_loses_no_token(
    triton: None, repository: Path, serving: ServingSettings, tmp_path: Path, balancer: Balancer
) -> None:
    def up(number: int) -> TritonServer:
        server = start(repository, serving, tmp_path / f"{number}", with_gateway=True)
        assert server.state.gateway_port is not None
        balancer.add(server.state.gateway_port)
        while server.state.gateway_port not in balancer.ready:
            time.sleep(0.01)
        return server

    current = up(0)
    expected = ask(f"{current.state.openai}".removesuffix("/v1"), ASKED)
    clients = [Streaming(balancer.address) for _ in range(4)]
    for client in clients:
        client.start()
    for number in (1, 2):
        following = up(number)
        current.stop()
        current = following
        time.sleep(1)
    for client in clients:
        client.end()
    current.stop()
    answers = [answer for client in clients for answer in client.answers]
    assert sum((client.failures for client in clients), Counter[str]()) == Counter()
    assert len(answers) > 20 and all(answer == expected for answer in answers)


@pytest.mark.slow
def test_started_requests_are_answered_and_others_rejected(
    triton: None, lasting: Path, serving: ServingSettings, tmp_path: Path
) -> None:
    server = start(lasting, serving, tmp_path, with_gateway=True)
    address = f"{server.state.openai}".removesuffix("/v1")
    expected = ask(address, ASKED)
    body: dict[str, Any] = ASKED.body | {"max_tokens": 3000, "stream": True}
    with ThreadPoolExecutor(1) as pool:
        url = f"{address}/v1/completions"
        with requests.post(url, json=body, stream=True, timeout=60) as reply:
            lines = filter(None, reply.iter_lines())
            found = [next(lines)]
            ending = pool.submit(server.stop)
            health = f"{address}/health"
            while requests.get(health, timeout=30).status_code == 200:
                pass
            with pytest.raises(RefusedError, match="503 shutting_down"):
                ask(address, ASKED)
            refused = requests.post(url, json=ASKED.body, timeout=30)
            assert refused.headers["Connection"] == "close" and refused.headers["Retry-After"]
            assert not ending.done()
            found += lines
        assert found.pop() == b"data: [DONE]"
        pieces = [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in found]
        assert pieces[-1]["finish_reason"] == "length"
        text = "".join(piece["text"] for piece in pieces)
        assert text.startswith(expected[0]["text"].rstrip("\ufffd"))
        ending.result()


def test_triton_waits_for_the_gateway() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        waiting = threading.Thread(target=wait_closed.main, args=([f"{port}"],))
        waiting.start()
        time.sleep(0.5)
        assert waiting.is_alive()
    waiting.join(10)
    assert not waiting.is_alive()

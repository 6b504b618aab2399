"""Idle and slow connections do not affect other clients."""

import json
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import requests

from lathe_serving.client import Client
from lathe_serving.gateway import connections, generation
from lathe_serving.gateway.app import Gateway
from lathe_serving.gateway.connections import raise_file_limit
from lathe_serving.gateway.limits import Limits
from lathe_serving.gateway.models import read_models
from lathe_serving.server import TritonServer
from tests.serve.gateway.test_limits import BODY, LONG, post
from tests.support.connection import connected, read_all, read_until, request
from tests.support.gateways import opened, running


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"idle": 0.6, "head": 0.6, "blocked": 0.6, "closing": 0.6}
    monkeypatch.setattr(connections, "SECONDS", seconds)


@pytest.mark.usefixtures("impatient")
def test_who_sends_nothing_or_half_a_head_is_closed(server: TritonServer) -> None:
    with opened(server) as address:
        with connected(address) as silent, connected(address) as slow:
            slow.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
            assert silent.recv(100) == b""
            answer = read_all(slow)
            assert b" 408 " in answer and b"incomplete headers" in answer
        with connected(address) as kept:
            kept.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in read_all(kept)


@pytest.mark.usefixtures("impatient")
def test_a_long_answer_is_not_idle(server: TritonServer) -> None:
    body = LONG | {"prompt": [*"abcdefgh"], "n": 4, "max_tokens": 1020}  # one after another
    with opened(server) as address:
        started = time.monotonic()
        assert post(address, body).status_code == 200
        assert time.monotonic() - started > 0.8


def test_the_idle_make_room_and_the_busy_stay(server: TritonServer) -> None:
    with opened(server, Limits(connections=4)) as address, ExitStack() as stack:
        busy = stack.enter_context(connected(address))
        busy.sendall(request(LONG | {"stream": True}))
        assert b"200 OK" in busy.recv(100)
        idle = [stack.enter_context(connected(address)) for _ in range(8)]
        assert post(address).status_code == 200
        assert [one.recv(1) for one in idle[:5]] == [b""] * 5
        assert read_until(busy, b"[DONE]")


def test_where_all_are_busy_a_new_one_is_told(server: TritonServer) -> None:
    with opened(server, Limits(connections=2)) as address, ExitStack() as stack:
        busy = [stack.enter_context(connected(address)) for _ in range(2)]
        for one in busy:
            one.sendall(request(LONG | {"stream": True}))
            assert b"200 OK" in one.recv(100)
        refused = read_all(stack.enter_context(connected(address)))
        assert refused.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in refused.lower()
        assert json.loads(refused.split(b"\r\n\r\n")[1])["error"]["code"] == "overloaded"


def test_who_has_just_connected_is_told_that_it_ends(server: TritonServer) -> None:
    gateway = Gateway(
        read_models(Path(server.state.repository)), server.state.grpc, server.state.http, Limits()
    )
    with running(gateway, []) as address, ExitStack() as stack:
        busy, new, half, idle = (stack.enter_context(connected(address)) for _ in range(4))
        half.sendall(request(BODY)[:30])
        idle.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_until(idle, b"}]}")
        busy.sendall(request(LONG | {"prompt": [*"abcdef"], "n": 4, "stream": True}))
        assert b"200 OK" in busy.recv(100)
        gateway.is_draining = True
        assert idle.recv(1 << 16) == b""
        new.sendall(request(BODY))
        half.sendall(request(BODY)[30:])
        for refused in (new, half):
            answer = read_all(refused)
            assert answer.startswith(b"HTTP/1.1 503 ") and b"shutting down" in answer


@pytest.mark.usefixtures("impatient")
def test_who_does_not_read_is_cut_off_and_frees_its_rows(
    server: TritonServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = LONG | {"n": 4, "stream": True, "logprobs": 20}
    with opened(server) as address, ExitStack() as stack:
        slow = [stack.enter_context(connected(address, SO_RCVBUF=4096)) for _ in range(2)]
        for one in slow:
            one.sendall(request(body))
        monkeypatch.setattr(generation, "MOST_UNREAD", 32)
        started = time.monotonic()
        while "requests_in_flight 0.0" not in requests.get(f"{address}/metrics", timeout=30).text:
            assert time.monotonic() - started < 300  # takes until the kernel's buffers are full
            time.sleep(0.05)
        assert post(address).status_code == 200
        client.generate("b", max_tokens=1)
        for one in slow:
            with pytest.raises(ConnectionError):
                read_all(one)


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_connections_that_idle_leave_a_working_gateway(process: str, count: int) -> None:
    most = raise_file_limit()
    if most < count + 100:
        pytest.skip(f"the limit of open files is {most}")
    with ExitStack() as stack:
        for i in range(count):
            one = stack.enter_context(connected(process))
            if i % 3 == 0:
                one.sendall(b"POST /v1/completions HT")
        started = time.monotonic()
        for _ in range(20):
            assert post(process, BODY).status_code == 200
        assert time.monotonic() - started < 5

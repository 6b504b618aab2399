"""Idle and slow connections do not affect other clients."""

import json
import re
import socket
import time
from contextlib import ExitStack
from dataclasses import replace
from http.client import HTTPResponse
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests

from lathe_serving.client import Client
from lathe_serving.gateway import connections, generation
from lathe_serving.gateway.admission import Limits
from lathe_serving.gateway.app import Gateway
from lathe_serving.gateway.connections import raise_file_limit
from lathe_serving.gateway.triton import read_models
from lathe_serving.server import TritonServer
from tests.serve.gateway.test_limits import BODY, LONG, post, wait_for
from tests.support.connection import connected, read_all, read_until, request
from tests.support.gateways import opened, running
from tests.support.server_metrics import expect_cancelled


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"idle": 0.6, "head": 0.6, "blocked": 0.6, "closing": 0.6}
    monkeypatch.setattr(connections, "SECONDS", seconds)


@pytest.mark.usefixtures("impatient")
def test_idle_and_partial_requests_are_closed(server: TritonServer) -> None:
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


def test_a_new_connection_to_a_busy_server_gets_an_error(server: TritonServer) -> None:
    with opened(server, Limits(connections=2)) as address, ExitStack() as stack:
        busy = [stack.enter_context(connected(address)) for _ in range(2)]
        for one in busy:
            one.sendall(request(LONG | {"stream": True}))
            assert b"200 OK" in one.recv(100)
        refused = read_all(stack.enter_context(connected(address)))
        assert refused.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in refused.lower()
        assert json.loads(refused.split(b"\r\n\r\n")[1])["error"]["code"] == "overloaded"


def test_a_new_connection_to_a_stopping_server_gets_an_error(server: TritonServer) -> None:
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
        gateway.admission.is_draining = True
        assert idle.recv(1 << 16) == b""
        new.sendall(request(BODY))
        half.sendall(request(BODY)[30:])
        for refused in (new, half):
            answer = read_all(refused)
            assert answer.startswith(b"HTTP/1.1 503 ") and b"shutting down" in answer


MANY = LONG | {"prompt": ["x"] * 200, "n": 4}  # takes longer than any test waits


@pytest.mark.slow
def test_requests_in_flight_at_the_drain_deadline_get_an_error(
    server: TritonServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LAST_SECONDS", 0.3)
    models = read_models(Path(server.state.repository))
    models = {name: replace(model, max_wait=3600) for name, model in models.items()}
    gateway = Gateway(models, server.state.grpc, server.state.http, Limits())
    with ExitStack() as stack:
        address = stack.enter_context(running(gateway, [], drain_seconds=0.1))
        whole, streamed, unread, triton = (
            stack.enter_context(connected(address, SO_RCVBUF=4096)) for _ in range(4)
        )
        whole.sendall(request(MANY))
        for one in (streamed, unread):
            one.sendall(request(MANY | {"stream": True, "logprobs": 20}))
            assert b"200 OK" in one.recv(100)
        triton.sendall(generate("generate_stream", stream=True, max_tokens=1000))
        wait_for(address, "lathe_gateway_requests_in_flight 4.0")
        gateway.admission.is_draining = True
        head, body = read_all(whole).split(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in head.lower()
        assert json.loads(body)["error"]["code"] == "shutting_down"
        *_, last, end, _ = read_all(streamed).split(b"\n\n")
        assert end.endswith(b"data: [DONE]") and b'"code": "shutting_down"' in last
        assert b"the server is shutting down" in read_all(triton)
    # grpc's own: its loops of other tests' threads have read the same events.
    errors = [x.getMessage() for x in caplog.records if x.exc_info]
    assert not [x for x in errors if "PollerCompletionQueue" not in x]


def generate(verb: str, **parameters: object) -> bytes:
    asked = request({"text_input": "x", "max_tokens": 300, "ignore_eos": True, **parameters})
    return asked.replace(b"/v1/completions", f"/v2/models/gpt/{verb}".encode())


HALF_CLOSED = {
    "whole": (request(BODY), b'"finish_reason":"length"'),
    "long": (request(LONG), b'"finish_reason":"length"'),
    "stream": (request(LONG | {"stream": True}), b"data: [DONE]\n\n"),
    "HTTP/1.0": (request(BODY).replace(b"HTTP/1.1", b"HTTP/1.0"), b'"finish_reason":"length"'),
    "100": (request(BODY).replace(b"Host:", b"Expect: 100-continue\r\nHost:"), b'"usage"'),
    "generate": (generate("generate"), b"text_output"),
    "generate_stream": (generate("generate_stream", stream=True), b"text_output"),
    "second": (request(LONG) + request(BODY | {"echo": True}), b'"text":"hello'),
}


@pytest.mark.parametrize(("sent", "part"), HALF_CLOSED.values(), ids=HALF_CLOSED)
def test_a_half_closed_connection_gets_its_answers(address: str, sent: bytes, part: bytes) -> None:
    with connected(address) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        answers = read_all(client)
    starts = [match.start() for match in re.finditer(rb"HTTP/1.1 (?!100)", answers)]
    assert len(starts) == sent.count(b"POST ")
    last = BytesIO(answers[starts[-1] :])
    reply = HTTPResponse(SimpleNamespace(makefile=lambda _: last))  # type: ignore[arg-type]
    reply.begin()
    assert reply.status == 200 and part in reply.read()


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_connection_frees_its_rows_while_it_waits(
    server: TritonServer, address: str, client: Client, stream: bool
) -> None:
    """Nothing has been sent yet that would tell a closed connection from a half-closed one."""
    with expect_cancelled(server, 40 * 4 * 1000):
        with connected(address) as leaving:
            leaving.sendall(request(MANY | {"stream": stream}))
            time.sleep(0.1)
        client.generate("b", max_tokens=1)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_client_that_does_not_read_is_disconnected_and_frees_its_rows(
    server: TritonServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = LONG | {"n": 4, "stream": True, "logprobs": 20}
    with opened(server) as address, ExitStack() as stack:
        slow = [stack.enter_context(connected(address, SO_RCVBUF=4096)) for _ in range(2)]
        for one in slow:
            one.sendall(request(body))
        monkeypatch.setattr(generation, "MAX_UNREAD_CHUNKS", 32)
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

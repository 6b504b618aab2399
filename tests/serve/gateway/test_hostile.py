"""Arbitrary bytes on the wire get a clear response or none, and never affect another client's
stream."""

import http.client
import json
import random
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import requests

from tests.support.connection import connected, read_until

GOOD = {"model": "gpt", "prompt": "hello", "max_tokens": 4, "temperature": 0}
NEIGHBOUR = GOOD | {"prompt": "a neighbour", "max_tokens": 24, "ignore_eos": True, "stream": True}
JSON = "Host: localhost\r\nContent-Type: application/json\r\n"
CLOSED = 0  # pseudo-status: the connection is closed without a response
Send = bytes | Callable[[socket.socket], None]


@dataclass(frozen=True)
class Case:
    """Bytes to send, or a function that sends them, and the allowed statuses."""

    name: str
    send: Send
    statuses: tuple[int, ...]


def posted(body: Any, path: str = "/v1/completions", head: str = "", method: str = "POST") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    start = f"{method} {path} HTTP/1.1\r\n{JSON}Content-Length: {len(data)}\r\n{head}\r\n"
    return start.encode("latin-1") + data


def got(path: str, head: str = "", method: str = "GET", version: str = "1.1") -> bytes:
    return f"{method} {path} HTTP/{version}\r\nHost: localhost\r\n{head}\r\n".encode("latin-1")


def raw(head: str, body: bytes = b"") -> bytes:
    start = f"POST /v1/completions HTTP/1.1\r\n{JSON}{head}\r\n\r\n"
    return start.encode("latin-1") + body


def raw_json(**changes: str) -> bytes:
    """JSON body with raw values that Python cannot represent."""
    fields = {name: json.dumps(value) for name, value in GOOD.items()} | changes
    return ("{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}").encode()


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def in_body_then(end: Callable[[socket.socket], None]) -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        connection.sendall(raw("Content-Length: 500", b'{"model": "gpt"'))
        end(connection)

    return send


def in_stream_then(end: Callable[[socket.socket], None]) -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        connection.sendall(posted(NEIGHBOUR | {"max_tokens": 1000}))
        assert b"200" in connection.recv(100)
        end(connection)

    return send


def trickle(connection: socket.socket) -> None:
    for byte in posted(GOOD):
        connection.sendall(bytes([byte]))


def tls(connection: socket.socket) -> None:
    context = ssl.create_default_context()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="x").do_handshake()
    connection.sendall(outgoing.read())


def noise(connection: socket.socket) -> None:
    connection.sendall(random.Random(0).randbytes(100_000))


def half_open(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


NUMBERS = ("NaN", "Infinity", "-Infinity", "1e400", "9" * 400, "-1", "1.5", '"1"', "[1]", "{}")
RULES = "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(6000)) + 'a6000: "x"'
FATAL = json.dumps({"grammar": RULES})
"""A grammar whose compilation overflows llguidance's stack."""

DEEP = '{"regex": "' + "(" * 40_000 + '"}'
WRONG = {
    "temperature": (*NUMBERS[:6], '"1"', "[1]", "true", "2.1"),
    "top_p": (*NUMBERS[:6], '"1"', "false", "1.1"),
    "max_tokens": (*NUMBERS, "true", "1e3000", "9223372036854775807"),
    "n": (*NUMBERS, "true", "0", "129", "5"),
    "best_of": (*NUMBERS, "0", "129", "5"),
    "seed": ("NaN", "1e400", "9" * 400, "1.5", '"1"', "true"),
    "stop": ("1", "{}", "[1]", '""', '[""]', "[null]", '["a", 2]'),
    "logprobs": (*NUMBERS, "21", "true"),
    "presence_penalty": ("NaN", "Infinity", "3", "-3", '"1"'),
    "frequency_penalty": ("NaN", "-Infinity", "3", "-3", "[]"),
    "repetition_penalty": ("NaN", "0", "-1", "1e400"),
    "top_k": ("NaN", "-2", "1.5", "9" * 400, "true"),
    "min_tokens": ("-1", "9" * 400, "9223372036854775807", '"1"'),
    "echo": ("1", '"true"', "[]"),
    "stream": ("1", '"true"', "[]"),
    "stream_options": ("1", "[]", '{"include_usage": 1}'),
    "suffix": ('"x"', "1"),
    "logit_bias": ('{"1": 500}', '{"a": 1}', '{"-1": 1}', '{"999": 1}', "5", "[1]", '{"1": NaN}'),
    "stop_token_ids": ("5", "[-1]", '["a"]', "[999]", "[" + "9" * 400 + "]"),
    "min_p": ("NaN", "-1", "2", '"a"', "[]"),
    "response_format": ('"json"', "[]", '{"type": "x"}', '{"type": "json_schema"}'),
    "structured_outputs": (
        '"a"', "{}", '{"regex": 5}', '{"regex": "["}', '{"json": {"$ref": "#"}}', '{"choice": []}',
        '{"json": {"maxLength": 1e300, "type": "string"}}', '{"regex": "\\ud800"}', DEEP, FATAL,
    ),
    "guided_json": ("5", '"{"', '{"not": {}}', '{"enum": []}'),
    "tools": ('[{"type": "function", "function": {"name": "f"}}]', "5"),
    "model": ("1", "[]", '{"a": 1}', "true"),
    "prompt": (
        "1", "true", "{}", '""', "[]", "[[]]", '[""]', "[null]", "[1.5]", "[true]", "[1, null]",
        "[-1]", "[400]", "[9223372036854775807]", "[9223372036854775808]", '["a", 1]', "[[1], 1]",
        "[[[1]]]", "NaN",
    ),
}  # fmt: skip
NAMES = ("", "nope", "gpt\\u0000", "\\u001b[31m", "../gpt", "gpt-score", "g" * 100_000, "\\ud800")
PATHS = (
    "/v1/models/../../etc/passwd", "/v1/models/..%2f..%2fetc%2fpasswd", "/v1/models/%00",
    "/v1/models/%ff%fe", "/v1/models/gpt/versions/1", "//v1/models", "/", "/v1", "/v1/embeddings",
    "/v1/completions/", "/v1/models/" + "a" * 9000, "/v1/completions%00", "/.git/config",
)  # fmt: skip
CHUNKED = "Transfer-Encoding: chunked"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)
WEBSOCKET = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
WEBSOCKET += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
BAD = (400,)


def cases() -> Iterator[Case]:
    for name, values in WRONG.items():
        for value in values:
            yield Case(f"{name} {value:.30}", posted(raw_json(**{name: value})), (*BAD, 404))
    for name in NAMES:
        body = raw_json(model=f'"{name}"')
        yield Case(f"model {name:.20}", posted(body), (400, 404))
    for path in PATHS:
        yield Case(f"path {path:.40}", got(path), (400, 404, 405))
    yield from bodies()
    yield from framing()
    yield from heads()
    yield from protocols()


def bodies() -> Iterator[Case]:
    deep = b'{"model": "gpt", "prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    wide = b'{"model": "gpt", "prompt": "x", "more": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000
    yield Case("no body", posted(b""), BAD)
    yield Case("half a body", posted(b'{"model": "gpt"'), BAD)
    yield Case("two bodies", posted(json.dumps(GOOD).encode() * 2), BAD)
    yield Case("invalid UTF-8", posted(b'{"model": "gpt", "prompt": "\xff\xfe"}'), BAD)
    yield Case("UTF-16", posted(json.dumps(GOOD).encode("utf-16")), (200, 400))
    yield Case("UTF-8 with a BOM", posted(b"\xef\xbb\xbf" + json.dumps(GOOD).encode()), (200, 400))
    yield Case("half a character", posted(raw_json(prompt='"\\ud800"')), BAD)
    yield Case("half a character to stop at", posted(raw_json(stop='"\\udfff"')), BAD)
    yield Case("a null in the prompt", posted(raw_json(prompt='"a\\u0000b"')), (200,))
    yield Case("keys twice", posted(raw_json(prompt='"a", "prompt": "b"')), (200,))
    yield Case("arrays in arrays", posted(deep), BAD)
    yield Case("objects in objects", posted(wide + b"}"), BAD)
    yield Case("a form", posted(b"model=gpt&prompt=x"), BAD)
    yield Case("a huge number", posted(raw_json(seed="9" * 1_000_000)), BAD)
    yield Case("10 MB", posted(b" " * 10_000_000), (413,))
    yield Case("a prompt of 3 MB", posted(GOOD | {"prompt": "x" * 3_000_000}), BAD)
    yield Case("a prompt of 500,000 ids", posted(GOOD | {"prompt": [7] * 500_000}), BAD)
    yield Case("a prompt as long as fits", posted(GOOD | {"prompt": "x" * 1021}), BAD)
    yield Case("10,000 prompts", posted(GOOD | {"prompt": ["x"] * 10_000}), BAD)
    yield Case("10,000 strings to stop at", posted(GOOD | {"stop": ["x"] * 10_000}), BAD)
    yield Case("a long string to stop at", posted(GOOD | {"stop": "x" * 1_000_000}), BAD)
    yield Case("100,000 unknown fields", posted({str(i): i for i in range(10**5)} | GOOD), (200,))
    yield Case("a chat with no template", posted(GOOD, "/v1/chat/completions"), BAD)


def framing() -> Iterator[Case]:
    body = json.dumps(GOOD).encode()
    length = f"Content-Length: {len(body)}"
    whole = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    yield Case("chunks", raw(CHUNKED, whole), (200,))
    yield Case("chunks of one byte", raw(CHUNKED, chunks(body)), (200,))
    yield Case("too many chunks", raw(CHUNKED, chunks(b" ", 600_000)), (413,))
    yield Case("a chunk whose length lies", raw(CHUNKED, b"5\r\n" + whole), BAD)
    yield Case("a chunk whose length not a number", raw(CHUNKED, b"zz\r\nab\r\n0\r\n\r\n"), BAD)
    yield Case("a chunk of 2^84 bytes", raw(CHUNKED, b"f" * 21 + b"\r\nx"), (400, 413))
    yield Case("a negative chunk", raw(CHUNKED, b"-5\r\nab\r\n0\r\n\r\n"), BAD)
    yield Case("both lengths", raw(f"{length}\r\n{CHUNKED}", whole), BAD)
    yield Case("both lengths, the other way", raw(f"{CHUNKED}\r\n{length}", whole), BAD)
    yield Case("two lengths", raw(f"{length}\r\nContent-Length: 3", body), BAD)
    yield Case("the same length twice", raw(f"{length}\r\n{length}", body), (200, 400))
    yield Case("a list of lengths", raw(f"{length}, 3", body), BAD)
    yield Case("a negative length", raw("Content-Length: -1"), BAD)
    yield Case("a length with a sign", raw(f"Content-Length: +{len(body)}", body), BAD)
    yield Case("a length that not a number", raw("Content-Length: many"), BAD)
    yield Case("a length of 2^70", raw(f"Content-Length: {2**70}"), BAD)
    yield Case("a length of 10 GB", raw(f"Content-Length: {10**10}"), (413,))
    yield Case("too short a length", raw(f"Content-Length: {len(body) - 3}", body), BAD)
    yield Case("an unknown encoding", raw("Transfer-Encoding: gzip", body), (400, 413, 501))
    yield Case("an encoding twice", raw(f"{CHUNKED}\r\n{CHUNKED}", whole), (200, 400))
    yield Case("an encoding with a tab", raw("Transfer-Encoding:\tchunked", whole), (200, 400))
    yield Case("an encoding with a space", raw("Transfer-Encoding : chunked", whole), BAD)
    yield Case("a folded header", raw(f"X-A: b\r\n c\r\n{length}", body), (200, 400))
    yield Case("a body that ends early", in_body_then(half_open), (CLOSED, 400))
    yield Case("RST in the body", in_body_then(reset), (CLOSED,))
    yield Case("RST in the answer", in_stream_then(reset), (CLOSED,))
    yield Case("half open in the answer", in_stream_then(half_open), (CLOSED,))
    yield Case("noise in the answer", in_stream_then(noise), (CLOSED,))
    yield Case("a byte at a time", trickle, (200,))


def chunks(body: bytes, times: int = 1) -> bytes:
    """The body so many times, a byte in each chunk."""
    return b"".join(b"1\r\n%c\r\n" % byte for byte in body) * times + b"0\r\n\r\n"


def heads() -> Iterator[Case]:
    long = "a" * 60_000
    models = "/v1/models"
    yield Case("a long header", got(models, f"X-A: {long}\r\n"), (400, 431))
    yield Case("a long name", got(models, f"{long}: a\r\n"), (400, 431))
    yield Case("a long path", got("/" + long), (400, 404, 431))
    yield Case("many headers", got(models, "X-A: b\r\n" * 10_000), (400, 431))
    yield Case("headers without an end", f"GET / HTTP/1.1\r\nX: {long * 20}".encode(), (400, 431))
    yield Case("a null in a header", got(models, "X-A: a\0b\r\n"), BAD)
    yield Case("a name with a space", got(models, "X A: b\r\n"), BAD)
    yield Case("no colon", got(models, "nothing\r\n"), BAD)
    yield Case("no host", b"GET /v1/models HTTP/1.1\r\n\r\n", BAD)
    yield Case("two hosts", got(models, "Host: y\r\n"), BAD)
    yield Case("latin-1", got(models, "X-A: \xe9\xff\r\n"), (200, 400))
    yield Case("line feeds alone", b"GET /v1/models HTTP/1.1\nHost: localhost\n\n", (200, 400))
    yield Case("an empty line first", b"\r\n\r\n" + got(models), (200, 400))
    for name, key in (("long", "k" * 20_000), ("latin-1", "\xe9\xff"), ("empty", "")):
        key = f"Authorization: Bearer {key}\r\n"
        yield Case(f"a key that is {name}", posted(GOOD, head=key), (200, 401))


def protocols() -> Iterator[Case]:
    models = "/v1/models"
    body = json.dumps(GOOD).encode()
    start = f"POST /v1/completions HTTP/1.0\r\n{JSON}Content-Length: {len(body)}\r\n\r\n".encode()
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD", "FOO", "get", "GET\0"):
        yield Case(f"{method!r}", posted(GOOD, method=method), (400, 405))
    yield Case("CONNECT", b"CONNECT x:443 HTTP/1.1\r\nHost: localhost\r\n\r\n", (400, 404, 405))
    yield Case("HEAD of a list", got(models, method="HEAD"), (200,))
    yield Case("HTTP/1.0", start + body, (200,))
    yield Case("HTTP/0.9", b"GET /v1/models\r\n\r\n", (200, 400, CLOSED))
    yield Case("HTTP/1.7", got(models, version="1.7"), (505,))
    yield Case("HTTP/2.0", got(models, version="2.0"), (505,))
    yield Case("HTTP/2's preface", PREFACE, (505,))
    upgrade = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
    yield Case("an upgrade to HTTP/2", got(models, upgrade), (200,))
    yield Case("a body with an upgrade", posted(GOOD, head=upgrade), (200,))
    yield Case("a websocket", got(models, WEBSOCKET), (200, 400))
    yield Case("TLS", tls, BAD)
    yield Case("noise", noise, (400, 431))
    yield Case("another protocol", b"SSH-2.0-OpenSSH_9.6\r\n\r\n", BAD)
    yield Case(
        "a proxy's request",
        b"GET http://x/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
        (200, 404),
    )
    yield Case("an asterisk", b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", (400, 404, 405))
    yield Case("two at once", posted(GOOD) * 2, (200,))
    yield Case("a thousand at once", got(models) * 1000, (200,))
    yield Case("a good one, then noise", posted(GOOD) + bytes(range(256)), (200, 400, CLOSED))
    wait = f"Expect: 100-continue\r\nContent-Length: {len(body)}"
    yield Case("100-continue", raw(wait, body), (200,))
    yield Case(
        "100-continue with 10 MB", raw("Expect: 100-continue\r\nContent-Length: 10000000"), (413,)
    )
    yield Case(
        "an unknown expectation",
        raw(f"Expect: 200-ok\r\nContent-Length: {len(body)}", body),
        (200, 417),
    )


CASES = list(cases())
OF_ITS_OWN = ("max_tokens", "prompt", "logit_bias", "structured_outputs")
"""Settings with checks of their own: of the others, which share theirs, two values are quick."""
SLOW = {
    f"{name} {value:.30}"
    for name, values in WRONG.items()
    for value in values[2:]
    if name not in OF_ITS_OWN
}


class Neighbour:
    """A concurrent stream of another client."""

    def __init__(self, address: str) -> None:
        url = f"{address}/v1/completions"
        self._reply = requests.post(url, json=NEIGHBOUR, stream=True, timeout=60)
        self._lines = self._reply.iter_lines()
        self._first = next(self._lines)

    def text(self) -> str:
        """Read the whole text; fails if the stream ends early."""
        *events, end = filter(None, [self._first, *self._lines])
        assert end == b"data: [DONE]"
        pieces = [json.loads(event.removeprefix(b"data: ")) for event in events]
        return "".join(piece["choices"][0]["text"] for piece in pieces)


@pytest.fixture(scope="module")
def expected(process: str) -> str:
    return Neighbour(process).text()


def answer(connection: socket.socket, method: str | None) -> tuple[int, Any]:
    """Read status and body of the response; CLOSED if there is none."""
    try:
        reply = http.client.HTTPResponse(connection, method=method)
        reply.begin()
        while reply.status == 100:
            reply = http.client.HTTPResponse(connection, method=method)
            reply.begin()
        body = reply.read()
    except (ConnectionError, http.client.HTTPException, ValueError):
        return CLOSED, None
    if reply.status >= 400 and body:
        return reply.status, json.loads(body)
    return reply.status, None


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 60 and len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=pytest.mark.slow if case.name in SLOW else ())
        for case in CASES
    ],
)
def test_a_hostile_request(process: str, expected: str, case: Case) -> None:
    neighbour = Neighbour(process)
    with connected(process) as connection:
        if isinstance(case.send, bytes):
            with suppress(ConnectionError):  # refused before all of it was sent
                connection.sendall(case.send)
            method = "HEAD" if case.send.startswith(b"HEAD") else None
        else:
            case.send(connection)
            method = None
        status, body = (CLOSED, None)
        if connection.fileno() >= 0:
            status, body = answer(connection, method)
    assert status in case.statuses, body
    if status >= 400 and method != "HEAD":
        assert body is not None
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["message"]
    assert neighbour.text() == expected


def test_many_that_read_slowly(process: str, expected: str) -> None:
    body = NEIGHBOUR | {"max_tokens": 900, "logprobs": 20, "n": 2}
    neighbour = Neighbour(process)
    slow = [connected(process, SO_RCVBUF=4096) for _ in range(3)]
    opened = [one.__enter__() for one in slow]
    for one in opened:
        one.sendall(posted(body))
        one.recv(10)
    assert neighbour.text() == expected
    for one in slow:
        one.__exit__(None, None, None)


@pytest.mark.slow
def test_a_body_that_never_ends_is_given_up(process: str, expected: str) -> None:
    with connected(process) as silent, connected(process) as headless:
        silent.settimeout(60)
        silent.sendall(raw("Content-Length: 500", b"{"))
        headless.sendall(b"GET /v1/models HTTP/1.1\r\nX: ")
        started = time.monotonic()
        assert read_until(headless, b" 408 ") and time.monotonic() - started < 15
        assert Neighbour(process).text() == expected
        assert read_until(silent, b" 408 ") and time.monotonic() - started < 40

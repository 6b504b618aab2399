"""Clients' errors when an OpenAI API sends invalid or incomplete responses."""

import asyncio
import json
import os
from collections.abc import Callable

import pytest

from lathe_base.errors import Code, StageError, UserError
from lathe_serving.client import Client
from lathe_serving.client.async_client import AsyncClient
from lathe_serving.reach import is_loopback
from tests.support.errors import raises
from tests.support.fake_openai import STREAM, answering, chunked, error, piece
from tests.support.silent import ANSWERS, always_sends, http, server


def whole(url: str) -> str:
    with Client(url, "gpt", timeout_seconds=20) as client:
        return client.generate("x").text


def streamed(url: str) -> str:
    with Client(url, "gpt", timeout_seconds=20) as client:
        return "".join(chunk.text for chunk in client.stream("x"))


def in_async(url: str) -> str:
    async def ask() -> str:
        async with AsyncClient(url, "gpt", timeout_seconds=20) as client:
            return "".join([chunk.text async for chunk in client.stream("x")])

    return asyncio.run(ask())


WAYS = pytest.mark.parametrize("ask", [whole, streamed, in_async])
STREAMED = pytest.mark.parametrize("ask", [streamed, in_async])
Ask = Callable[[str], str]
BROKEN = {Code.SERVER_ERROR, Code.UNREACHABLE}
"""The codes for an answer that is cut or is not the API's."""


@WAYS
@pytest.mark.parametrize(
    ("reply", "codes", "texts"),
    [
        (error("401 No", "no API key"), {Code.UNAUTHORIZED}, ("no API key", "set LATHE_API_KEY")),
        (error("403 No", "not yours"), {Code.FORBIDDEN}, ("not yours", "set LATHE_API_KEY")),
        (error("429 No", "too many", "Retry-After: 7"), {Code.BUSY}, ("too many", "in 7 s")),
        (error("503 No", "busy", "Retry-After: 1"), {Code.BUSY}, ("busy", "in 1 s")),
        (error("503 No", "busy", "Retry-After: Fri, 31 Dec"), {Code.BUSY}, ("busy", "later")),
        (http("429 No", b"<html>slow down"), {Code.BUSY}, ("429", "later")),
        (http("503 No", b""), {Code.BUSY}, ("503", "later")),
        (
            error("404 No", "no such model", code="model_not_found"),
            {Code.NOT_FOUND},
            ("--model-name",),
        ),
        (
            error("400 No", "too long", code="context_length_exceeded"),
            {Code.TOO_LONG},
            ("too long", "shorter prompt"),
        ),
        (error("400 No", "\x1b[2J\nno"), {Code.INVALID_REQUEST}, (r"\x1b[2J\nno",)),
        (
            http("302 Found", b"", "Location: http://elsewhere/"),
            {Code.SERVER_ERROR},
            ("status 302",),
        ),
        (http("404 No", b"<html>"), {Code.SERVER_ERROR}, ("status 404: '<html>'",)),
        (http("200 OK", b"<html>", "Content-Type: text/event-stream"), BROKEN, ()),
        (http("200 OK", b"[1]", "Content-Type: application/json"), BROKEN, ()),
    ],
)
def test_a_refusal_is_one_clear_error(
    ask: Ask, reply: bytes, codes: set[Code], texts: tuple[str, ...]
) -> None:
    with answering(reply) as url, pytest.raises((UserError, StageError)) as told:
        ask(url)
    message = str(told.value)
    assert told.value.code in codes and all(text in message for text in texts), message
    assert "\x1b" not in message


@WAYS
def test_a_failing_server_is_not_a_user_error(ask: Ask) -> None:
    for reply, text in (
        (error("500 No", "it failed"), "it failed"),
        (http("502 Bad Gateway", b"<html>"), "502"),
    ):
        with answering(reply) as url, raises(Code.SERVER_ERROR, text, kind=StageError):
            ask(url)


@STREAMED
def test_pieces_are_put_together_wherever_they_are_cut(ask: Ask) -> None:
    events = piece("a\u2028\x85é\r") + b": a comment\n\n" + piece("b", "stop") + b"data: [DONE]\n\n"
    bytewise = [events[i : i + 1] for i in range(len(events))]
    for parts in ([events], bytewise, [events.replace(b"\n", b"\r\n")]):
        with answering(STREAM + chunked(*parts) + b"0\r\n\r\n") as url:
            assert ask(url) == "a\u2028\x85é\rb"


@STREAMED
@pytest.mark.parametrize(
    ("event", "kind", "code", "texts"),
    [
        (
            {"message": "it failed", "type": "server_error"},
            StageError,
            Code.SERVER_ERROR,
            ("it failed",),
        ),
        ({"message": "busy", "code": "overloaded"}, UserError, Code.BUSY, ("busy", "later")),
        (
            {"message": "no", "type": "invalid_request_error"},
            UserError,
            Code.INVALID_REQUEST,
            ("no\n",),
        ),
    ],
)
def test_an_error_in_a_stream_is_raised(
    ask: Ask,
    event: dict[str, str],
    kind: type[UserError] | type[StageError],
    code: Code,
    texts: tuple[str, ...],
) -> None:
    last = f"data: {json.dumps({'error': event})}\n\n".encode()
    with (
        answering(STREAM + chunked(piece("a"), last) + b"0\r\n\r\n") as url,
        raises(code, *texts, kind=kind),
    ):
        ask(url)


@STREAMED
@pytest.mark.parametrize(
    "end", [b"", b"0\r\n\r\n", b"5\r\nda", chunked(b"data: [DONE"), chunked(b"data: {}}\n\n")]
)
def test_a_stream_that_is_cut_is_never_taken_for_whole(ask: Ask, end: bytes) -> None:
    with (
        answering(STREAM + chunked(piece("a")) + end) as url,
        pytest.raises((UserError, StageError)) as told,
    ):
        ask(url)
    assert told.value.code in BROKEN


@WAYS
@pytest.mark.parametrize("kind", ["hangs up", "garbage", "an endless line", "a page"])
def test_a_server_without_the_openai_api_is_reported(ask: Ask, kind: str) -> None:
    with server(ANSWERS[kind]) as port, pytest.raises(UserError) as told:
        ask(f"http://127.0.0.1:{port}/v1")
    assert told.value.code in BROKEN and str(port) in told.value.what


def test_chunks_come_before_the_connection_is_lost() -> None:
    reply = STREAM + chunked(piece("a"), piece("b"))
    with answering(reply) as url, Client(url, "gpt") as client:
        stream = client.stream("x")
        assert [next(stream).text, next(stream).text] == ["a", "b"]
        with raises(Code.UNREACHABLE, url, kind=StageError):
            next(stream)


@WAYS
def test_no_proxy_stands_before_this_machine(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps({"choices": [{"index": 0, "text": "a"}]}).encode()
    stream = STREAM + chunked(piece("a"), b"data: [DONE]\n\n") + b"0\r\n\r\n"
    reply = http("200 OK", answer, "Content-Type: application/json") if ask is whole else stream
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert os.environ["http_proxy"]
    with answering(reply) as url:
        assert ask(url) == "a"
    assert not is_loopback("http://example.org/v1") and is_loopback("http://[::1]/v1")


def test_other_machines_are_reached_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(always_sends(error("429 No", "the proxy"))) as port:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        with raises(Code.BUSY, "the proxy"):
            whole("http://gateway.invalid/v1")

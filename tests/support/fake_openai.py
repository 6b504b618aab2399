"""An OpenAI interface that answers every completion with the same bytes."""

import json
import math
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.silent import http, server

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"data: [DONE]\n\n"


def piece(text: str, reason: str | None = None, top: dict[str, float] | None = None) -> bytes:
    """An event with one token.

    Args:
        top: probabilities of the likeliest tokens, with that of the text; None for no logprobs.
    """
    choice: dict[str, Any] = {"index": 0, "text": text, "token_ids": [7], "finish_reason": reason}
    if top is not None:
        logs = {name: math.log(value) for name, value in top.items()}
        values = {"tokens": [text], "token_logprobs": [logs[text]], "top_logprobs": [logs]}
        choice["logprobs"] = values
    return f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}\n\n".encode()


def chunked(*parts: bytes) -> bytes:
    """The parts as chunks of a body whose end is still to come."""
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


def stream(*events: bytes) -> bytes:
    """A whole response."""
    return STREAM + chunked(*events, END) + b"0\r\n\r\n"


def error(status: str, message: str, *headers: str, **more: str) -> bytes:
    """A response with an error as OpenAI's interface writes it."""
    body = json.dumps({"error": {"message": message, **more}}).encode()
    return http(status, body, "Content-Type: application/json", *headers)


@contextmanager
def answering(
    reply: bytes, models: tuple[str, ...] = ("gpt",), left: threading.Event | None = None
) -> Iterator[str]:
    """The base URL of an interface that gives this reply to every completion.

    Args:
        left: the connection stays open after the reply, and this is set when the client closes it.
    """
    listed = json.dumps({"object": "list", "data": [{"id": name} for name in models]}).encode()

    def answer(connection: socket.socket, stop: threading.Event) -> None:
        if connection.recv(1 << 16).startswith(b"GET /v1/models "):
            connection.sendall(http("200 OK", listed, "Content-Type: application/json"))
            return
        connection.sendall(reply)
        if left is not None:
            connection.settimeout(60)
            while connection.recv(1 << 16):
                pass
            left.set()

    with server(answer) as port:
        yield f"http://127.0.0.1:{port}/v1"

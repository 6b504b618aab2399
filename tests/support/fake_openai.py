"""A fake OpenAI API that answers every completion request with the same bytes."""

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
    """Return a stream event with one token.

    Args:
        top: probabilities of the most likely tokens, including `text`; None for no logprobs.
    """
    choice: dict[str, Any] = {"index": 0, "text": text, "token_ids": [7], "finish_reason": reason}
    if top is not None:
        logs = {name: math.log(value) for name, value in top.items()}
        values = {"tokens": [text], "token_logprobs": [logs[text]], "top_logprobs": [logs]}
        choice["logprobs"] = values
    return f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}\n\n".encode()


def chunked(*parts: bytes) -> bytes:
    """Encode parts as chunks of a body, without the final chunk."""
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


def stream(*events: bytes) -> bytes:
    """Return a complete streaming response."""
    return STREAM + chunked(*events, END) + b"0\r\n\r\n"


def error(status: str, message: str, *headers: str, **more: str) -> bytes:
    """Return an error response in the format of OpenAI's API."""
    body = json.dumps({"error": {"message": message, **more}}).encode()
    return http(status, body, "Content-Type: application/json", *headers)


@contextmanager
def answering(
    reply: bytes, models: tuple[str, ...] = ("gpt",), closed: threading.Event | None = None
) -> Iterator[str]:
    """Serve an API that answers every completion request with `reply`; yields the base URL.

    Args:
        closed: if given, the connection stays open after the reply, and this event is set when the
            client closes it.
    """
    listed = json.dumps({"object": "list", "data": [{"id": name} for name in models]}).encode()

    def answer(connection: socket.socket, stop: threading.Event) -> None:
        if connection.recv(1 << 16).startswith(b"GET /v1/models "):
            connection.sendall(http("200 OK", listed, "Content-Type: application/json"))
            return
        connection.sendall(reply)
        if closed is not None:
            connection.settimeout(60)
            while connection.recv(1 << 16):
                pass
            closed.set()

    with server(answer) as port:
        yield f"http://127.0.0.1:{port}/v1"

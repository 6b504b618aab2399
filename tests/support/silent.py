"""Misbehaving servers on the loopback interface: silent, slow, or sending invalid responses."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator


def _silent(connection: socket.socket, stop: threading.Event) -> None:
    stop.wait()


def _trickle(connection: socket.socket, stop: threading.Event) -> None:
    """Send one byte of a status line every 50 ms."""
    while not stop.wait(0.05):
        connection.sendall(b"H")


def _trickle_body(connection: socket.socket, stop: threading.Event) -> None:
    connection.sendall(
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\nETag: 'x'\r\n"
        b"Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\r\n"
    )
    while not stop.wait(0.05):
        connection.sendall(b"x")


def always_sends(data: bytes) -> Callable[[socket.socket, threading.Event], None]:
    def answer(connection: socket.socket, stop: threading.Event) -> None:
        connection.recv(1 << 16)
        connection.sendall(data)

    return answer


def http(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


ANSWERS: dict[str, Callable[[socket.socket, threading.Event], None]] = {
    "silent": _silent,
    "trickle": _trickle,
    "trickling body": _trickle_body,
    "hangs up": lambda connection, stop: None,
    "garbage": always_sends(b"\xff\x00garbage\r\n" * 9),
    "an endless line": always_sends(b"x" * 200_000),
    "no XML": always_sends(http("200 OK", b"<<<not XML", "Content-Type: application/xml")),
    "other XML": always_sends(http("200 OK", b"<a/>", "Content-Type: application/xml")),
    "a page": always_sends(http("404 Not Found", b"<html>" * 99, "Content-Type: text/html")),
    "broken page": always_sends(http("400 Bad Request", b"\xff" * 99, "Content-Type: text/html")),
    "a failure": always_sends(http("500 Oops", b"", "Content-Type: application/xml")),
    "a failure in XML": always_sends(http("403 No", b"<Error>", "Content-Type: application/xml")),
}


@contextlib.contextmanager
def server(answer: Callable[[socket.socket, threading.Event], None]) -> Iterator[int]:
    """Run a server that calls `answer` for every connection; yields its port."""
    stop = threading.Event()
    workers: list[threading.Thread] = []

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            answer(connection, stop)

    def accept(listening: socket.socket) -> None:
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                connection, _ = listening.accept()
                connection.settimeout(5)
                workers.append(threading.Thread(target=serve, args=(connection,)))
                workers[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.05)
        acceptor = threading.Thread(target=accept, args=(listening,))
        acceptor.start()
        try:
            yield int(listening.getsockname()[1])
        finally:
            stop.set()
            for thread in (acceptor, *workers):
                thread.join()

"""HTTP servers for tests, on a free port of the loopback interface."""

import ssl
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class QuietHandler(BaseHTTPRequestHandler):
    """Request handler without logging, which would mix with the output of tests."""

    # Headers and body are sent apart: the second would wait 40 ms for the first to be confirmed.
    disable_nagle_algorithm = True

    def reply(
        self, body: bytes = b"", status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class JSONHandler(QuietHandler):
    """Request handler that sends JSON."""

    def reply(
        self, body: bytes = b"", status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().reply(body, status, {"Content-Type": "application/json", **(headers or {})})


class LoopbackServer(ThreadingHTTPServer):
    """Serves with `handler` while the block runs, over TLS if a certificate is given.

    A client that disconnects during a response is not an error: its traceback would end up in the
    captured output of another test.

    Attributes:
        url: base URL, without a trailing slash.
    """

    def __init__(
        self, handler: type[BaseHTTPRequestHandler], certificate: Path | None = None
    ) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.socket = context.wrap_socket(self.socket, server_side=True)
            self.url = self.url.replace("http", "https", 1)

    def __enter__(self) -> "LoopbackServer":
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback, unless the client has disconnected."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

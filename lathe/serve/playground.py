"""A web page to try a served model, and the small server for it.

Triton serves no pages and allows no cross-origin requests, so this server forwards the page's only
call, `generate_stream`, to it.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from lathe.errors import UserError
from lathe.serve.reach import REACH_SECONDS
from lathe.serve.state import HOST, LOOPBACK

log = logging.getLogger("lathe")

PAGE = Path(__file__).with_name("playground.html")
LARGEST_REQUEST = 2**20
PIECE = 2**12


@contextmanager
def playground(triton: str, model_name: str, port: int = 0) -> Iterator[str]:
    """Serve the page on loopback while the block runs; yields its address.

    Args:
        triton: HTTP address of the server, `host:port`.
        port: 0 takes any free one.

    Raises:
        UserError: the port is in use.
    """

    class Handler(_Handler):
        target, model = triton, model_name

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"port {port}: {reason}", "give another --port") from None
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    target: str
    model: str

    def do_GET(self) -> None:
        if self.path.split("?")[0] != "/":
            self.send_error(404)
            return
        page = PAGE.read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.send_header("Content-Security-Policy", "default-src 'self' 'unsafe-inline'")
        self.end_headers()
        self.wfile.write(page)

    def do_POST(self) -> None:
        given = self.headers.get("Content-Length") or ""
        length = int(given) if given.isdecimal() and len(given) < 10 else 0
        if self.path != "/generate_stream" or not 0 < length <= LARGEST_REQUEST:
            self.send_error(404 if self.path != "/generate_stream" else 413)
            return
        body = self.rfile.read(length)
        connection = HTTPConnection(self.target, timeout=REACH_SECONDS)
        try:
            LOOPBACK.open(f"http://{self.target}/v2/health/ready", timeout=REACH_SECONDS).close()
            connection.connect()
            connection.sock.settimeout(None)  # the server is up, and a generation may take long
            connection.request("POST", f"/v2/models/{self.model}/generate_stream", body)
            reply = connection.getresponse()
        except (OSError, HTTPException) as error:
            connection.close()
            within = f"within {REACH_SECONDS:g} s"
            self._fail(f"no server answers on {self.target} {within}: {error}")
            return
        try:
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.getheader("Content-Type", "text/plain"))
            self.end_headers()
            while piece := reply.read1(PIECE):
                self.wfile.write(piece)
                self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            log.debug("the page was closed")  # closing the connection cancels the generation
        finally:
            connection.close()

    def _fail(self, message: str) -> None:
        self.send_response(502)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"error": message}).encode())

    def log_message(self, format: str, *arguments: object) -> None:
        log.debug(format, *arguments)

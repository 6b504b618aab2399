"""A web page to try and compare served models, and the small server for it.

The page speaks OpenAI's API. The model servers need not allow other origins, nor be reachable by
the browser: this server, which listens on this machine only, forwards the page's calls to them, and
to no other servers.
"""

import json
import logging
import re
import socket
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from urllib.parse import urlsplit

from pydantic import ValidationError

from lathe_base.config.settings import GenerationSettings, ServingSettings
from lathe_base.errors import Code, UserError
from lathe_base.inputs import first_mistake
from lathe_serving.reach import REACH_SECONDS, require_base_url
from lathe_serving.repository import write_models
from lathe_serving.runtime.protocol import score_name
from lathe_serving.server import ANY_PORTS, TritonServer, start
from lathe_serving.state import HOST, find

log = logging.getLogger("lathe")

MAX_REQUEST_BYTES = 2**20
PIECE = 2**12
FORWARDED = ("Authorization", "Content-Type")
RETURNED = ("Content-Type", "Retry-After")
CALLS = {"GET": ("models",), "POST": ("completions", "chat/completions")}


def _read_page() -> tuple[bytes, str]:
    """The page with inline style and script, and the content security policy that allows only
    these."""
    folder = Path(__file__).parent
    page = (folder / "playground.html").read_text(encoding="utf-8")
    digests = {}
    for kind, suffix in (("style", "css"), ("script", "js")):
        text = (folder / f"playground.{suffix}").read_text(encoding="utf-8")
        page = page.replace(f"<{kind}></{kind}>", f"<{kind}>{text}</{kind}>")
        digests[kind] = b64encode(sha256(text.encode()).digest()).decode()
    # Only this page's own style and script, by their digests, and calls to this server: a model's
    # text, if it ever became HTML, could load nothing, and send nothing anywhere else.
    policy = "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
    policy += "form-action 'none'; frame-ancestors 'none'; "
    policy += "; ".join(f"{kind}-src 'sha256-{digest}'" for kind, digest in digests.items())
    return page.encode(), policy


def running_endpoint() -> str:
    """The base URL of the server that `lathe deploy` or `make serve` left running.

    Raises:
        UserError: no server is running, or one without the OpenAI API.
    """
    server = find()
    if server is None or server.openai is None:
        what = "no server is running" if server is None else f"{server.http}: no OpenAI interface"
        raise UserError(
            what, "start one with `make serve`, or give an exported folder", Code.NOT_RUNNING
        )
    return server.openai


@contextmanager
def playground(endpoints: Sequence[str], port: int = 0) -> Iterator[str]:
    """Serve the page on loopback while the block runs; yields its address.

    Args:
        endpoints: base URLs of OpenAI-compatible APIs, whose models the page offers.
        port: 0 picks a free one.

    Raises:
        UserError: an endpoint is not a base URL, or the port is in use.
    """
    urls = [require_base_url(url) for url in endpoints]

    class Handler(_Handler):
        endpoints = urls

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        what = f"port {port}: {error.strerror}"
        raise UserError(what, "give another --port", Code.IN_USE) from None
    except OverflowError as error:
        what = f"port {port}: {error}"
        raise UserError(what, "give another --port", Code.INVALID_VALUE) from None
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serve_exports(exports: Mapping[str, Path]) -> Iterator[TritonServer]:
    """Serve exports on one Triton with the OpenAI API while the block runs.

    Args:
        exports: export folders by model name.

    Raises:
        UserError: not an export, or an invalid model name.
        StageError: the server does not start.
    """
    for name, folder in exports.items():
        try:
            serving = ServingSettings(model_name=name, **ANY_PORTS)
        except ValidationError as error:
            what = f"{folder}: {first_mistake(error)}"
            raise UserError(
                what, f"give it another name: NAME={folder}", Code.INVALID_VALUE
            ) from None
        if score_name(name) in exports:
            raise UserError(
                f"{score_name(name)}: reserved for the scoring model of {name}",
                f"give it another name: NAME={exports[score_name(name)]}",
                Code.INVALID_VALUE,
            )
    with TemporaryDirectory(prefix="lathe-playground-") as scratch:
        repository = Path(scratch) / "models"
        write_models(exports, repository, serving, GenerationSettings())
        with start(repository, serving, Path(scratch) / "state", with_gateway=True) as server:
            yield server


class _Handler(BaseHTTPRequestHandler):
    # A small piece of a stream would wait, up to 40 ms, for the one before to be confirmed.
    disable_nagle_algorithm = True
    endpoints: Sequence[str]
    page, policy = _read_page()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if not self._is_local():
            self._refuse(403, "this page is only available on this machine")
        elif path == "/":
            self._answer(200, "text/html; charset=utf-8", self.page)
        elif path == "/endpoints":
            self._answer(200, "application/json", json.dumps(self.endpoints).encode())
        else:
            self._forward("GET", path, b"")

    def do_POST(self) -> None:
        content_length = self.headers.get("Content-Length") or ""
        length = (
            int(content_length) if content_length.isdecimal() and len(content_length) < 10 else 0
        )
        if not self._is_local():
            self._refuse(403, "this page is only available on this machine")
        elif self.headers.get_content_type() != "application/json":
            # Without this, any page could make a browser send what it likes.
            self._refuse(415, "the body is not JSON")
        elif not 0 < length <= MAX_REQUEST_BYTES:
            self._refuse(413, f"the body exceeds {MAX_REQUEST_BYTES} bytes, or has no length")
        else:
            self._forward("POST", self.path, self.rfile.read(length))

    def _is_local(self) -> bool:
        """Whether the request's host name is one of this machine: another name that resolves to it
        may belong to a malicious site, whose pages would then have the same origin (DNS
        rebinding)."""
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
        return host in (HOST, "localhost")

    def _forward(self, method: str, path: str, body: bytes) -> None:
        # `/N/call`: an endpoint by its number, so that a page cannot name any other address.
        match = re.fullmatch(rf"/([0-9]{{1,3}})/({'|'.join(CALLS[method])})", path)
        if match is None or int(match[1]) >= len(self.endpoints):
            self._refuse(404, "no such page")
            return
        endpoint = self.endpoints[int(match[1])]
        address = urlsplit(endpoint)
        kind = HTTPSConnection if address.scheme == "https" else HTTPConnection
        connection = kind(address.hostname or "", address.port, timeout=REACH_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(None if body else REACH_SECONDS)  # a generation may be long
            with self._leaving_closes(connection.sock):
                headers = {n: self.headers[n] for n in FORWARDED if n in self.headers}
                connection.request(method, f"{address.path}/{match[2]}", body or None, headers)
                reply = connection.getresponse()
                # No length: it may be a stream, whose end is that of the connection.
                with suppress(OSError, HTTPException):  # the page sees that the end is missing
                    self.send_response(reply.status)
                    for name in RETURNED:
                        if value := reply.getheader(name):
                            self.send_header(name, value)
                    self.end_headers()
                    while piece := reply.read1(PIECE):
                        self.wfile.write(piece)
                        self.wfile.flush()
        except (OSError, HTTPException, ValueError) as error:
            self._refuse(502, f"no server answers on {endpoint}: {error}")
        finally:
            connection.close()

    @contextmanager
    def _leaving_closes(self, upstream: socket.socket) -> Iterator[None]:
        """Close the connection to the server, which cancels a generation, when the page closes its
        own connection, even before the first token."""

        def watch() -> None:
            with suppress(ConnectionResetError):
                if self.connection.recv(1, socket.MSG_PEEK):
                    return
            with suppress(OSError):  # it may be closed already
                upstream.shutdown(socket.SHUT_RDWR)

        thread = Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RD)
            thread.join()

    def _refuse(self, status: int, message: str) -> None:
        body = json.dumps({"error": {"message": message}}).encode()
        with suppress(OSError):
            self._answer(status, "application/json", body)

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", self.policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        log.debug(format, *arguments)

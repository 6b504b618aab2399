"""Download a file from a web server."""

import shutil
import urllib.error
import urllib.request
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from lathe.errors import UserError
from lathe.storage.failures import retried, shown
from lathe.storage.files import atomic_file
from lathe.storage.network import network_timeout, opener

NO_HEAD = (403, 405, 501)
"""What servers answer that do not let a request ask for the headers alone."""


def is_address(uri: str) -> bool:
    """Whether `uri` has a host, a valid port, and no user name or password.

    Spaces and characters outside ASCII have to be percent-encoded, as %20.
    """
    try:
        parts = urlsplit(uri)
        plain = uri.isascii() and uri.isprintable() and " " not in uri
        return plain and bool(parts.hostname) and parts.username is None and parts.port != 0
    except ValueError:
        return False


@retried
def fetch_http(uri: str, folder: Path) -> Path:
    """Download `uri` into `folder`, named after the last part of its path, or `download`.

    Raises:
        UserError: `uri` is not an address.
        URLError, ConnectionError: the server cannot be reached, refuses, or sends too few bytes.
    """
    _require_address(uri)
    target = folder / (PurePosixPath(urlsplit(uri).path).name or "download")
    request = urllib.request.Request(uri, headers={"User-Agent": "lathe"})
    with (
        opener().open(request, timeout=network_timeout()) as response,
        atomic_file(target) as work,
    ):
        with work.open("wb") as file:
            shutil.copyfileobj(response, file)
            received = file.tell()
        announced = response.headers.get("Content-Length")
        # http.client does not report a truncated body.
        if announced and announced.isdecimal() and received < int(announced):
            raise ConnectionError(f"{received} of {announced} bytes, then the connection closed")
    return target


@retried
def validator(uri: str) -> str | None:
    """What the server says of the bytes at `uri` without sending them: its strong ETag or, where
    there is none, their number and when they last changed. None if it says neither.

    Raises:
        UserError: `uri` is not an address.
        URLError, ConnectionError: the server cannot be reached, or there is nothing.
    """
    _require_address(uri)
    request = urllib.request.Request(uri, headers={"User-Agent": "lathe"}, method="HEAD")
    try:
        with opener().open(request, timeout=network_timeout()) as response:
            headers = response.headers
    except urllib.error.HTTPError as error:
        if error.code in NO_HEAD:
            return None
        raise
    etag, length, time = (headers.get(k) for k in ("ETag", "Content-Length", "Last-Modified"))
    if etag and not etag.startswith("W/"):
        return str(etag)
    return f"{length} bytes, {time}" if length and time else None


def _require_address(uri: str) -> None:
    if not is_address(uri) or PurePosixPath(urlsplit(uri).path).name == "..":
        raise UserError(
            f"{shown(uri)}: not an address",
            "write http://host:port/path without a password, and a space or an accent as %20",
        )

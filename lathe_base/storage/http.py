"""Download a file from a web server."""

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path, PurePosixPath
from urllib.parse import urljoin, urlsplit

from urllib3 import BaseHTTPResponse

from lathe_base.errors import Code, UserError
from lathe_base.storage.failures import StoreError, retried, shown
from lathe_base.storage.files import atomic_file
from lathe_base.storage.network import pool

READ_BYTES = 1 << 20
MAX_REDIRECTS = 10
NO_HEAD = ("403", "405", "501")
"""Status codes of servers that do not support HEAD requests."""


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
        StoreError, HTTPError: the server cannot be reached, rejects the request, or sends too few
            bytes.
    """
    _require_address(uri)
    target = folder / (PurePosixPath(urlsplit(uri).path).name or "download")
    with _answer("GET", uri) as response, atomic_file(target) as work, work.open("wb") as file:
        shutil.copyfileobj(response, file, READ_BYTES)
    return target


@retried
def validator(uri: str) -> str | None:
    """The server's validator of the content at `uri`, without downloading it: the strong ETag or,
    if there is none, the length and modification time. None if the server reports neither.

    Raises:
        UserError: `uri` is not an address.
        StoreError, HTTPError: the server cannot be reached, or the file does not exist.
    """
    _require_address(uri)
    try:
        with _answer("HEAD", uri) as response:
            headers = response.headers
    except StoreError as error:
        if error.code in NO_HEAD:
            return None
        raise
    etag, length, time = (headers.get(k) for k in ("ETag", "Content-Length", "Last-Modified"))
    if etag and not etag.startswith("W/"):
        return etag
    return f"{length} bytes, {time}" if length and time else None


@contextmanager
def _answer(method: str, uri: str) -> Iterator[BaseHTTPResponse]:
    """The response, after redirects, with an unread body."""
    for _ in range(MAX_REDIRECTS):
        # Redirects are followed here, so that every address is checked before it is asked, and gets
        # the proxy of its own host.
        response = pool(1, address=uri).request(
            *(method, uri),
            headers={"User-Agent": "lathe"},
            retries=False,
            redirect=False,
            preload_content=False,
            decode_content=False,  # the file as it is, which may be compressed
        )
        with closing(response):
            location = response.get_redirect_location()
            if not location:
                if response.status >= 300:
                    raise StoreError(response.reason or "", str(response.status))
                yield response
                return
        uri = urljoin(uri, location)
        if urlsplit(uri).scheme not in ("http", "https") or not is_address(uri):
            break
    raise StoreError("redirected", str(response.status))


def _require_address(uri: str) -> None:
    if not is_address(uri) or PurePosixPath(urlsplit(uri).path).name == "..":
        raise UserError(
            f"{shown(uri)}: not an address",
            "write http://host:port/path without a password, and escape spaces and accents, as in "
            "%20",
            Code.BAD_PATH,
        )

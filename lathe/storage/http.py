"""A file from a web server."""

import shutil
import urllib.request
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from lathe.errors import UserError
from lathe.storage.failures import retried, shown
from lathe.storage.files import atomic_file
from lathe.storage.network import network_timeout, opener


def is_address(uri: str) -> bool:
    """Whether there is a host and nothing wrong with the port; a password is wrong too.

    What is not ASCII, or blank, has to be spelled %20.
    """
    try:
        parts = urlsplit(uri)
        plain = uri.isascii() and uri.isprintable() and " " not in uri
        return plain and bool(parts.hostname) and parts.username is None and parts.port != 0
    except ValueError:
        return False


@retried
def fetch_http(uri: str, folder: Path) -> Path:
    """Download `uri` into `folder` under the last part of its path, or `download`."""
    if not is_address(uri) or PurePosixPath(urlsplit(uri).path).name == "..":
        raise UserError(
            f"{shown(uri)}: not an address",
            "write http://host:port/path, with no password, and a blank or an accent as %20",
        )
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
        # http.client ends a body that was cut short without a word.
        if announced and announced.isdecimal() and received < int(announced):
            raise ConnectionError(f"{received} of {announced} bytes, then the connection closed")
    return target

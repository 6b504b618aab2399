"""A file from a web server."""

import shutil
import urllib.request
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from lathe.storage.failures import retried
from lathe.storage.files import atomic_file

TIMEOUT_SECONDS = 60.0


@retried
def fetch_http(uri: str, folder: Path) -> Path:
    """Download `uri` into `folder` under the last part of its path, or `download`."""
    target = folder / (PurePosixPath(urlsplit(uri).path).name or "download")
    request = urllib.request.Request(uri, headers={"User-Agent": "lathe"})
    with (
        urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response,
        atomic_file(target) as work,
    ):
        with work.open("wb") as file:
            shutil.copyfileobj(response, file)
            received = file.tell()
        announced = response.headers.get("Content-Length")
        # http.client ends a body that was cut short without a word.
        if announced is not None and received < int(announced):
            raise ConnectionError(f"{received} of {announced} bytes, then the connection closed")
    return target

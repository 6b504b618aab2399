"""Files and folders that are whole or absent, and the same call for a path and an address."""

from pathlib import Path
from urllib.parse import urlsplit

from lathe.errors import UserError
from lathe.storage.download import fetch_s3
from lathe.storage.failures import explained
from lathe.storage.files import atomic_file, atomic_folder, digest, require_replaceable, sha256
from lathe.storage.http import fetch_http
from lathe.storage.s3 import (
    SCHEMES,
    exists,
    list_uris,
    read_text,
    remove,
    s3_client,
    write_text,
)
from lathe.storage.upload import upload

__all__ = [
    "atomic_file",
    "atomic_folder",
    "digest",
    "exists",
    "fetch",
    "is_remote",
    "list_uris",
    "read_text",
    "remove",
    "require_replaceable",
    "s3_client",
    "sha256",
    "upload",
    "write_text",
]


def is_remote(uri: str) -> bool:
    """Whether `fetch` would go to a network for it."""
    return urlsplit(uri).scheme in ("http", "https", *SCHEMES)


def fetch(uri: str, folder: Path) -> Path:
    """A local path for `uri`: a path as it is, an address downloaded into `folder`.

    `s3://bucket/key` (or `minio://`) is one object, or, where there is none, the prefix
    `s3://bucket/key/`: every object below it, as a folder. A prefix that `upload` put is checked
    against its manifest. Nothing is seen in the folder until all has arrived; what a broken fetch
    has brought waits there under a hidden name, and the next one goes on with it.

    The store is the one that the AWS variables name: `AWS_ENDPOINT_URL` (default: Amazon's),
    `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`; without a key
    the request is anonymous. `LATHE_S3_SECRET_DIR` names a folder whose files `accesskey` and
    `secretkey` take the place of the two keys. Failures that may pass (connection, time-out,
    status 5xx, a body cut short) are tried four times.

    Raises:
        UserError: nothing there, the store refuses the credentials, or does not answer; a prefix
            that is torn or not yet whole; no space on the disk.
    """
    if not is_remote(uri):
        path = Path(uri)
        if not uri or not path.exists():
            raise UserError(
                f"{uri or 'an empty address'}: no such file or folder", "check the path"
            )
        return path
    with explained(uri, folder):
        folder.mkdir(parents=True, exist_ok=True)
        if urlsplit(uri).scheme in SCHEMES:
            return fetch_s3(uri, folder)
        return fetch_http(uri, folder)

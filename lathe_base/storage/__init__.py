"""Atomic files and folders, and the same calls for paths and for addresses in a store."""

from collections.abc import Container
from pathlib import Path

from lathe_base.errors import Code, UserError, explain_os_error, printable
from lathe_base.storage.download import fetch_stored, sizes_below
from lathe_base.storage.failures import explained
from lathe_base.storage.files import atomic_file, digest, sha256
from lathe_base.storage.http import fetch_http
from lathe_base.storage.object_store import is_store, uri_scheme
from lathe_base.storage.objects import (
    claim_address,
    exists,
    list_objects,
    list_uris,
    read_text,
    remove,
    replace_text,
    write_text,
)
from lathe_base.storage.ownership import (
    atomic_folder,
    claim_output_file,
    claim_output_folder,
    locked,
    require_apart,
    require_utf8,
)
from lathe_base.storage.upload import upload

__all__ = [
    "atomic_file",
    "atomic_folder",
    "claim_address",
    "claim_output_file",
    "claim_output_folder",
    "digest",
    "exists",
    "fetch",
    "is_remote",
    "is_store",
    "list_objects",
    "list_uris",
    "locked",
    "read_text",
    "remove",
    "replace_text",
    "require_apart",
    "require_utf8",
    "sha256",
    "sizes_below",
    "upload",
    "uri_scheme",
    "write_text",
]


def is_remote(uri: str) -> bool:
    """Whether `uri` is an address that `fetch` downloads, from a store or a web server."""
    return is_store(uri) or uri_scheme(uri) in ("http", "https")


def fetch(uri: str, folder: Path, only: Container[str] | None = None) -> Path:
    """The local path of `uri`: a path is returned as it is, an address is downloaded to `folder`.

    `s3://bucket/key` (or `minio://`) is one object or, if there is none, the prefix
    `s3://bucket/key/`: every object below it, as a folder. A prefix that `upload` wrote is checked
    against its manifest. Files appear in the folder only when all have arrived; what an interrupted
    fetch has downloaded is kept there under a hidden name, and the next fetch resumes it. `only`
    names the files of a prefix to download, of which all are by default.

    `file:///path` is the same in a folder that is a store (`lathe_base.storage.local`); write a
    space there as it is, not as %20. The AWS variables name the store of `s3://`:
    `AWS_ENDPOINT_URL` (default: Amazon's) and `AWS_REGION`; `lathe_base.storage.credentials` says
    where the keys come from, and without keys the request is anonymous. Transient failures
    (connection, status 5xx, a truncated body) are tried four times in all; a server that is silent
    for LATHE_NETWORK_TIMEOUT (15 seconds by default) is tried twice.

    Raises:
        UserError: nothing there, the store refuses the credentials or does not answer, the prefix
            is damaged or incomplete, or the disk is full.
    """
    if not is_remote(uri):
        path = Path(uri)
        try:
            is_local = bool(uri) and path.exists()
        except OSError as error:
            raise explain_os_error(error, path) from None
        if not is_local:
            if not uri:  # `Path("")` would be the working directory
                raise UserError("an empty address", "give a path", Code.BAD_PATH)
            raise UserError(
                f"{printable(uri)}: no such file or folder", "check the path", Code.NOT_FOUND
            )
        return path
    with explained(uri, folder):
        folder.mkdir(parents=True, exist_ok=True)
        if is_store(uri):
            return fetch_stored(uri, folder, only)
        return fetch_http(uri, folder)

"""Files and folders that are whole or absent, and the same call for a path and an address."""

from pathlib import Path

from lathe.errors import UserError, explain_os_error, printable
from lathe.storage.download import fetch_stored
from lathe.storage.failures import explained
from lathe.storage.files import atomic_file, digest, sha256
from lathe.storage.http import fetch_http
from lathe.storage.objects import (
    claim_address,
    exists,
    list_uris,
    read_text,
    remove,
    replace_text,
    write_text,
)
from lathe.storage.outputs import atomic_folder, locked
from lathe.storage.ownership import claim_output_file, claim_output_folder, require_apart
from lathe.storage.stores import is_store, scheme_of
from lathe.storage.upload import upload

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
    "list_uris",
    "locked",
    "read_text",
    "remove",
    "replace_text",
    "require_apart",
    "scheme_of",
    "sha256",
    "upload",
    "write_text",
]


def is_remote(uri: str) -> bool:
    """Whether it is an address, of a store or of a web server, which `fetch` brings."""
    return is_store(uri) or scheme_of(uri) in ("http", "https")


def fetch(uri: str, folder: Path) -> Path:
    """A local path for `uri`: a path as it is, an address downloaded into `folder`.

    `s3://bucket/key` (or `minio://`) is one object, or, where there is none, the prefix
    `s3://bucket/key/`: every object below it, as a folder. A prefix that `upload` put is checked
    against its manifest. Nothing is seen in the folder until all has arrived; what a broken fetch
    has brought waits there under a hidden name, and the next one goes on with it.

    `file:///path` is the same in a folder that is a store (`lathe.storage.local`); a blank is
    spelled as one there, not as %20. The store of `s3://` is the one that the AWS variables name:
    `AWS_ENDPOINT_URL` (default: Amazon's), `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`,
    `AWS_SESSION_TOKEN`, `AWS_REGION`; without a key
    the request is anonymous. `LATHE_S3_SECRET_DIR` names a folder whose files `accesskey` and
    `secretkey` take the place of the two keys. Failures that may pass (connection, status
    5xx, a body cut short) are tried four times, a server that is silent for LATHE_NETWORK_TIMEOUT
    (15 seconds unless set) twice.

    Raises:
        UserError: nothing there, the store refuses the credentials, or does not answer; a prefix
            that is torn or not yet whole; no space on the disk.
    """
    if not is_remote(uri):
        path = Path(uri)
        try:
            found = bool(uri) and path.exists()
        except OSError as error:
            raise explain_os_error(error, path) from None
        if not found:
            what = printable(uri) if uri else "an empty address"
            raise UserError(f"{what}: no such file or folder", "check the path")
        return path
    with explained(uri, folder):
        folder.mkdir(parents=True, exist_ok=True)
        if is_store(uri):
            return fetch_stored(uri, folder)
        return fetch_http(uri, folder)

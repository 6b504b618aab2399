"""What goes wrong on the way to a store: what is tried again, and what the user reads."""

import errno
import http.client
import os
import re
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import urllib3
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError
from tenacity import retry, retry_if_exception, stop_after_attempt, wait_exponential_jitter

from lathe.errors import UserError

BUSY = {"429", "InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown"}
MISSING = {"404", "410", "NoSuchBucket", "NoSuchKey"}
REFUSED = {"401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
CHANGED = {"412", "PreconditionFailed"}
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
NETWORK_ERRORS = (
    urllib.error.URLError,
    http.client.HTTPException,
    urllib3.exceptions.HTTPError,
    MinioException,
    ConnectionError,
    TimeoutError,
)


class Damaged(ConnectionError):
    """The bytes at the other end are not those that were sent."""


def status(error: BaseException | None) -> str:
    """HTTP status or S3 error code that came back, empty if none did."""
    if isinstance(error, urllib.error.HTTPError):
        return str(error.code)
    if isinstance(error, ServerError):
        return str(error.status_code)
    if isinstance(error, S3Error):
        return error.code or ""
    if isinstance(error, InvalidResponseError):  # the right XML as text/xml, as rclone sends it
        found = re.search(
            r"<Code>(\w+)</Code>|Response code: (\d+), (?!.*<Code>)", str(error), re.S
        )
        return found[1] or found[2] if found else ""
    return ""


def _transient(error: BaseException) -> bool:
    if code := status(error):
        return code.startswith("5") or code in BUSY
    return isinstance(error, NETWORK_ERRORS)


retried = retry(
    retry=retry_if_exception(_transient),
    stop=stop_after_attempt(4),
    wait=wait_exponential_jitter(initial=0.25, max=8, jitter=0.25),
    reraise=True,
)


@contextmanager
def explained(uri: str, disk: Path | None = None) -> Iterator[None]:
    """Turn what the network, the store and the disk say into UserError.

    Args:
        disk: what is written or read on this machine.
    """
    try:
        yield
    except UserError:
        raise
    except NETWORK_ERRORS as error:
        raise _explain(uri, error) from error
    except OSError as error:
        where = f"{shown(uri)}: {error.filename or disk}"
        if error.errno in DISK_FULL:
            raise UserError(
                f"{where}: the disk is full",
                "free some space and run it again: what has arrived is kept",
            ) from error
        raise UserError(f"{where}: {error.strerror or error}", "check the path") from error
    except ValueError as error:  # the minio client's, about a bucket's name or half a credential
        raise UserError(
            f"{shown(uri)}: {error}", "check the address and the AWS variables"
        ) from error


def shown(uri: str) -> str:
    """The address without what may be a secret in it: a password, a signature."""
    if uri.startswith(("s3:", "minio:")):
        return uri
    return re.split(r"[?#]", re.sub(r"//.*@", "//", uri))[0]


def _explain(uri: str, error: Exception) -> UserError:
    code = status(error)
    is_s3 = not uri.startswith("http")
    what = shown(uri)
    if code == "NoSuchBucket":
        return UserError(f"{what}: not found (NoSuchBucket)", "make the bucket or check its name")
    if code in MISSING:
        return UserError(f"{what}: not found ({code})", "check the address")
    if code in REFUSED:
        return UserError(
            f"{what}: access refused ({code})",
            _credentials_cure() if is_s3 else "check that the address can be read unauthenticated",
        )
    if code in CHANGED:
        return UserError(f"{what}: it changed while it was fetched", "run it again")
    if code:
        return UserError(f"{what}: the store answered {code}", "look into the store's own log")
    if isinstance(error, Damaged):
        return UserError(f"{what}: {error}", "run it again; if it stays, check the store's disks")
    store = os.environ.get("AWS_ENDPOINT_URL") if is_s3 else None
    return UserError(
        f"{what}: no answer{f' from {shown(store)}' if store else ''}: {error}",
        "check the network" + (" and AWS_ENDPOINT_URL" if store else " and the address"),
    )


def _credentials_cure() -> str:
    if folder := os.environ.get("LATHE_S3_SECRET_DIR"):
        return f"check the files accesskey and secretkey in {folder} (LATHE_S3_SECRET_DIR)"
    return "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"

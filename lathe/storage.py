"""Files and folders that are whole or absent, and the same call for a path and an address."""

import hashlib
import os
import re
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import urllib3
from minio import Minio
from minio.error import InvalidResponseError, MinioException, S3Error
from tenacity import retry, retry_if_exception, stop_after_attempt, wait_exponential_jitter

from lathe.errors import UserError

HTTP_SCHEMES = ("http", "https")
S3_SCHEMES = ("s3", "minio")
TIMEOUT_SECONDS = 60.0
BUSY = {"429", "InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown"}
MISSING = {"404", "410", "NoSuchBucket", "NoSuchKey"}
REFUSED = {"401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
NETWORK_ERRORS = (
    urllib.error.URLError,
    urllib3.exceptions.HTTPError,
    MinioException,
    ConnectionError,
    TimeoutError,
)


def digest(text: str) -> str:
    """Hex SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def require_replaceable(output: Path, marker: str) -> None:
    """Raise UserError where `output` is a file, or a folder of something else: one that is neither
    empty nor holds `marker` (a pattern)."""
    if output.is_file() or (
        output.is_dir() and any(output.iterdir()) and not any(output.glob(marker))
    ):
        raise UserError(
            f"{output}: exists, and what is there has no {marker}",
            "give a new or an empty folder as output",
        )


@contextmanager
def atomic_folder(output: Path, marker: str) -> Iterator[Path]:
    """Yield a temporary folder beside `output`; it takes output's place only on success.

    An earlier output, known by `marker`, is replaced.

    Raises:
        UserError: see `require_replaceable`.
    """
    require_replaceable(output, marker)
    output.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        yield work
        work.chmod(0o755)
        if output.exists():
            shutil.rmtree(output)
        os.replace(work, output)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


@contextmanager
def atomic_file(output: Path) -> Iterator[Path]:
    """Yield a temporary name beside `output`; it takes output's name only on success."""
    output.parent.mkdir(parents=True, exist_ok=True)
    work = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        yield work
        os.replace(work, output)
    finally:
        work.unlink(missing_ok=True)


def is_remote(uri: str) -> bool:
    """Whether `fetch` would go to a network for it."""
    return urlsplit(uri).scheme in (*HTTP_SCHEMES, *S3_SCHEMES)


def fetch(uri: str, folder: Path) -> Path:
    """A local path for `uri`: a path as it is, an address downloaded into `folder`.

    `s3://bucket/key` (or `minio://`) is one object, `s3://bucket/prefix/` every object below the
    prefix, as a folder. The store is the one that the AWS variables name: `AWS_ENDPOINT_URL`
    (default: Amazon's), `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`,
    `AWS_REGION`; without a key the request is anonymous. Failures that may pass (connection,
    time-out, status 5xx, a body cut short) are tried four times.

    Raises:
        UserError: nothing there, the store refuses the credentials, or does not answer.
    """
    if not is_remote(uri):
        path = Path(uri)
        if not path.exists():
            raise UserError(f"{uri}: no such file or folder", "check the path")
        return path
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if urlsplit(uri).scheme in HTTP_SCHEMES:
            return _fetch_http(uri, folder)
        return _fetch_s3(uri, folder)
    except NETWORK_ERRORS as error:
        raise _explain(uri, error) from error
    except ValueError as error:  # the minio client's, about a bucket's name or half a credential
        if isinstance(error, UserError):
            raise
        raise UserError(f"{uri}: {error}", "check the address and the AWS variables") from error


def _status(error: BaseException) -> str:
    """HTTP status or S3 error code that came back, empty if none did."""
    if isinstance(error, urllib.error.HTTPError):
        return str(error.code)
    if isinstance(error, S3Error):
        return error.code or ""
    if isinstance(error, InvalidResponseError):  # the right XML as text/xml, as rclone sends it
        found = re.search(
            r"<Code>(\w+)</Code>|Response code: (\d+), (?!.*<Code>)", str(error), re.S
        )
        return found[1] or found[2] if found else ""
    return ""


def _transient(error: BaseException) -> bool:
    status = _status(error)
    if status:
        return status.startswith("5") or status in BUSY
    return isinstance(error, NETWORK_ERRORS)


_retried = retry(
    retry=retry_if_exception(_transient),
    stop=stop_after_attempt(4),
    wait=wait_exponential_jitter(initial=0.25, max=8, jitter=0.25),
    reraise=True,
)


@_retried
def _fetch_http(uri: str, folder: Path) -> Path:
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


def _fetch_s3(uri: str, folder: Path) -> Path:
    address = urlsplit(uri)
    bucket, key = address.netloc, address.path.removeprefix("/")
    if not bucket or not key:
        raise UserError(f"{uri}: not an object's address", "write s3://bucket/key")
    client = s3_client()
    if not key.endswith("/"):
        return _fetch_object(client, bucket, key, folder / PurePosixPath(key).name)
    keys = _list_objects(client, bucket, key)
    if not keys:
        raise UserError(f"{uri}: no object below it", "check the bucket and the prefix")
    for found in keys:
        relative = PurePosixPath(found.removeprefix(key))
        if ".." in relative.parts:
            raise UserError(f"s3://{bucket}/{found}: a key with '..'", "rename the object")
        _fetch_object(client, bucket, found, folder / relative)
    return folder


@_retried
def _list_objects(client: Minio, bucket: str, prefix: str) -> list[str]:
    listed = client.list_objects(bucket, prefix=prefix, recursive=True)
    return sorted(o.object_name for o in listed if o.object_name and o.object_name[-1] != "/")


@_retried
def _fetch_object(client: Minio, bucket: str, key: str, target: Path) -> Path:
    response = client.get_object(bucket, key)
    try:
        with atomic_file(target) as work, work.open("wb") as file:
            for chunk in response.stream(1 << 20):
                file.write(chunk)
    finally:
        response.close()
        response.release_conn()
    return target


def s3_client() -> Minio:
    """A client for the store that the AWS environment variables describe."""
    endpoint = urlsplit(os.environ.get("AWS_ENDPOINT_URL") or "https://s3.amazonaws.com")
    if endpoint.scheme not in HTTP_SCHEMES or not endpoint.netloc:
        raise UserError(
            f"AWS_ENDPOINT_URL={endpoint.geturl()}: not an address", "write http://host:port"
        )
    return Minio(
        endpoint.netloc,
        access_key=os.environ.get("AWS_ACCESS_KEY_ID"),
        secret_key=os.environ.get("AWS_SECRET_ACCESS_KEY"),
        session_token=os.environ.get("AWS_SESSION_TOKEN"),
        region=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
        secure=endpoint.scheme == "https",
        # Its own client retries for minutes; the policy here is the only one.
        http_client=urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=10, read=TIMEOUT_SECONDS), retries=False
        ),
    )


def _explain(uri: str, error: Exception) -> UserError:
    status = _status(error)
    is_s3 = urlsplit(uri).scheme in S3_SCHEMES
    if status in MISSING:
        return UserError(f"{uri}: not found ({status})", "check the address")
    if status in REFUSED:
        return UserError(
            f"{uri}: access refused ({status})",
            "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            if is_s3
            else "check that the address can be read without signing in",
        )
    store = os.environ.get("AWS_ENDPOINT_URL") if is_s3 else None
    return UserError(
        f"{uri}: no answer{f' from {store}' if store else ''}: {error}",
        "check the network" + (" and AWS_ENDPOINT_URL" if store else " and the address"),
    )

"""An S3 store: its address, its client, and the small requests."""

import io
import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from minio import Minio
from minio.deleteobjects import DeleteObject
from minio.error import MinioException

from lathe.errors import UserError
from lathe.storage.failures import MISSING, explained, retried, shown, status
from lathe.storage.http import is_address
from lathe.storage.manifest import MARKER, OWN_NAMES, UNFINISHED, require_relative
from lathe.storage.network import pool
from lathe.storage.parts import PART_BYTES_HEADER

SCHEMES = ("s3", "minio")
CONNECTIONS = 8
LONG_AGO = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True)
class Stored:
    """An object as the store lists it."""

    key: str
    size: int  # bytes
    etag: str
    time: datetime
    part_bytes: str | None = None  # of its ETag, where Lathe put it; only `stat` knows


def parse(uri: str) -> tuple[str, str]:
    """Bucket and key of `s3://bucket/key` (or `minio://`).

    Raises:
        UserError: no bucket or key, another scheme, or a key with `..`.
    """
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme not in SCHEMES or not bucket or not key or "@" in bucket:
        raise UserError(
            f"{shown(uri)}: not an object's address",
            "write s3://bucket/key; credentials come from the AWS variables",
        )
    require_relative(key.removesuffix("/"), uri)
    return bucket, key


def endpoint() -> SplitResult:
    """The store's address, `http://host:port` or `https://host:port`."""
    uri = os.environ.get("AWS_ENDPOINT_URL") or "https://s3.amazonaws.com"
    if is_address(uri):
        address = urlsplit(uri)
        if address.scheme in ("http", "https") and address.path in ("", "/"):
            return address
    raise UserError(f"AWS_ENDPOINT_URL={shown(uri)}: not an address", "write http://host:port")


def s3_client(read_seconds: float | None = None) -> Minio:
    """A client for the store that the AWS variables, or a mounted secret, describe.

    Args:
        read_seconds: how long to wait for an answer; LATHE_NETWORK_TIMEOUT unless given.

    Raises:
        UserError: an address that is none, a secret that cannot be read.
    """
    address, (access_key, secret_key) = endpoint(), _credentials()
    return Minio(
        address.netloc,
        access_key=access_key,
        secret_key=secret_key,
        session_token=os.environ.get("AWS_SESSION_TOKEN"),
        region=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
        secure=address.scheme == "https",
        # Its own client retries for minutes; the policy here is the only one.
        http_client=pool(CONNECTIONS, read_seconds),
    )


def _credentials() -> tuple[str | None, str | None]:
    folder = os.environ.get("LATHE_S3_SECRET_DIR")
    if not folder:
        return os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    try:
        names = ("accesskey", "secretkey")
        access_key, secret_key = (
            (Path(folder) / name).read_text(encoding="utf-8").strip() for name in names
        )
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UserError(
            f"LATHE_S3_SECRET_DIR={folder}: accesskey and secretkey: {reason}",
            "mount the secret there, or unset the variable",
        ) from None
    return access_key, secret_key


@retried
def stat(client: Minio, bucket: str, key: str) -> Stored | None:
    """The object, or None where there is none."""
    try:
        found = client.stat_object(bucket, key)
    except MinioException as error:
        if status(error) in MISSING:
            return None
        raise
    return Stored(
        key,
        found.size or 0,
        found.etag or "",
        found.last_modified or LONG_AGO,
        (found.metadata or {}).get(PART_BYTES_HEADER),
    )


@retried
def list_below(client: Minio, bucket: str, prefix: str) -> dict[str, Stored]:
    """Every object below a prefix, by its name relative to it."""
    return {
        o.object_name.removeprefix(prefix): Stored(
            o.object_name, o.size or 0, o.etag or "", o.last_modified or LONG_AGO
        )
        for o in client.list_objects(bucket, prefix=prefix, recursive=True)
        if o.object_name and not o.object_name.endswith("/")
    }


def is_unfinished(names: Iterable[str]) -> bool:
    """Whether a prefix with these relative names is between none and whole."""
    return UNFINISHED in names and MARKER not in names


@retried
def get_text(client: Minio, bucket: str, key: str) -> str:
    response = client.get_object(bucket, key)
    try:
        return response.read().decode()
    finally:
        response.close()
        response.release_conn()


@retried
def put_text(client: Minio, bucket: str, key: str, text: str) -> None:
    data = text.encode()
    client.put_object(bucket, key, io.BytesIO(data), len(data), "application/json")


@retried
def remove_keys(client: Minio, bucket: str, keys: Iterable[str]) -> None:
    """Remove objects; one that is not there is no error."""
    for error in client.remove_objects(bucket, [DeleteObject(key) for key in keys]):
        raise UserError(
            f"s3://{bucket}/{error.name}: not removed ({error.code})",
            "check what the key may do",
        )


def exists(uri: str) -> bool:
    """Whether there is such an object, or a whole prefix: its marker, or, where Lathe did not put
    it, any object below it. An address without a final `/` may be either."""
    bucket, key = parse(uri)
    with explained(uri):
        client = s3_client()
        if not key.endswith("/") and stat(client, bucket, key):
            return True
        prefix = key.removesuffix("/") + "/"
        if stat(client, bucket, prefix + MARKER):
            return True
        return not stat(client, bucket, prefix + UNFINISHED) and _any_below(client, bucket, prefix)


@retried
def _any_below(client: Minio, bucket: str, prefix: str) -> bool:
    return any(True for _ in client.list_objects(bucket, prefix=prefix, recursive=True))


def remove(uri: str) -> None:
    """Remove an object, or a prefix with all below it, its marker first; nothing there is no
    error. An address without a final `/` is both."""
    bucket, key = parse(uri)
    with explained(uri):
        client = s3_client()
        if not key.endswith("/") and stat(client, bucket, key):
            remove_keys(client, bucket, [key])
        prefix = key.removesuffix("/") + "/"
        if below := list_below(client, bucket, prefix):
            begin_change(client, bucket, prefix)
            remove_keys(client, bucket, [prefix + n for n in below if n not in OWN_NAMES])
            remove_keys(client, bucket, [prefix + UNFINISHED])


def begin_change(client: Minio, bucket: str, prefix: str) -> str:
    """From now on until the marker is put, a reader finds nothing at the prefix.

    The text that this change, and no later one, has put there as UNFINISHED.
    """
    token = uuid.uuid4().hex
    put_text(client, bucket, prefix + UNFINISHED, token)
    remove_keys(client, bucket, [prefix + MARKER])
    return token


def list_uris(uri: str) -> list[str]:
    """Addresses of what lies directly in a prefix, the oldest first; a prefix ends in `/`.

    A prefix is as old as its marker, or the newest object below it where it has none. One whose
    upload or removal has not ended is left out.
    """
    bucket, key = parse(uri)
    prefix = key.removesuffix("/") + "/"
    with explained(uri):
        below = list_below(s3_client(), bucket, prefix)
    children: dict[str, dict[str, Stored]] = {}
    for name, stored in below.items():
        child, slash, rest = name.partition("/")
        if child not in OWN_NAMES:
            children.setdefault(child + slash, {})[rest] = stored
    times = {
        child: members[MARKER].time
        if MARKER in members
        else max(stored.time for stored in members.values())
        for child, members in children.items()
        if not is_unfinished(members)
    }
    scheme = uri.partition("://")[0]
    return [f"{scheme}://{bucket}/{prefix}{c}" for c in sorted(times, key=lambda c: (times[c], c))]


def read_text(uri: str) -> str:
    """The text of a small object.

    Raises:
        UserError: nothing there, refused, no answer, not UTF-8.
    """
    bucket, key = parse(uri)
    with explained(uri):
        return get_text(s3_client(), bucket, key)


def write_text(uri: str, text: str) -> None:
    """Put a small object, whole: a reader sees the old text or the new."""
    bucket, key = parse(uri)
    with explained(uri):
        put_text(s3_client(), bucket, key, text)

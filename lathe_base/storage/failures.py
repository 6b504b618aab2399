"""Failures of the network and the store: which ones are retried, and messages for the user."""

import errno
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from threading import Event
from typing import ParamSpec, TypeVar
from xml.etree import ElementTree

import urllib3
from tenacity import RetryCallState, retry, retry_if_exception, wait_exponential_jitter
from urllib3.exceptions import NewConnectionError

from lathe_base.errors import Code, StageError, Unavailable, UserError, explain_os_error, printable
from lathe_base.storage.network import PATIENCE, VARIABLE, network_patience
from lathe_base.storage.object_store import is_store

P = ParamSpec("P")
R = TypeVar("R")
log = logging.getLogger("lathe")

# HTTP status codes, and S3's error codes where the answer has one.
BUSY = {
    "429",
    "502",
    "503",
    "504",
    "InternalError",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
}
MISSING = {"404", "410", "NoSuchBucket", "NoSuchKey"}
REFUSED = {"401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
HIDING = {"403", "AccessDenied"}
HIDDEN = "or it does not exist: keys that may not list the bucket (s3:ListBucket) are not told that"
HINTS = {
    "AuthorizationHeaderMalformed": (
        Code.INVALID_VALUE,
        "set AWS_REGION to the region in the store's answer",
    ),
    "ExpiredToken": (
        Code.UNAUTHORIZED,
        "get new keys: AWS_SESSION_TOKEN and the keys that came with it have expired",
    ),
    "InvalidToken": (
        Code.UNAUTHORIZED,
        "AWS_SESSION_TOKEN does not belong to these keys: set all three, or unset it",
    ),
    "RequestTimeTooSkewed": (
        Code.UNAUTHORIZED,
        "set this machine's clock, which differs from the store's",
    ),
    "TemporaryRedirect": (
        Code.BAD_PATH,
        "set AWS_ENDPOINT_URL and AWS_REGION to those of the bucket; the address of a new bucket "
        "may take some hours to work everywhere",
    ),
    "PermanentRedirect": (
        Code.BAD_PATH,
        "set AWS_ENDPOINT_URL to the address of the bucket's own region",
    ),
}
"""Codes and hints for S3 error codes with a single fix."""
CHANGED = {"412", "ConditionalRequestConflict", "PreconditionFailed"}
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
NETWORK_ERRORS = (urllib3.exceptions.HTTPError, ConnectionError, TimeoutError)

# A retry of these takes as long again; a name server can be as silent as a store.
SLOW = (TimeoutError, urllib3.exceptions.TimeoutError, socket.gaierror)
IN_POD = "KUBERNETES_SERVICE_HOST"

_answered = Event()
"""Set once a server has answered this process: the address is then right, and a server that stops
answering is expected to come back."""


class Damaged(ConnectionError):
    """The received bytes differ from those sent."""


class StoreError(ConnectionError):
    """An object store rejected a request, or did not answer.

    Attributes:
        code: HTTP status or S3 error code of the answer, empty without one.
        store: the store's address, for the message.
        variable: the environment variable that sets this address.
        hint: what to check if the store rejects the credentials.
    """

    def __init__(
        self, what: str, code: str = "", store: str = "", variable: str = "", hint: str = ""
    ) -> None:
        super().__init__(what)
        self.code, self.store, self.variable, self.hint = code, store, variable, hint


def status(error: BaseException | None) -> str:
    """HTTP status or S3 error code of the answer, empty without one."""
    return error.code if isinstance(error, StoreError) else ""


def _transient(error: BaseException) -> bool:
    if code := status(error):
        return (code.startswith("5") and code != "501") or code in BUSY  # 501: not implemented
    return isinstance(error, NETWORK_ERRORS)


def timed_out(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, is a timeout."""
    # urllib3 wraps its errors in `reason` and in arguments, others chain theirs.
    seen: list[BaseException] = []
    pending = [error]
    while pending:
        error = pending.pop()
        if error is None or error in seen:
            continue
        # NewConnectionError, a refused connection, inherits from urllib3's timeout.
        if isinstance(error, SLOW) and not isinstance(error, NewConnectionError):
            return True
        seen.append(error)
        inner = [getattr(error, "reason", None), error.__cause__, error.__context__, *error.args]
        pending += [e for e in inner if isinstance(e, BaseException)]
    return False


def _attempts(error: BaseException | None) -> int:
    return 2 if timed_out(error) else 4


def _stop(state: RetryCallState) -> bool:
    """Stop after four attempts, or after two if the last one timed out; but keep waiting for a
    server that has answered before, or that a pod needs."""
    error = state.outcome.exception() if state.outcome else None
    if state.attempt_number < _attempts(error):
        return False
    # Unavailable: it did not answer, or answered that it is busy.
    code = status(error)
    is_unavailable = code in BUSY if code else not isinstance(error, Damaged)
    must_be_there = _answered.is_set() or IN_POD in os.environ
    if not is_unavailable or not must_be_there:
        return True
    return (state.seconds_since_start or 0) >= network_patience()


class _Outage:
    """Logs once that a server is unavailable, rather than once per connection."""

    AGAIN_SECONDS = 60
    said = -float(AGAIN_SECONDS)

    @classmethod
    def say(cls, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if state.attempt_number < _attempts(error):
            return
        if time.monotonic() < cls.said + cls.AGAIN_SECONDS:
            return
        cls.said = time.monotonic()
        who = getattr(error, "store", "") or "a server"
        log.warning(
            "%s does not answer, retrying for up to %.0f s (%s)",
            *(shown(who), network_patience(), PATIENCE),
        )


def _note_time(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    if error and timed_out(error):
        error.add_note(f"{state.seconds_since_start or 0:.0f} s")


def retried(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator for requests: retry after transient failures."""
    persistent = retry(
        retry=retry_if_exception(_transient),
        stop=_stop,
        after=_note_time,
        before_sleep=_Outage.say,
        wait=wait_exponential_jitter(multiplier=0.25, max=8, jitter=0.25),
        reraise=True,
    )(function)

    @wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        result = persistent(*arguments, **named)
        _answered.set()
        return result

    return call


@contextmanager
def explained(uri: str, disk: Path | None = None) -> Iterator[None]:
    """Turn errors of the network, the store and the disk into UserError or StageError.

    Args:
        disk: the local path that is written or read.
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
                "free some space and run it again: it will resume",
                Code.NO_SPACE,
            ) from error
        told = explain_os_error(error, disk)
        if isinstance(told, UserError):
            raise UserError(f"{shown(uri)}: {told.what}", told.hint, told.code) from error
        raise StageError(f"{shown(uri)}: {told}", told.code) from error
    except (ValueError, ElementTree.ParseError) as error:
        # From the minio client: a bad bucket name, one key without the other, an answer not in XML.
        raise UserError(
            f"{shown(uri)}: {_one_line(error)}",
            "check the address and the AWS variables",
            Code.BAD_PATH,
        ) from error


def shown(uri: str) -> str:
    """The address without secrets: passwords and signatures."""
    if is_store(uri):
        return printable(re.sub(r"//[^/]*@", "//", uri), 280)
    return printable(re.split(r"[?#]", re.sub(r"//.*@", "//", uri))[0], 280)


def _explain(uri: str, error: Exception) -> UserError:
    code = status(error)
    asked = error if isinstance(error, StoreError) else StoreError("")
    what = shown(uri)
    # The server has answered, with a code.
    if code == "NoSuchBucket":
        return UserError(
            f"{what}: not found (NoSuchBucket)",
            "create the bucket or check its name",
            Code.NOT_FOUND,
        )
    if code in MISSING:
        return UserError(f"{what}: not found ({code})", "check the address", Code.NOT_FOUND)
    if code in HINTS:
        meaning, hint = HINTS[code]
        return UserError(f"{what}: {_one_line(asked)} ({code})", hint, meaning)
    if code in REFUSED:
        hint = asked.hint or "check that the address can be read unauthenticated"
        if asked.hint and code in HIDING:
            hint = f"{hint}; {HIDDEN}"
        return UserError(
            f"{what}: access denied ({code})",
            hint,
            Code.FORBIDDEN if code in HIDING else Code.UNAUTHORIZED,
        )
    if code in CHANGED:
        return UserError(f"{what}: it changed during the download", "run it again", Code.CHANGED)
    if code.startswith("3"):
        return UserError(
            f"{what}: redirect loop, or redirect to something other than a web address",
            "check the address",
            Code.BAD_PATH,
        )
    if code:
        kind = Unavailable if code in BUSY else UserError
        said = f": {_one_line(error)}" if isinstance(error, StoreError) else ""
        answered = f"{what}: the store answered {code}{said}"
        return kind(answered, "check the store's log", Code.SERVER_ERROR)
    if isinstance(error, Damaged):
        return UserError(
            f"{what}: {error}",
            "run it again; if it persists, check the store's disks",
            Code.CORRUPT,
        )
    # It has not answered.
    source = f" from {shown(asked.store)}" if asked.store else ""
    hint = f"check the network and {asked.variable or 'the address'}"
    if timed_out(error):
        waited = (getattr(error, "__notes__", None) or ["the time allowed"])[-1]
        what = f"{what}: no answer{source} in {waited}"
        longer = f"{hint}; set {VARIABLE}=60 to wait longer"
        return Unavailable(f"{what}: {_one_line(error)}", longer, Code.TIMEOUT)
    return Unavailable(f"{what}: no answer{source}: {_one_line(error)}", hint)


def _one_line(error: Exception) -> str:
    """The error as one short line, whatever the server has answered."""
    return printable(" ".join(str(error).split()))

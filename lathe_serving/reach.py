"""Checks the address of a server, and explains why no server answers."""

import ipaddress
import re
from typing import Any
from urllib.parse import urlsplit

import grpc  # type: ignore[import-untyped]

from lathe_base.errors import Code, UserError

REACH_SECONDS = 5.0
"""Time limit of the connection and of a server's first answer."""

_HOST = r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])"
ADDRESS = re.compile(rf"{_HOST}:([0-9]{{1,5}})")
BASE_URL = re.compile(rf"https?://({_HOST})(?::([0-9]{{1,5}}))?(?:/[A-Za-z0-9._~-]+)+/?")


def require_address(url: str) -> None:
    """Raise UserError unless it is a gRPC address, `host:port`."""
    match = ADDRESS.fullmatch(url)
    if match is None or not 0 < int(match[1]) < 2**16:
        raise UserError(
            f"{url!r}: not a gRPC address",
            "write HOST:PORT without a scheme, such as localhost:8001",
            Code.INVALID_VALUE,
        )


def require_base_url(url: str) -> str:
    """The base URL of an OpenAI-compatible API, without a trailing slash.

    Raises:
        UserError: it is something else.
    """
    match = BASE_URL.fullmatch(url)
    is_valid = match is not None and 0 < int(match[2] or 80) < 2**16
    if match is not None and match[1].startswith("["):
        try:
            ipaddress.IPv6Address(match[1][1:-1])
        except ValueError:
            is_valid = False
    if not is_valid:
        raise UserError(
            f"{url!r}: not the base URL of an OpenAI-compatible API",
            "write http://HOST:PORT/v1, such as http://localhost:9000/v1",
            Code.INVALID_VALUE,
        )
    return url.rstrip("/")


def is_loopback(url: str) -> bool:
    """Whether a URL names this machine, which no proxy can reach."""
    return is_this_machine(urlsplit(url).hostname or "")


def is_this_machine(host: str) -> bool:
    """Whether a host name or address always refers to the local machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def nothing_listens(url: str) -> UserError:
    """The error if nothing listens on the port."""
    return UserError(f"no server answers on {url}", "start one with `make serve`", Code.UNREACHABLE)


def too_slow(url: str, timeout_seconds: float | None) -> UserError:
    """The error for a generation that exceeds its client's limit."""
    return UserError(
        f"no answer within {timeout_seconds:g} s from {url}",
        "ask for fewer tokens, or allow a longer timeout",
        Code.TIMEOUT,
    )


def unreachable(error: Any, url: str) -> UserError:
    """The error for a server that did not answer a readiness check."""
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return UserError(
            f"{url}: no answer within {REACH_SECONDS:g} s",
            "check that this is Triton's gRPC port; if it is, check the server's log",
            Code.TIMEOUT,
        )
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return nothing_listens(url)
    return UserError(
        f"{url}: not a Triton server: {error.code().name}: {error.details()}",
        "check the address",
        Code.SERVER_ERROR,
    )

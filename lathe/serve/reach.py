"""Check a gRPC address, and explain why no server answers there."""

import re
from typing import Any

import grpc  # type: ignore[import-untyped]

from lathe.errors import UserError

REACH_SECONDS = 5.0
"""Time limit of the connection and of a server's first answer."""

ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")


def require_address(url: str) -> None:
    """Raise UserError unless it is `host:port`."""
    match = ADDRESS.fullmatch(url)
    if match is None or not 0 < int(match[1]) < 2**16:
        raise UserError(
            f"{url!r}: not a gRPC address",
            "write HOST:PORT without a scheme, such as localhost:8001",
        )


def unreachable(error: Any, url: str) -> UserError:
    """The error for a server that did not answer whether it is ready."""
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return UserError(
            f"{url}: no answer within {REACH_SECONDS:g} s",
            "check that this is Triton's gRPC port; if it is, check the server's log",
        )
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return UserError(f"no server answers on {url}", "start one with `make serve`")
    return UserError(
        f"{url}: not a Triton server: {error.code().name}: {error.details()}", "check the address"
    )

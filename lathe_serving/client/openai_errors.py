"""Turns errors of an OpenAI-compatible API, and network errors, into messages for the client's
users."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from pydantic import BaseModel, ValidationError

from lathe_base.errors import StageError, UserError, printable
from lathe_serving.reach import REACH_SECONDS, nothing_listens, too_slow

KEY_VARIABLE = "LATHE_API_KEY"
CODES = {"overloaded": 503, "unavailable": 503}
HINTS = {
    "model_not_found": "give the name of the server's model: --model-name NAME",
    "context_length_exceeded": "give a shorter prompt, or ask for fewer tokens",
}


class ApiError(BaseModel):
    """An error in the API's format."""

    message: str
    type: str | None = None
    code: str | int | None = None

    @property
    def status(self) -> int:
        """The HTTP status that it would have had before the response began."""
        return CODES.get(str(self.code), 500 if self.type == "server_error" else 400)


def refusal(url: str, reply: httpx2.Response) -> Exception:
    """The exception for a response (already read) with a status other than 200."""
    try:
        error = ApiError.model_validate(json.loads(reply.content)["error"])
    except (ValueError, KeyError, TypeError, ValidationError):
        if reply.status_code < 500 and reply.status_code not in (401, 403, 429):
            return not_openai(url, reply.content, f"status {reply.status_code}: ")
        error = ApiError(message=f"status {reply.status_code}")
    return told(url, reply.status_code, error, reply.headers.get("retry-after", ""))


def told(url: str, status: int, error: ApiError, retry_after: str = "") -> Exception:
    """The exception for an error of the API.

    Args:
        retry_after: the header Retry-After.
    """
    message = printable(error.message, most=1000)
    if status in (401, 403):
        hint = f"set {KEY_VARIABLE} to one of the server's keys"
        return UserError(f"{url}: {message}", hint)
    if status in (429, 503):
        seconds = f"in {retry_after} s" if retry_after.isdecimal() else "later"
        return UserError(f"{url}: {message}", f"retry {seconds}")
    if status < 500:
        return UserError(message, HINTS.get(str(error.code), "change the request"))
    return StageError(f"{url}: {message}")


def not_openai(url: str, data: str | bytes, status: str = "") -> UserError:
    """The error for a response that is not from an OpenAI-compatible API."""
    text = data.decode(errors="replace") if isinstance(data, bytes) else data
    return UserError(
        f"{url}: not an OpenAI-compatible API: {status}{printable(text, most=100)!r}",
        "check the address; that of `make serve` is http://localhost:9000/v1",
    )


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Raise the user's error if the server does not answer at first.

    Raises:
        UserError: no answer, no answer in time, or an answer that is not HTTP.
    """
    try:
        yield
    except httpx2.TimeoutException:
        raise UserError(
            f"{url}: no answer within {REACH_SECONDS:g} s", "check the address and the server's log"
        ) from None
    except httpx2.NetworkError:
        raise nothing_listens(url) from None
    except httpx2.TransportError as error:
        raise not_openai(url, str(error)) from None


@contextmanager
def asking(url: str, timeout_seconds: float | None) -> Iterator[None]:
    """Raise the user's error if there is no response to a request, or it ends early.

    Raises:
        UserError: no answer, or no answer in time.
        StageError: the connection was lost.
    """
    try:
        yield
    except httpx2.ConnectError:
        raise nothing_listens(url) from None
    except httpx2.ConnectTimeout:
        raise too_slow(url, REACH_SECONDS) from None
    except httpx2.TimeoutException:
        raise too_slow(url, timeout_seconds) from None
    except httpx2.TransportError as error:
        raise StageError(
            f"{url}: the connection was lost before the answer was complete: {error}"
        ) from None

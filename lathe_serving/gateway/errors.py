"""Errors of the gateway: what a client is told when its request cannot be answered.

`ApiError` is the only one that reaches a client, in OpenAI's format or, with a body of its own, in
KServe's. `as_api_error` turns everything else into one.
"""

import logging
import re
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from lathe_base.errors import Code, StageError, UserError
from lathe_base.parameters import FIELDS

if TYPE_CHECKING:
    from starlette.responses import JSONResponse

log = logging.getLogger("lathe")

Json = dict[str, Any]

RETRY_SECONDS = 1
"""Seconds that a client should wait before it retries a busy server."""

ENDING = "shutting_down"
"""The error code of a gateway that is shutting down; the client should use another one."""

CANCELLED = "cancelled"
"""The backend's message about a model that is being unloaded."""

KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class TritonUnavailable(StageError):
    """Triton does not answer, or has ended a stream."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Code.UNREACHABLE)


class TritonDied(TritonUnavailable):
    """Triton crashed after it had received the request."""


class ApiError(Exception):
    """An error with its HTTP status.

    Args:
        param: the invalid field of the request.
        code: a name of the error for programs.
        retry_after: seconds after which the client should retry.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int = RETRY_SECONDS,
    ) -> None:
        message = message.encode(errors="replace").decode()  # it may quote half a character
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self._retry_after = retry_after

    def to_json(self) -> Json:
        """The body of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": KINDS.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, body: dict[str, object] | None = None) -> "JSONResponse":
        """The complete response.

        Args:
            body: for APIs other than OpenAI's.
        """
        # Here, because `template` is also imported where no server is installed.
        from starlette.responses import JSONResponse

        headers = {"Retry-After": str(self._retry_after)} if self.status in (429, 503) else {}
        if self.code == ENDING:
            # A kept-alive connection would bring the client's next request to this gateway again.
            headers["Connection"] = "close"
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(body or self.to_json(), self.status, headers)


def shutting_down() -> ApiError:
    """The error of requests that a gateway no longer answers."""
    return ApiError(503, "the server is shutting down", code=ENDING)


def api_code(error: UserError) -> str | None:
    """OpenAI's code for an invalid request; None if it has none."""
    return "context_length_exceeded" if error.code is Code.TOO_LONG else None


def as_api_error(error: BaseException) -> ApiError:
    """Convert an exception to an error for the client; unexpected ones are logged."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]  # of a task group; the others were cancelled by the first
    match error:
        case ApiError():
            return error
        case ValidationError():
            # Only the first mistake: the next ones are often consequences of it.
            first = error.errors(include_url=False)[0]
            message = first["msg"].removeprefix("Value error, ")
            if not first["loc"]:
                return ApiError(400, message)
            # The path in OpenAI's format: `messages[1].role`.
            parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
            param = "".join(parts).removeprefix(".")
            is_missing = first["type"] == "missing"
            value = "" if is_missing else f" (given: {str(first['input'])[:100]!r})"
            return ApiError(400, f"{param}: {message}{value}", param=param)
        case UserError(what=what):
            if error.code is Code.BUSY:
                return ApiError(503, what, code="overloaded")
            if error.code is Code.NOT_FOUND:
                # Triton has not loaded it; one that the gateway does not know is answered 404.
                return ApiError(503, "the model is not loaded", code="unavailable")
            name = re.split("[: ]", what, maxsplit=1)[0]
            param_name = name if name in FIELDS else None
            return ApiError(400, f"{what}: {error.hint}", param=param_name, code=api_code(error))
        case TritonUnavailable():
            return ApiError(503, "the model server does not answer", code="unavailable")
        case StageError():
            if str(error) == CANCELLED:  # and not by the client, who would not be told
                return ApiError(503, "the model was unloaded", code="unavailable")
            return ApiError(500, "the model server failed")
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the gateway failed")

"""Errors in the format of the OpenAI API."""

import re
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from lathe_base.errors import UserError
from lathe_serving.gateway.quarantine import TritonUnavailable
from lathe_serving.runtime.params import FIELDS
from lathe_serving.runtime.protocol import BUSY

RETRY_SECONDS = 1
"""Seconds that a client should wait before it retries a busy server."""

ENDING = "shutting_down"
"""The error code of a gateway that is shutting down; the client should use another one."""

UNKNOWN, CANCELLED = "unknown model", "cancelled"
"""Messages of Triton and the backend about a model that is being unloaded."""

KINDS = {401: "authentication_error", 429: "rate_limit_error"}


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

    def to_json(self) -> dict[str, Any]:
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

    def response(self, body: dict[str, object] | None = None) -> JSONResponse:
        """The complete response.

        Args:
            body: for APIs other than OpenAI's.
        """
        headers = {"Retry-After": str(self._retry_after)} if self.status in (429, 503) else {}
        if self.code == ENDING:
            headers["Connection"] = "close"
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(body or self.to_json(), self.status, headers)


def of_backend(error: Exception) -> ApiError:
    """Convert a backend failure to an API error."""
    if isinstance(error, UserError):
        if error.what.startswith(BUSY):
            return ApiError(503, error.what, code="overloaded")
        if UNKNOWN in error.what:  # to Triton; the gateway knows it
            return ApiError(503, "the model is not loaded", code="unavailable")
        code = "context_length_exceeded" if "positions" in error.what else None
        name = re.split("[: ]", error.what, maxsplit=1)[0]
        param = name if name in FIELDS else None
        return ApiError(400, f"{error.what}: {error.hint}", param=param, code=code)
    if isinstance(error, TritonUnavailable):
        return ApiError(503, "the model server does not answer", code="unavailable")
    if str(error) == CANCELLED:  # and not by the client, who would not be told
        return ApiError(503, "the model was unloaded", code="unavailable")
    return ApiError(500, "the model server failed")


def of_validation(error: ValidationError) -> ApiError:
    """The first mistake in a request's body."""
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return ApiError(400, message)
    # The path in OpenAI's format: `messages[1].role`.
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    param = "".join(parts).removeprefix(".")
    value = "" if first["type"] == "missing" else f" (given: {str(first['input'])[:100]!r})"
    return ApiError(400, f"{param}: {message}{value}", param=param)

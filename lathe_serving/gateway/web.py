"""Protection against cross-site requests from web browsers, and request ids.

Any web page can make a browser send requests to this machine, and with a domain that resolves to it
(DNS rebinding) it can read the responses. So a request from a page is only answered if the page's
origin is allowed, and a gateway that listens on loopback only answers to this machine's host names.
Requiring the JSON content type (`Endpoint`) blocks the requests that browsers send without a
preflight.
"""

import re
import uuid
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lathe_serving.gateway.errors import ApiError
from lathe_serving.reach import is_this_machine

REQUEST_ID = "x-request-id"
_ID = re.compile(r"[!-~]{1,128}")


class Web:
    """ASGI middleware.

    Args:
        origins: allowed origins of web pages.
        hosts: allowed host names besides this machine's and those of the origins, for example
            that of a proxy; `*` allows all.
        is_local: whether the gateway listens on loopback only.
    """

    def __init__(
        self, app: ASGIApp, origins: Sequence[str], hosts: Sequence[str], is_local: bool
    ) -> None:
        self._app, self._origins = app, set(origins)
        self._hosts: set[str | None] | None = None
        if is_local and "*" not in hosts:
            self._hosts = {urlsplit(origin).hostname for origin in origins}
            self._hosts |= {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get(REQUEST_ID, "")
        name = request_id if _ID.fullmatch(request_id) else uuid.uuid4().hex
        scope["state"][REQUEST_ID] = name

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = name
            await send(message)

        error = self._refusal(headers)
        await (error.response() if error else self._app)(scope, receive, named)

    def _refusal(self, headers: Headers) -> ApiError | None:
        if self._hosts is not None and "host" in headers:  # HTTP/1.0 may have none, browsers do
            host = _hostname(headers["host"])
            is_ours = is_this_machine(host) or host.endswith(".localhost")
            if not is_ours and host not in self._hosts:
                what = (
                    f"{host!r} is not a host name of this machine; add a proxy's to "
                    "LATHE_ALLOWED_HOSTS"
                )
                return ApiError(421, what, code="unknown_host")
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins and "*" not in self._origins:
            what = (
                f"pages of {origin[:100]!r} are not allowed; add the origin to LATHE_CORS_ORIGINS"
            )
            return ApiError(403, what, code="foreign_origin")
        return None


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return host[:100]

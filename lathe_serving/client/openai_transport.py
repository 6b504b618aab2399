"""The OpenAI HTTP API, for threads and for asyncio."""

import os
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any

import httpx2
from numpy.typing import NDArray

from lathe_base.errors import StageError, UserError
from lathe_serving.client.grpc_messages import utf8
from lathe_serving.client.openai_errors import KEY_VARIABLE, asking, reaching, refusal
from lathe_serving.client.openai_messages import body, parse_chunks
from lathe_serving.client.transport import Parameters
from lathe_serving.reach import REACH_SECONDS, is_loopback, require_base_url, too_slow
from lathe_serving.runtime.protocol import Chunk, TokenScores

PATH, DONE = "/completions", "[DONE]"


class _Endpoint:
    """Common parts of both transports."""

    def __init__(
        self, url: str, model_name: str, timeout_seconds: float | None, api_key: str | None
    ) -> None:
        self._url = require_base_url(url)
        self._model_name, self._timeout = model_name, timeout_seconds
        self._is_reached = False
        key = os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key
        if not (key.isascii() and key.isprintable()) or key != key.strip():
            raise UserError(
                "the API key contains characters that are not allowed in HTTP headers",
                f"check {KEY_VARIABLE}",
            )
        self._options: dict[str, Any] = {
            "base_url": self._url,
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "timeout": httpx2.Timeout(timeout_seconds, connect=REACH_SECONDS, pool=None),
            "limits": httpx2.Limits(max_connections=None),
            "trust_env": not is_loopback(self._url),  # proxies
        }

    def _body(self, prompt: str, parameters: Parameters) -> dict[str, Any]:
        utf8(prompt)
        return body(self._model_name, prompt, parameters)

    def _chunks(self, data: str | bytes, since: float) -> list[Chunk]:
        if self._timeout is not None and time.monotonic() - since > self._timeout:
            raise too_slow(self._url, self._timeout)
        return parse_chunks(data, self._url)

    def _reached(self, reply: httpx2.Response) -> None:
        if reply.status_code != 200:
            raise refusal(self._url, reply)
        self._is_reached = True

    def _cut(self) -> StageError:
        return StageError(f"{self._url}: the stream ended before the answer was complete")


class OpenAITransport(_Endpoint):
    """See `Transport`.

    Raises:
        UserError: `url` is not a base URL, or the key cannot be sent.
    """

    def __init__(
        self, url: str, model_name: str, timeout_seconds: float | None, api_key: str | None
    ) -> None:
        super().__init__(url, model_name, timeout_seconds, api_key)
        self._http = httpx2.Client(**self._options)

    def chunks(self, prompt: str, parameters: Parameters) -> Generator[Chunk]:
        """See `Transport.chunks`."""
        asked = self._body(prompt, parameters)
        self._reach()
        since = time.monotonic()
        with (
            asking(self._url, self._timeout),
            self._http.stream("POST", PATH, json=asked) as reply,
        ):
            if reply.status_code != 200 or not asked.get("stream"):
                reply.read()
            if reply.status_code != 200:
                raise refusal(self._url, reply)
            if not asked.get("stream"):
                yield from self._chunks(reply.content, since)
                return
            for event in httpx2.EventSource(reply):
                if event.data == DONE:
                    return
                yield from self._chunks(event.data, since)
        raise self._cut()

    def scores(self, arrays: Mapping[str, NDArray[Any]]) -> TokenScores:
        """Refused."""
        raise self._only_triton("scores")

    def served_digest(self) -> str:
        """Refused."""
        raise self._only_triton("a model's SHA-256")

    def close(self) -> None:
        """See `Transport.close`."""
        self._http.close()

    def _reach(self) -> None:
        """Check once that the server answers and accepts the key."""
        if not self._is_reached:
            with reaching(self._url):
                self._reached(self._http.get("/models", timeout=REACH_SECONDS))

    def _only_triton(self, what: str) -> UserError:
        return UserError(
            f"{self._url}: the OpenAI API does not support {what}",
            "use Triton's gRPC address, HOST:PORT, such as localhost:8001",
        )


class AsyncOpenAITransport(_Endpoint):
    """See `AsyncTransport`.

    Raises:
        UserError: `url` is not a base URL, or the key cannot be sent.
    """

    def __init__(
        self, url: str, model_name: str, timeout_seconds: float | None, api_key: str | None
    ) -> None:
        super().__init__(url, model_name, timeout_seconds, api_key)
        self._http = httpx2.AsyncClient(**self._options)

    async def chunks(self, prompt: str, parameters: Parameters) -> AsyncGenerator[Chunk]:
        """See `AsyncTransport.chunks`."""
        asked = self._body(prompt, parameters)
        await self._reach()
        since = time.monotonic()
        with asking(self._url, self._timeout):
            async with self._http.stream("POST", PATH, json=asked) as reply:
                if reply.status_code != 200 or not asked.get("stream"):
                    await reply.aread()
                if reply.status_code != 200:
                    raise refusal(self._url, reply)
                if not asked.get("stream"):
                    for chunk in self._chunks(reply.content, since):
                        yield chunk
                    return
                async for event in httpx2.EventSource(reply):
                    if event.data == DONE:
                        return
                    for chunk in self._chunks(event.data, since):
                        yield chunk
        raise self._cut()

    async def close(self) -> None:
        """See `AsyncTransport.close`."""
        await self._http.aclose()

    async def _reach(self) -> None:
        if not self._is_reached:
            with reaching(self._url):
                self._reached(await self._http.get("/models", timeout=REACH_SECONDS))

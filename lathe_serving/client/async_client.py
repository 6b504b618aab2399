"""The asyncio client, with the addresses, parameters and errors of `lathe_serving.client`.

async with AsyncClient("localhost:8001", "gpt") as client:
    async for chunk in client.stream("Once upon a time"):
        print(chunk.text, end="", flush=True)
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from lathe_serving.client.grpc_transport import AsyncGrpcTransport
from lathe_serving.client.openai_transport import AsyncOpenAITransport
from lathe_serving.client.transport import AsyncTransport, Parameter, utf8
from lathe_serving.runtime.protocol import Chunk


class AsyncClient:
    """Client of one model on one server, for any number of tasks of one event loop.

    Arguments and errors are those of `lathe_serving.client.Client`.
    """

    def __init__(
        self,
        url: str,
        model_name: str,
        timeout_seconds: float | None = None,
        api_key: str | None = None,
    ) -> None:
        utf8(model_name, "model name")
        self.url, self.model_name, self.timeout_seconds = url, model_name, timeout_seconds
        # An address of gRPC has no scheme, and a URL always has one.
        self._transport: AsyncTransport = (
            AsyncOpenAITransport(url, model_name, timeout_seconds, api_key)
            if "://" in url
            else AsyncGrpcTransport(url, model_name, timeout_seconds)
        )

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._transport.close()

    async def generate(self, prompt: str, **parameters: Parameter) -> Chunk:
        """Generate and return the whole continuation.

        Raises:
            UserError: the server cannot be reached, is busy, or refuses the request.
        """
        return (await self.generate_all(prompt, **parameters))[0]

    async def generate_all(self, prompt: str, **parameters: Parameter) -> list[Chunk]:
        """Generate `num_return_sequences` continuations; raises as `generate` does."""
        return [chunk async for chunk in self._transport.chunks(prompt, parameters)]

    async def stream(self, prompt: str, **parameters: Parameter) -> AsyncGenerator[Chunk]:
        """Yield chunks as they are generated; leaving the loop or cancelling the task cancels the
        generation.

        Raises:
            UserError: as `generate`, at the first chunk.
        """
        responses = self._transport.chunks(prompt, {**parameters, "stream": True})
        async with aclosing(responses) as chunks:
            async for chunk in chunks:
                yield chunk

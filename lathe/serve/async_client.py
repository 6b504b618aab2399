"""The asyncio client, with the parameters and errors of `lathe.serve.client`.

async with AsyncClient("localhost:8001", "gpt") as client:
    async for chunk in client.stream("Once upon a time"):
        print(chunk.text, end="", flush=True)
"""

from collections.abc import AsyncIterator

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import (  # type: ignore[import-untyped]
    service_pb2,
    service_pb2_grpc,
)

from lathe.runtime.protocol import Chunk
from lathe.serve.client import CHANNEL_OPTIONS, Parameter, lost, request
from lathe.serve.reach import REACH_SECONDS, require_address, unreachable
from lathe.serve.response import chunks_of, refusal


class AsyncClient:
    """Client of one model on one server, for any number of tasks of one event loop.

    Args:
        url: gRPC address, `host:port`.
        model_name: the model's folder in the server's repository.
        timeout_seconds: limit of a whole generation; None waits forever once the server has
            answered.

    Raises:
        UserError: `url` is not an address.
    """

    def __init__(self, url: str, model_name: str, timeout_seconds: float | None = None) -> None:
        require_address(url)
        self.url, self.model_name, self.timeout_seconds = url, model_name, timeout_seconds
        self._channel = grpc.aio.insecure_channel(url, CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._is_reached = False

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def generate(self, prompt: str, **parameters: Parameter) -> Chunk:
        """Generate and return the whole continuation.

        Raises:
            UserError: the server cannot be reached, is busy, or refuses the request.
        """
        return (await self.generate_all(prompt, **parameters))[0]

    async def generate_all(self, prompt: str, **parameters: Parameter) -> list[Chunk]:
        """Generate `num_return_sequences` continuations; raises as `generate` does."""
        return [chunk async for chunk in self._chunks(prompt, parameters)]

    async def stream(self, prompt: str, **parameters: Parameter) -> AsyncIterator[Chunk]:
        """Yield chunks as they are generated; leaving the loop or cancelling the task cancels the
        generation.

        Raises:
            UserError: as `generate`, at the first chunk.
        """
        async for chunk in self._chunks(prompt, {**parameters, "stream": True}):
            yield chunk

    async def _reach(self) -> None:
        """Check once that the server answers, as a generation may take long."""
        if self._is_reached:
            return
        try:
            await self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=REACH_SECONDS)
        except grpc.RpcError as error:
            raise unreachable(error, self.url) from None
        self._is_reached = True

    async def _chunks(self, prompt: str, parameters: dict[str, Parameter]) -> AsyncIterator[Chunk]:
        message = request(self.model_name, prompt, parameters)
        await self._reach()
        call = self._stub.ModelStreamInfer(iter([message]), timeout=self.timeout_seconds)
        try:
            async for response in call:
                if response.error_message:
                    raise refusal(response.error_message)
                for chunk in chunks_of(response.infer_response):
                    yield chunk
        except grpc.RpcError as error:
            raise lost(error, self.url, self.timeout_seconds) from None
        finally:
            call.cancel()

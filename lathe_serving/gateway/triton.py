"""Multiplexes many clients' requests on a few long-lived gRPC streams to Triton.

If a client disconnects, its request is cancelled by a message to the backend. The stream stays
open, because Triton 2.51 cannot safely abort streams under load. A stream must not carry requests
to a model that is missing or not decoupled: Triton would write the response without waiting for the
write in progress, and abort ("ASSERTION FAILED: !byte_buffer->Valid()").
"""

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from hashlib import sha256
from itertools import cycle
from typing import Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2, service_pb2_grpc  # type: ignore[import-untyped]

from lathe_serving.client.grpc_messages import CHANNEL_OPTIONS, refusal, request, response_chunks
from lathe_serving.client.transport import Parameter
from lathe_serving.gateway.quarantine import CrashQuarantine, TritonDied, TritonUnavailable
from lathe_serving.reach import require_address
from lathe_serving.runtime.protocol import CANCEL, Chunk

STREAMS = 4
READY_SECONDS = 2.0
OPTIONS = [
    *CHANNEL_OPTIONS,
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 1000),  # a Triton that starts again is found soon
]


class Triton:
    """A Triton server; its streams are opened by the first requests, and again when they break.

    Args:
        url: gRPC address, `host:port`.
        quarantine: the requests that have crashed it.

    Raises:
        UserError: `url` is not an address.
    """

    def __init__(self, url: str, quarantine: CrashQuarantine) -> None:
        require_address(url)
        self.url, self._quarantine = url, quarantine
        self._channel = grpc.aio.insecure_channel(url, OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._streams: dict[int, _Stream] = {}
        self._turns = cycle(range(STREAMS))

    async def close(self) -> None:
        """Close the connection; requests in flight end with TritonUnavailable."""
        await self._channel.close()

    async def is_ready(self, model_name: str) -> bool:
        """Whether the server confirms within READY_SECONDS that it has loaded the model."""
        asked = service_pb2.ModelReadyRequest(name=model_name)
        try:
            return bool((await self._stub.ModelReady(asked, timeout=READY_SECONDS)).ready)
        except grpc.RpcError:
            return False

    async def generate(
        self,
        model_name: str,
        prompt: str | Sequence[int],
        parameters: Mapping[str, Parameter | Sequence[str]],
    ) -> AsyncGenerator[Chunk]:
        """Yield the chunks of one request; closing the iterator cancels it.

        Args:
            prompt: a text, or token ids.
            parameters: those of `lathe_serving.runtime.params`; `stop` is a list.

        Raises:
            UserError: the backend rejects the request, or is busy; or the request has crashed
                Triton twice.
            TritonUnavailable: Triton does not answer, or has ended.
        """
        plain = {k: json.dumps(v) if k == "stop" else v for k, v in parameters.items()}
        message = request(model_name, prompt, plain)  # type: ignore[arg-type]
        digest = sha256(message.SerializeToString(deterministic=True)).digest()
        going = parameters.get("num_return_sequences", 1)
        async with self._quarantine.watch(digest):
            message.id = uuid.uuid4().hex
            stream = self._stream()
            chunks = stream.ask(message)
            try:
                while going:
                    got = await chunks.get()
                    if isinstance(got, Exception):
                        going = 0
                        raise got
                    for chunk in got:
                        going -= bool(chunk.finish_reason)  # type: ignore[operator]
                        yield chunk
            finally:
                stream.forget(message.id)
                if going and not stream.has_ended:  # on one stream it cannot overtake the request
                    stream.send(_cancellation(model_name, message.id))

    def cancel(self, model_name: str, name: str) -> None:
        """Cancel a request that was not sent by `generate`.

        Args:
            model_name: a model that `generate` supports.
            name: its parameter REQUEST_ID.
        """
        self._stream().send(_cancellation(model_name, name))

    def _stream(self) -> "_Stream":
        turn = next(self._turns)
        if turn not in self._streams or self._streams[turn].has_ended:
            self._streams[turn] = _Stream(self._stub, self.url)
        return self._streams[turn]


class _Stream:
    """One bidirectional stream; responses are matched to requests by id."""

    def __init__(self, stub: Any, url: str) -> None:
        self._url = url
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self._asked: dict[str, asyncio.Queue[list[Chunk] | Exception]] = {}
        self._sent: set[str] = set()
        self._call = stub.ModelStreamInfer(self._messages())
        self._reader = asyncio.create_task(self._read())

    @property
    def has_ended(self) -> bool:
        return self._reader.done()

    def ask(self, message: Any) -> asyncio.Queue[list[Chunk] | Exception]:
        """Send a request; its responses, or its error, arrive in the returned queue."""
        self._asked[message.id] = asyncio.Queue()
        self.send(message)
        return self._asked[message.id]

    def send(self, message: Any) -> None:
        self._outgoing.put_nowait(message)

    def forget(self, name: str) -> None:
        """Ignore further responses to a request."""
        self._asked.pop(name, None)
        self._sent.discard(name)

    async def _messages(self) -> AsyncIterator[Any]:
        while True:
            message = await self._outgoing.get()
            yield message
            if message.id in self._asked:  # gRPC asks for the next one when this one is on its way
                self._sent.add(message.id)

    async def _read(self) -> None:
        ended = "the stream has ended"
        try:
            async for response in self._call:
                chunks = self._asked.get(response.infer_response.id)
                if chunks is None:
                    continue
                if response.error_message:
                    chunks.put_nowait(refusal(response.error_message))
                else:
                    chunks.put_nowait(response_chunks(response.infer_response))
        except grpc.RpcError as error:
            ended = error.details() or error.code().name
        finally:
            self._call.cancel()
            for name, chunks in self._asked.items():
                kind = TritonDied if name in self._sent else TritonUnavailable
                chunks.put_nowait(kind(f"Triton on {self._url}: {ended}"))


def _cancellation(model_name: str, name: str) -> Any:
    # Repositories of earlier versions require a text.
    return request(model_name, "", {CANCEL: name})

"""Triton's gRPC, for threads and for asyncio.

tritonclient's messages and stub are used without its `InferenceServerClient`, which allows one
stream at a time; here every call has its own stream on one connection.
"""

import json
from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import (  # type: ignore[import-untyped]
    InferResult,
    service_pb2,
    service_pb2_grpc,
)
from tritonclient.utils import (  # type: ignore[import-untyped]
    np_to_triton_dtype,
    serialize_byte_tensor,
)

from lathe_base.errors import Code, StageError, UserError
from lathe_serving.client.grpc_messages import CHANNEL_OPTIONS, refusal, request, response_chunks
from lathe_serving.client.transport import Parameters
from lathe_serving.reach import (
    REACH_SECONDS,
    nothing_listens,
    require_address,
    too_slow,
    unreachable,
)
from lathe_serving.runtime.protocol import Chunk, TokenScores, score_name


class GrpcTransport:
    """See `Transport`.

    Raises:
        UserError: `url` is not an address.
    """

    def __init__(self, url: str, model_name: str, timeout_seconds: float | None) -> None:
        require_address(url)
        self._url, self._model_name, self._timeout = url, model_name, timeout_seconds
        self._channel = grpc.insecure_channel(url, CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._is_reached = False

    def chunks(self, prompt: str, parameters: Parameters) -> Generator[Chunk]:
        """See `Transport.chunks`."""
        message = request(self._model_name, prompt, parameters)
        self._reach()
        call = self._stub.ModelStreamInfer(iter([message]), timeout=self._timeout)
        try:
            for response in call:
                if response.error_message:
                    raise refusal(response.error_message)
                yield from response_chunks(response.infer_response)
        except grpc.RpcError as error:
            raise lost(error, self._url, self._timeout) from None
        finally:
            call.cancel()

    def scores(self, arrays: Mapping[str, NDArray[Any]]) -> TokenScores:
        """See `Transport.scores`."""
        message = service_pb2.ModelInferRequest(model_name=score_name(self._model_name))
        for name, array in arrays.items():
            is_text = array.dtype == np.object_
            message.inputs.add(
                name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape
            )
            raw = serialize_byte_tensor(array).item() if is_text else array.tobytes()
            message.raw_input_contents.append(raw)
        self._reach()
        try:
            reply = self._stub.ModelInfer(message, timeout=self._timeout)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                raise refusal(error.details()) from None
            raise lost(error, self._url, self._timeout) from None
        result = InferResult(reply)
        return result.as_numpy("log_likelihood"), result.as_numpy("is_greedy")

    def served_digest(self) -> str:
        """See `Transport.served_digest`."""
        message = service_pb2.ModelConfigRequest(name=self._model_name)
        self._reach()
        try:
            reply = self._stub.ModelConfig(message, timeout=self._timeout)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                what = f"{self._url} does not serve a model named {self._model_name}"
                raise UserError(
                    what,
                    "give the name of the server's model: -o Serving.model_name=NAME",
                    Code.NOT_FOUND,
                ) from None
            raise lost(error, self._url, self._timeout) from None
        if "sha256" not in reply.config.parameters:
            what = f"{self._url}: {self._model_name} was not deployed by Lathe: it has no SHA-256"
            raise UserError(what, "deploy the export with `lathe deploy`", Code.WRONG_KIND)
        return str(json.loads(reply.config.parameters["sha256"].string_value))

    def close(self) -> None:
        """See `Transport.close`."""
        self._channel.close()

    def _reach(self) -> None:
        """Check once that the server answers, because a generation may take long."""
        if self._is_reached:
            return
        try:
            self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=REACH_SECONDS)
        except grpc.RpcError as error:
            raise unreachable(error, self._url) from None
        self._is_reached = True


class AsyncGrpcTransport:
    """See `AsyncTransport`.

    Raises:
        UserError: `url` is not an address.
    """

    def __init__(self, url: str, model_name: str, timeout_seconds: float | None) -> None:
        require_address(url)
        self._url, self._model_name, self._timeout = url, model_name, timeout_seconds
        self._channel = grpc.aio.insecure_channel(url, CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._is_reached = False

    async def chunks(self, prompt: str, parameters: Parameters) -> AsyncGenerator[Chunk]:
        """See `AsyncTransport.chunks`."""
        message = request(self._model_name, prompt, parameters)
        await self._reach()
        call = self._stub.ModelStreamInfer(iter([message]), timeout=self._timeout)
        try:
            async for response in call:
                if response.error_message:
                    raise refusal(response.error_message)
                for chunk in response_chunks(response.infer_response):
                    yield chunk
        except grpc.RpcError as error:
            raise lost(error, self._url, self._timeout) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        """See `AsyncTransport.close`."""
        await self._channel.close()

    async def _reach(self) -> None:
        if self._is_reached:
            return
        try:
            await self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=REACH_SECONDS)
        except grpc.RpcError as error:
            raise unreachable(error, self._url) from None
        self._is_reached = True


def lost(error: Any, url: str, timeout_seconds: float | None) -> Exception:
    """The exception for a call that gRPC ended."""
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return too_slow(url, timeout_seconds)
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return nothing_listens(url)
    return StageError(f"{url}: {error.code().name}: {error.details()}", Code.SERVER_ERROR)

"""Triton's gRPC, for threads and for asyncio.

From top to bottom: a request and its responses as gRPC messages, which the gateway also sends;
errors, as messages for the client's users; and the two transports.

tritonclient's messages and stub are used without its `InferenceServerClient`, which allows one
stream at a time; here every call has its own stream on one connection.
"""

import json
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from itertools import islice
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
    deserialize_bytes_tensor,
    np_to_triton_dtype,
    serialize_byte_tensor,
)

from lathe_base.errors import Code, StageError, UserError, parse_code
from lathe_serving.client.transport import Parameter, Parameters, utf8
from lathe_serving.reach import (
    REACH_SECONDS,
    nothing_listens,
    require_address,
    too_slow,
    unreachable,
)
from lathe_serving.runtime.protocol import CODE, Chunk, TokenScores, score_name

CHANNEL_OPTIONS = [("grpc.enable_http_proxy", 0)]  # gRPC would use the environment's `http_proxy`
PARAMETER_FIELD = {
    bool: "bool_param",
    int: "int64_param",
    float: "double_param",
    str: "string_param",
}


def request(
    model_name: str, prompt: str | Sequence[int], parameters: Mapping[str, Parameter]
) -> Any:
    """Build the gRPC message of a generation request.

    Args:
        prompt: a text, or token ids.

    Raises:
        UserError: the prompt is not UTF-8 text, or a number is too large for the message.
    """
    tensor: dict[str, Any] = {"name": "text_input", "datatype": "BYTES", "shape": [1]}
    if isinstance(prompt, str):
        tensor["contents"] = {"bytes_contents": [utf8(prompt)]}
    else:
        tensor = {"name": "input_ids", "datatype": "INT64", "shape": [len(prompt)]}
        tensor["contents"] = {"int64_contents": prompt}
    message = service_pb2.ModelInferRequest(model_name=model_name, inputs=[tensor])
    for name, value in parameters.items():
        if value is None:
            continue  # the server's default
        try:
            setattr(message.parameters[name], PARAMETER_FIELD[type(value)], value)
        except ValueError:
            raise UserError(
                f"{name} {value}: out of range", "give a smaller number", Code.INVALID_VALUE
            ) from None
    return message


def response_chunks(response: Any) -> list[Chunk]:
    """The chunks of a `ModelInferResponse`, one per sequence."""
    raw = {
        output.name: content
        for output, content in zip(response.outputs, response.raw_output_contents, strict=True)
    }

    def numbers(name: str, kind: type[Any] = np.int64) -> list[Any]:
        return list(np.frombuffer(raw.get(name, b""), kind).tolist())

    def texts(name: str) -> list[Any]:
        return [text.decode() for text in deserialize_bytes_tensor(raw.get(name, b""))]

    # Outputs with an element per sequence. Those of the prompt come with a sequence's end only.
    counts = numbers("token_count")
    prompts = numbers("prompt_token_count") or [0] * len(counts)
    cached = numbers("cached_token_count") or [0] * len(counts)
    reasons, sequences = texts("finish_reason"), numbers("sequence")
    parts = zip(texts("text_output"), counts, reasons, sequences, prompts, cached, strict=True)
    # Outputs with an element per token are those of all sequences, one after another: each takes
    # its `count` from the same iterators. Those of log-probabilities are empty unless requested.
    tokens, names = iter(numbers("tokens")), iter(texts("token_names"))
    lengths = iter(numbers("text_lengths"))
    logprobs = iter(numbers("log_probabilities", np.float32))
    top_logprobs = numbers("top_log_probabilities", np.float32)
    named = zip(texts("top_names"), top_logprobs, strict=True)
    tops = iter([dict(islice(named, count)) for count in numbers("top_count")])
    return [
        Chunk(
            text,
            list(islice(tokens, count)),
            reason,
            sequence,
            list(islice(logprobs, count)),
            list(islice(names, count)),
            list(islice(tops, count)),
            prompt,
            known,
            list(islice(lengths, count)),
        )
        for text, count, reason, sequence, prompt, known in parts
    ]


def refusal(message: str) -> Exception:
    """The exception for an error from the server: a UserError if the message has a hint, because
    the request was then invalid; otherwise a StageError."""
    # A backend's message is all that Triton passes on: hint and code are in its text.
    message, _, code = message.partition(CODE)
    what, _, hint = message.partition("\n  hint: ")
    if "unknown model" in message:
        return UserError(
            message, "give the name of the server's model: --model-name NAME", Code.NOT_FOUND
        )
    if "unexpected inference input" in message:
        return UserError(
            message,
            "deploy the model again: its repository was written by an earlier version",
            Code.WRONG_VERSION,
        )
    if not hint:
        return StageError(message, Code.SERVER_ERROR)
    # A server of another version may send none, or one that is unknown here.
    return UserError(what, hint, parse_code(code, Code.INVALID_REQUEST))


def lost(error: Any, url: str, timeout_seconds: float | None) -> Exception:
    """The exception for a call that gRPC ended."""
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return too_slow(url, timeout_seconds)
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return nothing_listens(url)
    return StageError(f"{url}: {error.code().name}: {error.details()}", Code.SERVER_ERROR)


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
            call.cancel()  # also when the iterator is closed early: Triton then frees the slot

    def scores(self, arrays: Mapping[str, NDArray[Any]]) -> TokenScores:
        """See `Transport.scores`."""
        message = service_pb2.ModelInferRequest(model_name=score_name(self._model_name))
        for name, array in arrays.items():
            is_text = array.dtype == np.object_
            message.inputs.add(
                name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape
            )
            # Raw contents: a list of numbers in the message would be parsed one by one.
            raw = serialize_byte_tensor(array).item() if is_text else array.tobytes()
            message.raw_input_contents.append(raw)
        self._reach()
        try:
            reply = self._stub.ModelInfer(message, timeout=self._timeout)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                raise refusal(error.details()) from None
            raise lost(error, self._url, self._timeout) from None
        result = InferResult(reply)  # tritonclient's, which knows the types of raw outputs
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
            call.cancel()  # also when the iterator is closed early: Triton then frees the slot

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

"""gRPC client of a running server: text in, text out, whole or streamed.

    from lathe.serve import client
    print(client.generate("Once upon a time", max_tokens=40))
    for text in client.stream("Once upon a time", decode_strategy="greedy_search"):
        print(text, end="", flush=True)

Parameters are those of `lathe.runtime.params`; one that is omitted or None takes the server's
default.
"""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
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

from lathe.errors import StageError, UserError
from lathe.runtime.protocol import TEXTS, TOKENS, Chunk, TokenScores, score_name
from lathe.serve import state as serve_state
from lathe.serve.reach import REACH_SECONDS, require_address, unreachable
from lathe.serve.response import chunks_of, refusal

Parameter = int | float | str | bool | None
CHANNEL_OPTIONS = [("grpc.enable_http_proxy", 0)]
PARAMETER_FIELD = {
    bool: "bool_param",
    int: "int64_param",
    float: "double_param",
    str: "string_param",
}


class Client:
    """Client of one model on one server; any number of threads may share it.

    tritonclient's messages and stub are used without its `InferenceServerClient`, which allows one
    stream at a time; here every call is a stream of its own on one connection.

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
        _utf8(model_name, "model name")
        self.url, self.model_name, self.timeout_seconds = url, model_name, timeout_seconds
        self._channel = grpc.insecure_channel(url, CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._is_reached = False

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and every stream that is still open."""
        self._channel.close()

    def generate(self, prompt: str, **parameters: Parameter) -> Chunk:
        """Generate and return the whole continuation.

        Raises:
            UserError: the server cannot be reached, is busy, or refuses the request.
        """
        return self.generate_all(prompt, **parameters)[0]

    def generate_all(self, prompt: str, **parameters: Parameter) -> list[Chunk]:
        """Generate `num_return_sequences` continuations; raises as `generate` does."""
        return list(self._chunks(prompt, parameters))

    def stream(self, prompt: str, **parameters: Parameter) -> Generator[Chunk]:
        """Yield chunks as they are generated; closing the iterator cancels the generation.

        Raises:
            UserError: as `generate`, at the first chunk.
        """
        return self._chunks(prompt, {**parameters, "stream": True})

    def score(
        self, tokens: NDArray[np.int64], index: NDArray[np.int64], targets: NDArray[np.int64]
    ) -> TokenScores:
        """Log-likelihoods of given tokens; see `lathe.runtime.score.score_tokens`.

        Raises:
            UserError: the server cannot be reached, or refuses the request.
        """
        arrays = (array.astype(np.int64) for array in (tokens, index, targets))
        return self._scores(dict(zip(TOKENS, arrays, strict=True)))

    def score_text(self, text: str, continuation: str) -> TokenScores:
        """Natural log-likelihoods (1, k) of the k tokens of `continuation` after `text`, and (1, k)
        whether each is the most likely; see `lathe.runtime.score.score_text`.

        Raises:
            UserError: the server cannot be reached, or refuses the request.
        """
        arrays = (np.array([_utf8(part)], np.object_) for part in (text, continuation))
        return self._scores(dict(zip(TEXTS, arrays, strict=True)))

    def _scores(self, arrays: dict[str, NDArray[Any]]) -> TokenScores:
        request = service_pb2.ModelInferRequest(model_name=score_name(self.model_name))
        for name, array in arrays.items():
            is_text = array.dtype == np.object_
            request.inputs.add(
                name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape
            )
            raw = serialize_byte_tensor(array).item() if is_text else array.tobytes()
            request.raw_input_contents.append(raw)
        self._reach()
        try:
            reply = self._stub.ModelInfer(request, timeout=self.timeout_seconds)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                raise refusal(error.details()) from None
            raise lost(error, self.url, self.timeout_seconds) from None
        result = InferResult(reply)
        return result.as_numpy("log_likelihood"), result.as_numpy("is_greedy")

    def served_digest(self) -> str:
        """SHA-256 of the served `model.onnx`.

        Raises:
            UserError: the server cannot be reached, or has no such model.
        """
        request = service_pb2.ModelConfigRequest(name=self.model_name)
        self._reach()
        try:
            reply = self._stub.ModelConfig(request, timeout=self.timeout_seconds)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                what = f"{self.url} serves no model {self.model_name}"
                raise UserError(
                    what, "give the name of the server's model: -o Serving.model_name=NAME"
                ) from None
            raise lost(error, self.url, self.timeout_seconds) from None
        if "sha256" not in reply.config.parameters:
            what = f"{self.url}: {self.model_name} was not deployed by Lathe: it has no SHA-256"
            raise UserError(what, "deploy the export with `lathe deploy`")
        return str(json.loads(reply.config.parameters["sha256"].string_value))

    def _reach(self) -> None:
        """Check once that the server answers, as a generation may take long."""
        if self._is_reached:
            return
        try:
            self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=REACH_SECONDS)
        except grpc.RpcError as error:
            raise unreachable(error, self.url) from None
        self._is_reached = True

    def _chunks(self, prompt: str, parameters: dict[str, Parameter]) -> Generator[Chunk]:
        message = request(self.model_name, prompt, parameters)
        self._reach()
        call = self._stub.ModelStreamInfer(iter([message]), timeout=self.timeout_seconds)
        try:
            for response in call:
                if response.error_message:
                    raise refusal(response.error_message)
                yield from chunks_of(response.infer_response)
        except grpc.RpcError as error:
            raise lost(error, self.url, self.timeout_seconds) from None
        finally:
            call.cancel()


def connect(folder: Path | None = None) -> Client:
    """Connect to the server that `lathe deploy` or `make serve` left running.

    Args:
        folder: state folder; default `state.default_folder()`.

    Raises:
        UserError: no server is running.
    """
    found = serve_state.find(folder)
    if found is None:
        raise UserError(
            f"no server is running: none found in {folder or serve_state.default_folder()}",
            f"start one with `make serve`, or set {serve_state.STATE_VARIABLE} to its folder",
        )
    return Client(found.grpc, found.model_name)


def generate(prompt: str, **parameters: Parameter) -> str:
    """Continue `prompt` on the running server; see `Client.generate`."""
    with connect() as client:
        return client.generate(prompt, **parameters).text


def stream(prompt: str, **parameters: Parameter) -> Iterator[str]:
    """Continue `prompt` on the running server, streaming the text; see `Client.stream`."""
    with connect() as client:
        for chunk in client.stream(prompt, **parameters):
            yield chunk.text


def request(
    model_name: str, prompt: str | Sequence[int], parameters: Mapping[str, Parameter]
) -> Any:
    """Build the gRPC message of a generation request.

    Args:
        prompt: a text, or token ids.

    Raises:
        UserError: the prompt is not UTF-8 text, or a number is too large for the message.
    """
    given: dict[str, Any] = {"name": "text_input", "datatype": "BYTES", "shape": [1]}
    if isinstance(prompt, str):
        given["contents"] = {"bytes_contents": [_utf8(prompt)]}
    else:
        given = {"name": "input_ids", "datatype": "INT64", "shape": [len(prompt)]}
        given["contents"] = {"int64_contents": prompt}
    message = service_pb2.ModelInferRequest(model_name=model_name, inputs=[given])
    for name, value in parameters.items():
        if value is None:
            continue
        try:
            setattr(message.parameters[name], PARAMETER_FIELD[type(value)], value)
        except ValueError:
            raise UserError(f"{name} {value}: out of range", "give a smaller number") from None
    return message


def _utf8(text: str, what: str = "prompt") -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{what}: not UTF-8 at character {error.start}",
            "convert it, for instance with iconv -t utf-8",
        ) from None


def lost(error: Any, url: str, timeout_seconds: float | None) -> Exception:
    """The exception for a call that gRPC ended."""
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return UserError(
            f"no answer within {timeout_seconds:g} s from {url}",
            "ask for fewer tokens, or allow a longer timeout",
        )
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return UserError(f"no server answers on {url}", "start one with `make serve`")
    return StageError(f"{url}: {error.code().name}: {error.details()}")

"""Client of a running server, over Triton's gRPC or OpenAI's HTTP: text in, text out.

    from lathe_serving import client
    print(client.generate("Once upon a time", max_tokens=40))
    for text in client.stream("Once upon a time", decode_strategy="greedy_search"):
        print(text, end="", flush=True)

Parameters are those of `lathe_base.parameters`; one that is omitted or None takes the
server's default. Over the OpenAI API it is OpenAI's default (`max_tokens` 16, no `top_k` or
`top_p`), and beam search, `timeout_seconds` and scores are rejected.
"""

from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lathe_base.errors import Code, UserError
from lathe_serving import state as serve_state
from lathe_serving.client.grpc_transport import GrpcTransport
from lathe_serving.client.openai_transport import OpenAITransport
from lathe_serving.client.transport import Parameter, Transport, utf8
from lathe_serving.runtime.protocol import TEXTS, TOKENS, Chunk, TokenScores


class Client:
    """Client of one model on one server; any number of threads may share it.

    Args:
        url: Triton's gRPC address, `host:port`, or the base URL of an OpenAI-compatible API, such
            as `http://localhost:9000/v1`, which is accessed through the environment's proxy unless
            it is on this machine.
        model_name: the model's name on the server.
        timeout_seconds: time limit of a whole generation; None waits forever once the server has
            answered.
        api_key: that of an OpenAI-compatible API, if required; default: `LATHE_API_KEY`.

    Raises:
        UserError: `url` is not an address, or the key cannot be sent.
    """

    def __init__(
        self,
        url: str,
        model_name: str,
        timeout_seconds: float | None = None,
        api_key: str | None = None,
    ) -> None:
        utf8(model_name, "model name")  # neither interface could send it otherwise
        self.url, self.model_name, self.timeout_seconds = url, model_name, timeout_seconds
        # An address of gRPC has no scheme, and a URL always has one.
        self._transport: Transport = (
            OpenAITransport(url, model_name, timeout_seconds, api_key)
            if "://" in url
            else GrpcTransport(url, model_name, timeout_seconds)
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and every stream that is still open."""
        self._transport.close()

    def generate(self, prompt: str, **parameters: Parameter) -> Chunk:
        """Generate and return the whole continuation.

        Raises:
            UserError: the server cannot be reached, is busy, or refuses the request.
        """
        return self.generate_all(prompt, **parameters)[0]

    def generate_all(self, prompt: str, **parameters: Parameter) -> list[Chunk]:
        """Generate `num_return_sequences` continuations; raises as `generate` does."""
        return list(self._transport.chunks(prompt, parameters))

    def stream(self, prompt: str, **parameters: Parameter) -> Generator[Chunk]:
        """Yield chunks as they are generated; closing the iterator cancels the generation.

        Raises:
            UserError: as `generate`, at the first chunk.
        """
        return self._transport.chunks(prompt, {**parameters, "stream": True})

    def score(
        self, tokens: NDArray[np.int64], index: NDArray[np.int64], targets: NDArray[np.int64]
    ) -> TokenScores:
        """Log-likelihoods of given tokens; see `lathe_serving.runtime.score.score_tokens`.

        Raises:
            UserError: the server cannot be reached, or refuses the request.
        """
        arrays = (array.astype(np.int64) for array in (tokens, index, targets))
        return self._transport.scores(dict(zip(TOKENS, arrays, strict=True)))

    def score_text(self, text: str, continuation: str) -> TokenScores:
        """Natural log-likelihoods (1, k) of the k tokens of `continuation` after `text`, and (1, k)
        whether each is the most likely; see `lathe_serving.runtime.score.score_text`.

        Raises:
            UserError: the server cannot be reached, or refuses the request.
        """
        arrays = (np.array([utf8(part)], np.object_) for part in (text, continuation))
        return self._transport.scores(dict(zip(TEXTS, arrays, strict=True)))

    def served_digest(self) -> str:
        """SHA-256 of the served `model.onnx`.

        Raises:
            UserError: the server cannot be reached, or has no such model.
        """
        return self._transport.served_digest()


def connect(folder: Path | None = None) -> Client:
    """Connect to the server that `lathe deploy` or `make serve` left running.

    Args:
        folder: state folder; default `state.default_folder()`.

    Raises:
        UserError: no server is running.
    """
    state = serve_state.find(folder)
    if state is None:
        raise UserError(
            f"no server is running: none found in {folder or serve_state.default_folder()}",
            f"start one with `make serve`, or set {serve_state.STATE_VARIABLE} to its folder",
            Code.NOT_RUNNING,
        )
    return Client(state.grpc, state.model_name)


def generate(prompt: str, **parameters: Parameter) -> str:
    """Continue `prompt` on the running server; see `Client.generate`."""
    with connect() as client:
        return client.generate(prompt, **parameters).text


def stream(prompt: str, **parameters: Parameter) -> Iterator[str]:
    """Continue `prompt` on the running server, streaming the text; see `Client.stream`."""
    with connect() as client:
        for chunk in client.stream(prompt, **parameters):
            yield chunk.text

"""The interface that a client uses; Triton's gRPC and OpenAI's HTTP have one file each."""

from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from lathe_base.errors import Code, UserError
from lathe_serving.runtime.protocol import Chunk, TokenScores

Parameter = int | float | str | bool | None
Parameters = Mapping[str, Parameter]


class Transport(Protocol):
    """One model on one server, for any number of threads."""

    def chunks(self, prompt: str, parameters: Parameters) -> Generator[Chunk]:
        """Generate; closing the iterator cancels the generation."""

    def scores(self, arrays: Mapping[str, NDArray[Any]]) -> TokenScores:
        """Score, given the inputs `TOKENS` or `TEXTS` of `lathe_serving.runtime.protocol`."""

    def served_digest(self) -> str:
        """SHA-256 of the served `model.onnx`."""

    def close(self) -> None:
        """Close the connection and every stream that is still open."""


class AsyncTransport(Protocol):
    """One model on one server, for any number of tasks of one event loop."""

    def chunks(self, prompt: str, parameters: Parameters) -> AsyncGenerator[Chunk]:
        """Generate; closing the iterator cancels the generation."""

    async def close(self) -> None:
        """Close the connection and every stream that is still open."""


def utf8(text: str, what: str = "prompt") -> bytes:
    """The text's bytes.

    Args:
        what: its name in the error.

    Raises:
        UserError: it has an unpaired surrogate.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{what}: not UTF-8 at character {error.start}",
            "convert it, for instance with iconv -t utf-8",
            Code.MALFORMED,
        ) from None

"""Generation requests to Triton, and its responses, as gRPC messages."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2  # type: ignore[import-untyped]
from tritonclient.utils import deserialize_bytes_tensor  # type: ignore[import-untyped]

from lathe_base.errors import Code, StageError, UserError, parse_code
from lathe_serving.client.transport import Parameter
from lathe_serving.runtime.protocol import CODE, Chunk

CHANNEL_OPTIONS = [("grpc.enable_http_proxy", 0)]
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
            continue
        try:
            setattr(message.parameters[name], PARAMETER_FIELD[type(value)], value)
        except ValueError:
            raise UserError(
                f"{name} {value}: out of range", "give a smaller number", Code.INVALID_VALUE
            ) from None
    return message


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


def response_chunks(response: Any) -> list[Chunk]:
    """The chunks of a `ModelInferResponse`, one per sequence."""
    raw = {
        output.name: content
        for output, content in zip(response.outputs, response.raw_output_contents, strict=True)
    }
    reasons, counts = _texts(raw, "finish_reason"), _numbers(raw, "token_count")
    prompts = _numbers(raw, "prompt_token_count") or [0] * len(counts)
    cached = _numbers(raw, "cached_token_count") or [0] * len(counts)
    tokens, names = iter(_numbers(raw, "tokens")), iter(_texts(raw, "token_names"))
    lengths = iter(_numbers(raw, "text_lengths"))
    logprobs = iter(_numbers(raw, "log_probabilities", np.float32))
    top_logprobs = _numbers(raw, "top_log_probabilities", np.float32)
    named = zip(_texts(raw, "top_names"), top_logprobs, strict=True)
    tops = iter([dict(islice(named, count)) for count in _numbers(raw, "top_count")])
    parts = zip(
        _texts(raw, "text_output"),
        counts,
        reasons,
        _numbers(raw, "sequence"),
        prompts,
        cached,
        strict=True,
    )
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


def _numbers(raw: dict[str, bytes], name: str, kind: type[Any] = np.int64) -> list[Any]:
    content = raw.get(name, b"")
    return list(np.frombuffer(content, kind).tolist())


def _texts(raw: dict[str, bytes], name: str) -> list[Any]:
    return [text.decode() for text in deserialize_bytes_tensor(raw.get(name, b""))]
